"""Selection of keys and attention over them on a CUDA device, and engines of models with indexers."""

import copy

import pytest
import torch

from mla_compile import Engine
from mla_compile.models import MLAForCausalLM
from mla_compile.ops.attention.select_keys import (
    decode_select_op,
    decode_select_torch,
    prefill_select_op,
    prefill_select_torch,
)
from mla_compile.ops.attention.sparse import SPARSE, sparse_op
from mla_compile.ops.dispatch import FLOATS
from mla_compile.ops.library import call_of, choose
from tests.cases import make_case
from tests.kernel_cases import check_sparse, sparse_case
from tests.models.small import glm5_config, randomize, v32_config

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize(
    ("dtype", "fp8"),
    [*((dtype, False) for dtype in FLOATS), *((dtype, True) for dtype in FLOATS)],
    ids=str,
)
@pytest.mark.parametrize("counts", [[2048], [0, 1, 64, 65, 2047, 2048], [2048, 100] * 40], ids=len)
def test_sparse_attention_equals_the_definition_by_every_kernel(
    counts: list[int], dtype: torch.dtype, fp8: bool, heads: int
) -> None:
    sizes = {"heads": heads, "rank": 512, "rope": 64, "slots": 20_000}
    case = sparse_case(counts, topk=2048, dtype=dtype, fp8=fp8, device="cuda", **sizes)
    call = call_of("mla_sparse_attention", case)
    able = [candidate for candidate in SPARSE if candidate.why_not(call) is None]
    assert {"triton", "reference"} <= {candidate.name for candidate in able}
    for candidate in able:
        check_sparse(case, candidate.load()(*case))


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_captured_sparse_attention_has_the_bits_of_an_eager_call(
    dtype: torch.dtype, fp8: bool, heads: int
) -> None:
    sizes = {"heads": heads, "rank": 512, "rope": 64, "slots": 20_000}
    case = sparse_case([0, 1, 64, 65, 2047, 2048], topk=2048, dtype=dtype, fp8=fp8, device="cuda", **sizes)
    expected = sparse_op(*case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sparse_op(*case)
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_selections_are_those_of_plain_torch(dtype: torch.dtype, heads: int) -> None:
    """Small integers: every sum is exact, and many scores are equal."""
    case = make_case([300, 0, 5000, 9000], [(70, 9000), (300, 0)], q_len=2, page_size=64, dtype=dtype)
    d, p = case.batch.decode, case.batch.prefill
    assert d is not None
    assert p is not None

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, device="cuda").to(dtype)

    tokens, n = case.q_nope.shape[0], len(d.slot_mapping)
    q, weights, cache = (
        whole(tokens, heads, 128),
        whole(tokens, heads).float(),
        whole(len(case.kv_cache), 64, 128),
    )
    rows = d.block_table.clamp(max=len(cache) - 1).cuda(), d.seq_lens.cuda(), None, 2, 2048
    keys = p.cu_seqlens_q.cuda(), p.cu_seqlens_k.cuda(), p.key_slots.cuda(), 2048
    decode, prefill = (q[:n], weights[:n], cache, *rows), (q[n:], weights[n:], cache, *keys)
    for op, twin, args in (
        (decode_select_op, decode_select_torch, decode),
        (prefill_select_op, prefill_select_torch, prefill),
    ):
        assert choose(op._schema.name.partition("::")[2], args).chosen.name == "triton"
        assert torch.equal(op(*args), twin(*args))


@pytest.mark.parametrize("config", [v32_config(), glm5_config()], ids=["v3.2", "glm 5"])
def test_captured_steps_give_the_tokens_of_eager_ones(config) -> None:
    model = MLAForCausalLM(config, mtp=True)
    randomize(model)
    prompts = [list(range(1, 1 + n)) for n in (1, 6, 7, 25)]
    settings = {"max_rows": 2, "max_model_len": 48, "page_size": 4}
    expected = None
    for where, k in (("cpu", 0), ("cuda", 0), ("cuda", 2)):
        served = copy.deepcopy(model).to(where)
        engine = Engine(served, num_speculative_tokens=k, compile=where == "cuda", **settings)
        found = [c.token_ids for c in engine.generate(prompts, max_new_tokens=16, stop_ids=[])]
        expected = expected or found
        assert found == expected, f"{where}, {k} drafts"
