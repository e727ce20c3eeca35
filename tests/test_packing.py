"""`pack_batch`: which rows decode and which prefill, where their tokens go, and how many graphs all batches make."""

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.utils._pytree import tree_leaves, tree_map

from mla_compile import MLABatch, MLAError, PackedBatch, decode_segment, mla_attention, pack_batch
from mla_compile.caches import allocate
from mla_compile.ops.attention import decode_backends
from mla_compile.ops.attention.decode_backends import DECODE_BACKENDS, QueryLenSupport, select_backend
from mla_compile.ops.attention.operands import DecodeOperands
from mla_compile.packing import RowLayout, classify
from mla_compile.passes import pipeline
from mla_compile.torch_internals import know_least_sizes, statically_known_true
from tests.cases import make_case, relative_error
from tests.kernel_cases import BACKENDS
from tests.models_for_tests import tiny_model
from tests.passes.capture import HIDDEN, MAX_ROWS, PAGE_SIZE, PAGES_PER_ROW, Layer
from tests.reference import mla_attention_reference

SINGLE_ONLY, UNIFORM, VARLEN = QueryLenSupport


# --- which rows decode


def dealt(lens: list[int], threshold: int, support: QueryLenSupport, *, padded: bool = False) -> RowLayout:
    return classify(lens, [True] * len(lens), threshold=threshold, support=support, padded=padded)


@pytest.mark.parametrize("support", QueryLenSupport)
@pytest.mark.parametrize("padded", [False, True])
def test_rows_of_one_length_all_decode(support: QueryLenSupport, padded: bool) -> None:
    assert dealt([2, 2, 2, 2], 2, support, padded=padded) == RowLayout([0, 1, 2, 3], q_len=2, prefill=[])


def test_the_shortest_rows_govern_a_uniform_backend_without_padding() -> None:
    assert dealt([1, 2, 2, 1], 2, UNIFORM) == RowLayout(decode=[0, 3], q_len=1, prefill=[1, 2])


@pytest.mark.parametrize("support", [VARLEN, SINGLE_ONLY])  # the latter gets them flattened
def test_rows_of_any_length_decode_where_the_backend_takes_them(support: QueryLenSupport) -> None:
    assert dealt([1, 2, 2, 1], 4, support) == RowLayout(decode=[0, 1, 2, 3], q_len=2, prefill=[])


@pytest.mark.parametrize("support", QueryLenSupport)
def test_padded_rows_all_decode_in_one_shape(support: QueryLenSupport) -> None:
    assert dealt([1, 2, 2, 1], 4, support, padded=True) == RowLayout([0, 1, 2, 3], q_len=4, prefill=[])


def test_rows_beyond_the_threshold_prefill() -> None:
    assert dealt([3, 1, 9], 1, SINGLE_ONLY) == RowLayout([1], 1, [0, 2])
    assert dealt([5, 6], 4, VARLEN, padded=True) == RowLayout([], 0, [0, 1])


def test_a_row_that_has_not_sampled_prefills_whatever_its_length() -> None:
    found = classify([4, 4, 1], [True, False, False], threshold=4, support=VARLEN, padded=True)
    assert found == RowLayout(decode=[0], q_len=4, prefill=[1, 2])


@given(
    st.lists(st.tuples(st.integers(1, 9), st.booleans())),
    st.integers(1, 9),
    st.sampled_from(QueryLenSupport),
    st.booleans(),
)
def test_every_row_is_placed_once_and_within_the_backends_constraints(
    rows: list[tuple[int, bool]], threshold: int, support: QueryLenSupport, padded: bool
) -> None:
    lens, has_sampled = [n for n, _ in rows], [sampled for _, sampled in rows]
    found = classify(lens, has_sampled, threshold=threshold, support=support, padded=padded)
    assert sorted(found.decode + found.prefill) == list(range(len(lens)))
    own = {lens[row] for row in found.decode}
    assert all(has_sampled[row] for row in found.decode)
    assert all(length <= min(threshold, found.q_len) for length in own)
    if support is UNIFORM and not padded:
        assert len(own) <= 1
    else:
        assert all(lens[row] > threshold or not has_sampled[row] for row in found.prefill)


