"""The recipe for ops: what follows from one declaration."""

import inspect
import random
from typing import Any

import pytest
import torch
import torch._inductor.config
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.decorators import mark_unbacked
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import mla_compile.passes.pipeline  # noqa: F401 - it imports the ops that passes alone emit
from mla_compile import MLAError, mla_decode
from mla_compile.ops import library, validate
from mla_compile.ops.attention.norm_rope import mla_norm_rope_append
from mla_compile.ops.library import define_op, empty, implementations, schema_of
from tests.kernel_cases import decode_case, metadata_args, moe_case, norm_rope_append_case
from tests.ops.rotate_queries import rotation_case
from tests.ops.routing import router_args
from tests.ops.sample_tokens import sample_args

SCHEMAS = {
    "mla_append": "(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping) -> ()",
    "mla_norm_rope_append": (
        "(Tensor kv_a, Tensor weight, Tensor cos, Tensor sin, Tensor(a!) kv_cache, Tensor slot_mapping, float eps, "
        "bool interleaved_in, bool interleaved_out, Tensor(b!)? q_pe=None) -> ()"
    ),
    "mla_rotate_queries": (
        "(Tensor(a!) q_pe, Tensor cos, Tensor sin, bool interleaved_in, bool interleaved_out) -> ()"
    ),
    "materialize": "(Tensor x) -> Tensor",
    "moe_router": (
        "(Tensor x, Tensor weight, Tensor? bias, SymInt topk, SymInt num_groups, SymInt topk_groups, bool softmax, "
        "bool normalize, float scaling, bool batch_invariant=False) -> (Tensor weights, Tensor ids)"
    ),
    "mla_sparse_attention": (
        "(Tensor q_latent, Tensor q_pe, Tensor kv_cache, Tensor selected, float softmax_scale) -> Tensor"
    ),
    "mla_select_keys": (
        "(Tensor q, Tensor k, Tensor weights, Tensor(a!) index_cache, Tensor? decode_seq_lens, "
        "Tensor? decode_block_table, Tensor? decode_slot_mapping, Tensor? decode_q_lens, "
        "Tensor? prefill_cu_seqlens_q, Tensor? prefill_slot_mapping, Tensor? prefill_key_slots, "
        "Tensor? prefill_cu_seqlens_k, SymInt q_len, int page_size, SymInt topk) -> Tensor"
    ),
    "mla_decode_select": (
        "(Tensor q, Tensor weights, Tensor index_cache, Tensor block_table, Tensor seq_lens, Tensor? q_lens, "
        "SymInt q_len, SymInt topk) -> Tensor"
    ),
    "mla_prefill_select": (
        "(Tensor q, Tensor weights, Tensor index_cache, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
        "Tensor key_slots, SymInt topk) -> Tensor"
    ),
    "mla_decode_metadata": (
        "(Tensor num_cached, Tensor block_table, Tensor? q_lens, SymInt q_len, int page_size) -> "
        "(Tensor seq_lens, Tensor valid, Tensor slot_mapping, Tensor positions)"
    ),
    "mla_prefill_metadata": (
        "(Tensor lens, Tensor bounds, Tensor block_table, SymInt tokens, SymInt keys, int page_size) -> "
        "(Tensor cu_seqlens_q, Tensor seq_lens, Tensor slot_mapping, Tensor positions, Tensor key_slots, "
        "Tensor cu_seqlens_k)"
    ),
    "mla_decode": (
        "(Tensor q_latent, Tensor q_pe, Tensor kv_cache, Tensor block_table, Tensor seq_lens, Tensor? q_lens, "
        "SymInt q_len, float softmax_scale, str? backend=None, Tensor[]? plan=None, bool batch_invariant=False) "
        "-> (Tensor out, Tensor lse)"
    ),
    "mla_masked_decode": (
        "(Tensor q_latent, Tensor q_pe, Tensor kv_c, Tensor k_pe, Tensor? mask, float softmax_scale) -> Tensor"
    ),
    "mla_prefill": (
        "(Tensor q, Tensor kv_cache, Tensor w_uk, Tensor w_uv, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
        "Tensor key_slots, float softmax_scale, Tensor? before=None, bool batch_invariant=False) -> Tensor"
    ),
    "moe_experts": (
        "(Tensor x, Tensor topk_weights, Tensor topk_ids, Tensor w_gate_up, Tensor w_down, Tensor? row_lens=None, "
        "SymInt q_len=1, Tensor? shared_gate=None, Tensor? shared_up=None, Tensor? shared_down=None, "
        "Tensor? gate_up_scale=None, Tensor? down_scale=None, Tensor? shared_gate_scale=None, "
        "Tensor? shared_up_scale=None, Tensor? shared_down_scale=None, bool fp8_activations=False, "
        "bool batch_invariant=False) -> Tensor"
    ),
    "fp8_linear": (
        "(Tensor x, Tensor first, Tensor first_scale, Tensor? second=None, Tensor? second_scale=None, "
        "bool fp8_activations=False, bool batch_invariant=False) -> Tensor"
    ),
    "batch_invariant_matmul": "(Tensor x, Tensor w) -> Tensor",
    "batch_invariant_sum": "(Tensor x) -> Tensor",
    "row_argmax": "(Tensor x) -> Tensor",
    "sample_tokens": (
        "(Tensor logits, Tensor position, Tensor seed, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p) "
        "-> Tensor"
    ),
    "all_reduce": "(Tensor x, bool batch_invariant=False) -> Tensor",
    "all_gather": "(Tensor x, int num_parts) -> Tensor",
    "fused_linear": "(Tensor x, Tensor first, Tensor? second=None, bool batch_invariant=False) -> Tensor",
    "norm_linear": (
        "(Tensor x, Tensor? residual, Tensor? norm_weight, float eps, Tensor first, Tensor? second=None, "
        "bool batch_invariant=False) -> (Tensor product, Tensor total)"
    ),
    "norm_router": (
        "(Tensor x, Tensor residual, Tensor? norm_weight, float eps, Tensor weight, Tensor? bias, SymInt topk, "
        "SymInt num_groups, SymInt topk_groups, bool softmax, bool normalize, float scaling, "
        "bool batch_invariant=False) -> (Tensor normed, Tensor total, Tensor weights, Tensor ids)"
    ),
    "mla_decode_plan": (
        "(Tensor q_latent, Tensor q_pe, Tensor kv_cache, Tensor block_table, Tensor seq_lens, Tensor? q_lens, "
        "SymInt q_len, float softmax_scale, SymInt place, str? backend) -> Tensor[]"
    ),
    "matmul_by_head": "(Tensor x, Tensor w) -> Tensor",
    "fused_rms_norm": "(Tensor x, Tensor? weight, float eps) -> Tensor",
    "fused_add_rms_norm": "(Tensor x, Tensor residual, Tensor? weight, float eps) -> (Tensor normed, Tensor total)",
    "all_reduce_add_rms_norm": (
        "(Tensor x, Tensor residual, Tensor? weight, float eps, bool batch_invariant=False) -> "
        "(Tensor normed, Tensor total)"
    ),
    "mla_attention": (
        "(Tensor q_nope, Tensor q_pe, Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor w_uk, Tensor w_uv, "
        "Tensor? decode_seq_lens, Tensor? decode_block_table, Tensor? decode_slot_mapping, Tensor? decode_q_lens, "
        "Tensor? prefill_cu_seqlens_q, Tensor? prefill_slot_mapping, Tensor? prefill_key_slots, "
        "Tensor? prefill_cu_seqlens_k, SymInt q_len, int page_size, float softmax_scale, str? decode_backend=None, "
        "Tensor? selected=None) -> Tensor"
    ),
}
"""What saved graphs and passes rely on."""
NOT_CAPTURED = {"mla_attention"}