# --- packed rows against each row's whole text, in float64

HEADS, NOPE, ROPE, RANK, V = 3, 6, 4, 16, 5


def whole_text(lens: Sequence[int], seed: int) -> list[Tensor]:
    """q_nope, q_pe, kv_c, k_pe of the rows' whole texts, concatenated."""
    g = torch.Generator().manual_seed(seed)
    shapes = ((HEADS, NOPE), (HEADS, ROPE), (RANK,), (ROPE,))
    return [torch.randn(sum(lens), *shape, generator=g, dtype=torch.float64) for shape in shapes]


def check_packed(
    query_lens: list[int],
    num_cached: list[int],
    has_sampled: list[bool],
    *,
    page_size: int = 4,
    seed: int = 0,
    **options: Any,
) -> PackedBatch:
    """Rows that hold `num_cached` tokens run `query_lens` more, packed; compared with one pass over whole texts."""
    totals = [n + c for n, c in zip(query_lens, num_cached)]
    g = torch.Generator().manual_seed(seed)
    columns = max(-(-n // page_size) for n in totals)
    pages = 1 + len(totals) * columns
    table = (1 + torch.randperm(pages - 1, generator=g)).int().view(len(totals), columns)
    w_uk, w_uv = torch.randn(HEADS, NOPE, RANK).double() / 4, torch.randn(HEADS, RANK, V).double() / 4
    text = whole_text(totals, seed)

    def run(function: Callable[..., Tensor], cache: Tensor, packed: PackedBatch) -> Tensor:
        return function(*packed.tensors, cache, w_uk, w_uv, packed.batch, 0.2)[packed.order]

    fresh = [False] * len(totals)
    expected_cache = torch.full((pages, page_size, RANK + ROPE), torch.nan).double()
    whole = pack_batch(
        totals, [0] * len(totals), table, *text, has_sampled=fresh, page_size=page_size, pad=False
    )
    expected = run(mla_attention_reference, expected_cache, whole)

    cache = torch.full_like(expected_cache, torch.nan)
    new = torch.cat([torch.arange(n) >= c for n, c in zip(totals, num_cached)])
    if not new.all():
        held = [row for row, count in enumerate(num_cached) if count]
        before = pack_batch(
            [num_cached[row] for row in held],
            [0] * len(held),
            table[held],
            *(t[~new] for t in text),
            has_sampled=[False] * len(held),
            page_size=page_size,
        )
        run(mla_attention, cache, before)
    packed = pack_batch(
        query_lens,
        num_cached,
        table,
        *(t[new] for t in text),
        has_sampled=has_sampled,
        page_size=page_size,
        **options,
    )
    assert packed.positions[packed.order].tolist() == [
        position for n, c in zip(totals, num_cached) for position in range(c, n)
    ]
    assert relative_error(run(mla_attention, cache, packed), expected[new]) < 1e-11
    torch.testing.assert_close(cache, expected_cache, rtol=0, atol=0, equal_nan=True)  # padding wrote nowhere
    return packed


@pytest.fixture
def uniform(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a backend that takes one query length in all rows, and refuses anything else."""
    row = replace(
        BACKENDS["reference"],
        name="uniform",
        query_len_support=UNIFORM,
        function="tests.test_packing:decode_uniform",
        constraints={"dtype": (torch.float64,)},
    )
    monkeypatch.setattr(decode_backends, "DECODE_BACKENDS", (*DECODE_BACKENDS, row))
    select_backend.cache_clear()
    monkeypatch.setattr(decode_uniform, "calls", [])
    return "uniform"


def decode_uniform(operands: DecodeOperands) -> tuple[Tensor, Tensor]:
    from mla_compile.ops.attention.decode import decode_torch

    assert operands.q_lens is None, "q_lens of a backend that cannot take them"
    decode_uniform.calls.append(operands.q_len)
    return decode_torch(operands)


decode_uniform.calls = []

ROWS_1221 = {"query_lens": [1, 2, 2, 1], "num_cached": [5, 9, 3, 8], "has_sampled": [True] * 4}


def test_rows_of_lengths_1_2_2_1_on_a_uniform_backend_equal_the_definition(uniform: str) -> None:
    packed = check_packed(**ROWS_1221, num_speculative_tokens=1, backend=uniform, pad=False)
    assert packed.batch.decode.q_len == 1 and packed.batch.decode.q_lens is None
    assert packed.batch.prefill.host_lens.tolist() == [[2, 11], [2, 5]]
    assert decode_uniform.calls == [1]


def test_rows_of_lengths_1_2_2_1_on_a_varlen_backend_equal_the_definition() -> None:
    packed = check_packed(**ROWS_1221, num_speculative_tokens=1, pad=False)
    assert packed.batch.prefill is None
    assert packed.batch.decode.q_lens.tolist() == [1, 2, 2, 1]


def test_padded_rows_on_a_uniform_backend_are_flattened_and_equal_the_definition(uniform: str) -> None:
    packed = check_packed(**ROWS_1221, num_speculative_tokens=3, backend=uniform)
    assert packed.batch.prefill is None and packed.batch.decode.q_len == 4
    assert decode_uniform.calls == [1]


@pytest.mark.long
@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20), st.booleans()), min_size=1, max_size=6),
    st.integers(0, 4),
    st.sampled_from([1, 2, 16]),
    st.booleans(),
    st.integers(0, 99),
)
def test_drawn_rows_equal_the_definition(
    rows: list[tuple[int, int, bool]], drafts: int, page_size: int, pad: bool, seed: int
) -> None:
    query_lens, num_cached, sampled = (list(column) for column in zip(*rows))
    packed = check_packed(
        query_lens,
        num_cached,
        sampled,
        page_size=page_size,
        seed=seed,
        num_speculative_tokens=drafts,
        pad=pad,
    )
    decode, prefill = packed.batch.decode, packed.batch.prefill
    if pad and decode is not None:
        rows_in_bucket = decode.seq_lens.shape[0]
        assert decode.q_len == 1 + drafts and rows_in_bucket.bit_count() == 1
    if pad and prefill is not None:
        assert prefill.slot_mapping.shape[0] % 16 == 0
    tensors = [packed.positions, packed.order, *packed.tensors, *tree_leaves(packed.batch)]
    # No views of one tensor: Dynamo would guard on their shared storage.
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


# --- graphs


class Model(nn.Module):
    """A user's module: embedding, positions, a layer and a head."""

    def __init__(self, num_ids: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_ids, HIDDEN)
        self.layer = Layer()

    def forward(
        self, ids: Tensor, scale: Tensor, positions: Tensor, batch: MLABatch, last: Tensor | None = None
    ) -> Tensor:
        angles = positions[:, None] * torch.arange(1, HIDDEN + 1, device=positions.device)
        x = self.embedding(ids) + angles.sin() * scale[:, None]
        x = self.layer(x, batch)
        x = x if last is None else x.index_select(0, last)
        return x.view(x.shape[0], 2, -1).softmax(-1).flatten(1) @ self.embedding.weight.T


class CountedGraphs:
    """A backend that runs the passes, hands the graph to AOTAutograd and counts."""

    def __init__(self) -> None:
        self.kinds: list[list[str]] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        gm = pipeline.run(gm, example_inputs)
        ops = {str(node.target).split(".")[1] for node in gm.graph.nodes if "mla_" in str(node.target)}
        self.kinds.append(sorted(ops & {"mla_decode", "mla_prefill"}))
        return lookup_backend("aot_eager")(gm, list(example_inputs))


# (query tokens, tokens held, whether the row has sampled): one row, one token, a full bucket, tables of any width, ...
KINDS = [
    [(1, 3, True), (2, 5, True)],
    [(1, 3, True)],
    [(1, 3, True), (3, 5, True), (2, 7, True)],
    [(5, 0, False)],
    [(5, 0, False), (3, 2, False)],
    [(1, 3, True), (5, 0, False), (2, 5, True)],
    [(1, 3, True), (2, 0, False)],
    [(1, 0, False), (1, 3, True)],
    [(1, 4, False)],
    [(3, i, True) for i in range(3, 7)] + [(4, 0, False)],
    [(5, 0, False)] * 5 + [(1, i, True) for i in range(1, 6)],
    [(2, 2, True)] * 8,
    [(1, 2, True)],
    [(7, 1, False), (2, 3, True), (1, 5, True)],
]


def packed_rows(
    rows: Sequence[tuple[int, int, bool]], *, drafts: int, seed: int = 0, **options: Any
) -> PackedBatch:
    query_lens, num_cached, has_sampled = (list(column) for column in zip(*rows))
    g = torch.Generator().manual_seed(seed)
    width = max(-(-(n + c) // PAGE_SIZE) for n, c, _ in rows)
    table = 1 + torch.arange(MAX_ROWS * PAGES_PER_ROW, dtype=torch.int32).view(MAX_ROWS, -1)
    ids = torch.randint(32, (sum(query_lens),), generator=g)
    scale = torch.randn(sum(query_lens), generator=g)
    return pack_batch(
        query_lens,
        num_cached,
        table[: len(rows), :width],
        ids,
        scale,
        has_sampled=has_sampled,
        page_size=PAGE_SIZE,
        num_speculative_tokens=drafts,
        **options,
    )


class DeepSeek(nn.Module):
    """A model with routed experts, which skip padding; called like `Model`."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_model(torch.float32)
        allocate(self.model.cache_specs(), 1 + MAX_ROWS * PAGES_PER_ROW, PAGE_SIZE)

    def forward(self, ids: Tensor, scale: Tensor, positions: Tensor, batch: MLABatch) -> Tensor:
        return self.model.logits(self.model(ids, positions, batch).hidden)


@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "order"),
    [
        (Model, "shuffled"),
        (DeepSeek, "as they are"),
        pytest.param(Model, "as they are", marks=pytest.mark.slow),
        pytest.param(DeepSeek, "shuffled", marks=pytest.mark.slow),
    ],
)
def test_any_batches_make_three_graphs(module: type[nn.Module], order: str) -> None:
    torch.compiler.reset()
    kinds = list(KINDS)
    if order == "shuffled":
        random.Random(1).shuffle(kinds)
    torch.manual_seed(0)
    model = module().requires_grad_(False)
    graphs = CountedGraphs()
    compiled = torch.compile(copy.deepcopy(model), backend=graphs, fullgraph=True)
    for rows in kinds:
        packed = packed_rows(rows, drafts=2)
        args = *packed.tensors, packed.positions, packed.batch
        torch.testing.assert_close(compiled(*args)[packed.order], model(*args)[packed.order])
    expected = [["mla_decode"], ["mla_decode", "mla_prefill"], ["mla_prefill"]]
    assert sorted(graphs.kinds) == expected


@pytest.mark.long
def test_logits_of_the_last_tokens_alone_make_three_graphs_too() -> None:
    torch.compiler.reset()
    model, graphs = Model().requires_grad_(False), CountedGraphs()
    compiled = torch.compile(copy.deepcopy(model), backend=graphs, fullgraph=True)
    for rows in KINDS:
        packed = packed_rows(rows, drafts=2)
        args = *packed.tensors, packed.positions, packed.batch
        ends = torch.tensor([n for n, _, _ in rows]).cumsum(0) - 1
        torch.testing.assert_close(compiled(*args, packed.last), model(*args)[packed.order][ends])
    assert len(graphs.kinds) == 3


def test_the_backend_knows_that_no_size_is_0_and_that_there_are_two_tokens_at_least() -> None:
    least: dict[str, set[bool]] = {}

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        know_least_sizes(example_inputs)
        for node in gm.graph.find_nodes(op="placeholder"):
            value = node.meta["example_value"]
            if isinstance(value, Tensor):
                # Torch 2.11 compares the strides of a CUDA graph's inputs; symbolic ones are an error.
                assert not any(stride == 0 for stride in value.stride())
                assert sorted(value.stride())[0] == 1
                of_tokens = node.target.endswith(("ids_", "positions_", "slot_mapping"))
                for size in value.shape:
                    kind = "tokens" if of_tokens else "others"
                    least.setdefault(kind, set()).add(statically_known_true(size >= 1 + of_tokens))
        return gm.forward

    torch.compiler.reset()
    compiled = torch.compile(Model().requires_grad_(False), backend=backend, fullgraph=True)
    packed = packed_rows([(1, 2, True), (1, 0, False)], drafts=0)  # a token and a page of each kind
    compiled(*packed.tensors, packed.positions, packed.batch)
    assert least == {"tokens": {True}, "others": {True}}


def test_a_module_that_branches_on_a_size_gets_an_error_that_names_the_line() -> None:
    class Branches(Model):
        def forward(self, ids: Tensor, *rest: Any) -> Tensor:
            if ids.shape[0] > 4:  # the line
                ids = ids.flip(0)
            return super().forward(ids, *rest)

    torch.compiler.reset()
    packed = packed_rows(KINDS[0], drafts=2)
    compiled = torch.compile(Branches().requires_grad_(False), backend="mla", fullgraph=True)
    with pytest.raises(Exception, match=r"if ids\.shape\[0\] > 4:  # the line"):
        compiled(*packed.tensors, packed.positions, packed.batch)


def test_batches_of_all_numbers_of_rows_and_tokens_have_few_sizes() -> None:
    sizes = set()
    for count in range(1, MAX_ROWS + 1):
        packed = packed_rows([(1 + count % 3, 2, True)] * count, drafts=2)
        sizes.add(packed.positions.shape[0])
    assert sizes == {3, 6, 12, 24, 48}
    prompts = {packed_rows([(n, 0, False)], drafts=0).positions.shape[0] for n in range(1, 17)}
    assert prompts == {16}


# --- what a batch is to torch


def test_a_batch_is_a_pytree_of_its_tensors() -> None:
    batch = packed_rows(KINDS[5], drafts=2).batch
    leaves = tree_leaves(batch)
    assert len(leaves) == 11 and all(isinstance(leaf, Tensor) for leaf in leaves)
    moved = tree_map(lambda tensor: tensor.clone(), batch)
    assert isinstance(moved, MLABatch)
    assert (moved.decode.q_len, moved.page_size) == (3, PAGE_SIZE)
    assert all(torch.equal(a, b) for a, b in zip(tree_leaves(moved), leaves))
    assert tree_map(torch.clone, packed_rows(KINDS[3], drafts=2).batch).decode is None


def test_a_module_that_takes_a_batch_can_be_exported_saved_and_loaded(tmp_path: Any) -> None:
    model = Model().requires_grad_(False)
    packed = packed_rows(KINDS[5], drafts=2)
    args = *packed.tensors, packed.positions, packed.batch
    args = tree_map(torch.clone, args)  # without the marks: sizes are fixed in an exported program
    expected = copy.deepcopy(model)(*args)
    torch.export.save(torch.export.export(model, args), tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(loaded(*args), expected)


# --- mistakes


def arguments(**changes: Any) -> dict[str, Any]:
    given = {
        "query_lens": [2, 3],
        "num_cached": [4, 0],
        "block_table": torch.tensor([[1, 2], [3, 4]], dtype=torch.int32),
        "has_sampled": [True, False],
        "page_size": 4,
    }
    return {**given, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_lens": [2, 0]}, r"query_lens\[1\]: .*\b0\b.*; "),
        ({"query_lens": [2]}, r"query_lens: .*block_table.*\b2\b.*\b1\b"),
        ({"query_lens": torch.tensor([2, 3])}, r"query_lens: .*list of int.*\.tolist"),
        ({"query_lens": [2.0, 3]}, "query_lens: .*list of int"),
        ({"num_cached": [4, -1]}, r"num_cached\[1\]: .*\b0\b.*-1"),
        ({"num_cached": [7, 0]}, r"row 0: .*\b8\b.*2 pages of 4.*7 \+ 2.*; "),
        ({"has_sampled": [1, 0]}, "has_sampled: .*list of bool"),
        ({"block_table": torch.zeros(2, 2)}, "block_table: .*int32.*float32"),
        ({"block_table": [[1, 2], [3, 4]]}, r"block_table: .*\[rows, max_pages\]"),
        ({"page_size": 0}, r"page_size: .*\b1\b.*\b0\b"),
        ({"page_size": 4.0}, r"page_size: .*integer.*4\.0"),
        ({"num_speculative_tokens": -1}, r"num_speculative_tokens: .*\b0\b.*-1"),
        ({"num_speculative_tokens": 10**9}, r"num_speculative_tokens: .*\[0, 32\], got 1000000000"),
        ({"pad": None}, "pad: expected True or False, got None"),
        ({"backend": "fast"}, "backend: .*reference.*'fast'"),
        ({"backend": "triton"}, "backend: .*reference.*triton.*cuda.*cpu"),
    ],
)
def test_rows_that_cannot_be_packed_are_refused(changes: dict[str, Any], message: str) -> None:
    given = arguments(**changes)
    head = [given.pop(name) for name in ("query_lens", "num_cached", "block_table")]
    with pytest.raises(MLAError, match=f"^{message}"):
        pack_batch(*head, **given)


def test_rows_are_packed_while_another_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """From torch 2.13 on, `is_compiling` is true meanwhile."""
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    packed = packed_rows(KINDS[5], drafts=2)
    Model().requires_grad_(False)(*packed.tensors, packed.positions, packed.batch)


def test_a_batch_of_no_rows_is_refused() -> None:
    with pytest.raises(MLAError, match=r"^block_table: .*row.*\[0, 2\]"):
        pack_batch([], [], torch.zeros(0, 2, dtype=torch.int32), has_sampled=[], page_size=4)


def test_padding_does_not_count_as_a_holder_of_page_0() -> None:
    table = torch.tensor([[0, 1]], dtype=torch.int32)  # of a cache without a dummy page
    packed = pack_batch([5], [0], table, torch.randn(5, HIDDEN), has_sampled=[False], page_size=PAGE_SIZE)
    with torch.no_grad():
        Layer()(*packed.tensors, packed.batch)


@pytest.mark.parametrize("tensor", [torch.zeros(4), torch.tensor(1.0), [1, 2, 3, 4, 5]])
def test_a_tensor_of_another_number_of_tokens_is_refused(tensor: Any) -> None:
    given = arguments()
    head = [given.pop(name) for name in ("query_lens", "num_cached", "block_table")]
    with pytest.raises(MLAError, match=r"^per_token\[1\]: .*\[5, \.\.\.\]"):
        pack_batch(*head, torch.zeros(5, 2), tensor, **given)


def test_what_is_no_segment_is_refused_where_the_batch_is_made() -> None:
    made = decode_segment(torch.zeros(2).int(), torch.ones(2, 2).int(), q_len=1, page_size=4)
    with pytest.raises(MLAError, match=r"^batch\.decode: .*DecodeSegment.*tuple.*; "):
        MLABatch(decode=made)
    with pytest.raises(MLAError, match=r"^batch: .*decode.*prefill"):
        MLABatch()
    case = make_case([3], [(4, 0)])
    other = replace(case.batch.prefill, page_size=8)
    with pytest.raises(MLAError, match=r"^batch: .*page.size.*\b4\b.*\b8\b"):
        MLABatch(case.batch.decode, other)