def test_schemas_are_what_graphs_and_passes_rely_on() -> None:
    assert SCHEMAS.keys() == implementations.keys()
    for name, schema in SCHEMAS.items():
        op = getattr(torch.ops.mla_compile, name).default
        assert str(op._schema) == f"mla_compile::{name}{schema}"
        assert torch.Tag.pt2_compliant_tag in op.tags
        assert (torch.Tag.cudagraph_unsafe in op.tags) == (name in NOT_CAPTURED)


KINDS = {
    "y: Tensor | None": "Tensor? y",
    "n: int": "SymInt n",
    "page_size: int": "int page_size",
    "scale: float": "float scale",
    "flag: bool": "bool flag",
    "name: str | None": "str? name",
}


@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=False))
def test_a_drawn_signature_becomes_its_schema(draw: random.Random) -> None:
    """In any order, with keywords and defaults: the op has the defaults after the last argument without one."""
    kinds = draw.sample(list(KINDS), draw.randint(0, 6))
    first_keyword, first_default = draw.randint(0, len(kinds)), draw.randint(0, len(kinds))
    has_default = [i >= min(first_keyword, first_default) and draw.random() < 0.5 for i in range(len(kinds))]
    if first_keyword > first_default:  # among positional parameters too, defaults come last
        has_default[first_default:first_keyword] = [True] * (first_keyword - first_default)
    words, expected = ["x: Tensor"], ["Tensor x"]
    for i, kind in enumerate(kinds):
        words += ["*"] * (i == first_keyword) + [f"{kind} = None" if has_default[i] else kind]
        expected.append(KINDS[kind] + ("=None" if all(has_default[i:]) else ""))
    space: dict[str, Any] = {"Tensor": Tensor}
    exec(f"def declaration({', '.join(words)}) -> Tensor: ...", space)
    schema = schema_of("drawn", space["declaration"], static="page_size")
    assert schema == f"drawn({', '.join(expected)}) -> Tensor"


def test_a_new_op_is_called_by_position_with_its_defaults_filled_in() -> None:
    seen = []

    def run(*args: Any) -> Tensor:
        seen.append(args[1:])
        return args[0].clone()

    @define_op(run=run)
    def new_op(
        x: Tensor, n: int, *, y: Tensor | None = None, scale: float, name: str | None = None
    ) -> Tensor:
        return empty(x, x.shape)

    x = torch.ones(2)
    for call in (new_op, torch.compile(new_op, backend="eager", fullgraph=True)):
        seen.clear()
        call(x, 3, scale=0.5)
        call(x, n=3, scale=0.5, name="a")
        assert seen == [(3, None, 0.5, None), (3, None, 0.5, "a")]
    del implementations["new_op"], library.tables["new_op"]


def test_a_call_with_a_wrong_name_is_refused_compiled_or_not() -> None:
    *tensors, q_lens, q_len, scale = decode_case([5, 3]).args()

    def call(*tensors: Tensor) -> Any:
        return mla_decode(*tensors, q_len=q_len, softmax_scale=scale, q_lens=q_lens, page=3)

    for run in (call, torch.compile(call, backend="eager", fullgraph=True)):
        with pytest.raises(Exception, match="page"):
            run(*tensors)


def test_an_eager_call_allocates_no_declared_result() -> None:
    x = torch.ones(3)
    assert empty(x, (5,)) is x
    assert empty(x.to("meta"), (5,), torch.int64).shape == (5,)
    with FakeTensorMode() as mode:
        made = empty(mode.from_tensor(x), (5,), torch.int64)
    assert made.shape == (5,) and made.dtype == torch.int64


def unbacked(args: tuple[Any, ...], varying: dict[int, int], shapes: ShapeEnv) -> tuple[Any, ...]:
    """Fake arguments; those of `varying` have an unbacked size in dimension 0, the same one for the same number."""
    mode, sizes = (
        FakeTensorMode(shape_env=shapes),
        {n: shapes.create_unbacked_symint() for n in varying.values()},
    )

    def made(i: int, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        with mode:
            return torch.empty((sizes[varying[i]], *x.shape[1:]) if i in varying else x.shape, dtype=x.dtype)

    return tuple(made(i, x) for i, x in enumerate(args))


@pytest.mark.parametrize(
    ("op", "args", "varying"),
    [
        ("mla_decode", decode_case([5, 3], q_len=1).args(), {0: 0, 1: 0, 3: 1, 4: 1}),
        ("moe_experts", moe_case(4, 2).args(), {0: 0, 1: 0, 2: 0}),
        ("moe_router", tuple(router_args("v3", 4, 32, torch.float32)), {0: 0}),
        ("mla_norm_rope_append", norm_rope_append_case(4, heads=2), {0: 0, 2: 0, 3: 0, 5: 0, 9: 0}),
        ("mla_rotate_queries", rotation_case(4), {0: 0, 1: 0, 2: 0}),
        ("row_argmax", (torch.randn(3, 8),), {0: 0}),
        ("sample_tokens", sample_args(3, 2, 8), dict.fromkeys(range(7), 0)),
        ("matmul_by_head", (torch.randn(4, 2, 8), torch.randn(2, 8, 3)), {0: 0}),
        ("mla_decode_metadata", metadata_args(3, 4, ragged=True), {0: 0, 1: 0, 2: 0}),
    ],
    ids=[
        "decode",
        "experts",
        "router",
        "norm_rope_append",
        "rotate_queries",
        "row_argmax",
        "sample_tokens",
        "by_head",
        "metadata",
    ],
)
def test_checks_of_unbacked_sizes_add_no_guard(
    op: str, args: tuple[Any, ...], varying: dict[int, int]
) -> None:
    shapes = ShapeEnv()
    getattr(torch.ops.mla_compile, op).default(*unbacked(args, varying, shapes))
    assert not shapes.guards


def test_a_layouts_words_are_sizes_in_any_place() -> None:
    sizes = validate.Layouts("batch.")
    given = {"x": torch.ones(3, 8), "w": torch.ones(5, 8)}
    sizes.tensors({"x": "tokens, hidden", "w": "rank, hidden"}, given)
    sizes.check("cache", torch.ones(13, 16), "rank + hidden, 2 * hidden")
    sizes.check("shared", torch.ones(1, 4), "tokens or 1, tokens + 1")
    for name, shape, layout, message in (
        ("y", (4,), "tokens", r"\b3\b.*tokens of x.*dimension 0.*\[4\]"),
        ("y", (3, 14), "tokens, rank + hidden", r"\b13\b.*rank \+ hidden.*dimension 1.*\[3, 14\]"),
        ("y", (2,), "tokens or 1", r"\b3\b.*tokens of x.*\b1\b.*dimension 0.*\[2\]"),
        ("y", (3,), "tokens, hidden", r"2 dimensions.*\[tokens, hidden\].*\b1\b.*\[3\]"),
    ):
        with pytest.raises(MLAError, match=rf"^batch\.{name}: .*{message}"):
            sizes.check(name, torch.ones(shape), layout)


def test_the_checked_call_looks_like_its_declaration() -> None:
    assert str(inspect.signature(mla_norm_rope_append)).startswith(
        "(kv_a: torch.Tensor, weight: torch.Tensor"
    )
    assert mla_norm_rope_append.__name__ == "mla_norm_rope_append" and mla_norm_rope_append.__doc__
    assert mla_norm_rope_append.__module__ == "mla_compile.ops.attention.norm_rope"


@pytest.mark.long
def test_a_cache_that_a_graph_computes_is_attended_to() -> None:
    """Inductor may choose another layout for queries, which may have any strides; not for the cache."""
    case = decode_case([5, 3])
    *queries, cache, table, lens = case.args()[:5]

    def attend(mirrored: Tensor) -> Tensor:
        cache = (2 * mirrored).permute(0, 2, 1).contiguous()
        return mla_decode(*queries, cache, table, lens, q_len=1, softmax_scale=0.2)[0]

    mirrored = cache.permute(0, 2, 1).contiguous()
    compiled = torch.compile(attend, backend="mla", fullgraph=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        torch.testing.assert_close(compiled(mirrored), attend(mirrored))


@pytest.mark.long
def test_inductor_copies_no_query_where_the_number_of_rows_is_unknown() -> None:
    """If strides had to be those of the example, it would: n rows and max(1, n) rows have different ones."""

    def attend(q: Tensor, w_uk: Tensor, *args: Any) -> Tensor:
        q_nope, q_pe = q.split([w_uk.shape[1], q.shape[2] - w_uk.shape[1]], dim=-1)
        q_latent = torch.einsum("thn,hnl->thl", q_nope, w_uk)
        return mla_decode(q_latent, q_pe, *args, q_len=1, softmax_scale=0.2)[0]

    case = decode_case([5, 3])
    tokens, heads, rank = case.q_latent.shape
    q = torch.randn(heads, tokens, 6 + case.q_pe.shape[2]).transpose(
        0, 1
    )  # the layout of the models of transformers
    inputs = q, torch.randn(heads, 6, rank), case.kv_cache, case.block_table, case.seq_lens
    for x in (q, case.block_table, case.seq_lens):
        mark_unbacked(x, 0)
    compiled = torch.compile(attend, backend="mla", fullgraph=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        out, (code,) = run_and_get_code(compiled, *inputs)
    torch.testing.assert_close(out, attend(*inputs))
    assert "bmm" in code and "cpp_fused" not in code
