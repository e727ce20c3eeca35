"""Modules of users under `torch.compile`: any batches in one module, and the same errors as in eager."""

import copy
import dataclasses
import pickle
import random
import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.registry import lookup_backend

from mla_compile import (
    MLABatch,
    MLAError,
    PackedBatch,
    decode_segment,
    mla_append,
    mla_attention,
    mla_decode,
    mla_prefill,
    pack_batch,
    prefill_segment,
)
from mla_compile.check_batches import checked, checks_of
from mla_compile.ops import validate
from mla_compile.passes import pipeline
from mla_compile.torch_internals import know_least_sizes

HIDDEN, HEADS, NOPE, ROPE, RANK, V = 24, 2, 8, 4, 16, 6
NUM_PAGES, MAX_ROWS = 97, 6


class Layer(nn.Module):
    def __init__(self, page_size: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * (NOPE + ROPE), bias=False)
        self.kv_proj = nn.Linear(HIDDEN, RANK + ROPE, bias=False)
        self.w_uk = nn.Parameter(torch.randn(HEADS, NOPE, RANK) / 4)
        self.w_uv = nn.Parameter(torch.randn(HEADS, RANK, V) / 4)
        self.o_proj = nn.Linear(HEADS * V, HIDDEN, bias=False)
        self.register_buffer("kv_cache", torch.zeros(NUM_PAGES, page_size, RANK + ROPE))

    def forward(self, x: Tensor, positions: Tensor, batch: MLABatch) -> Tensor:
        x = x + positions[:, None].sin()
        q_nope, q_pe = self.q_proj(x).view(-1, HEADS, NOPE + ROPE).split([NOPE, ROPE], dim=-1)
        kv_c, k_pe = self.kv_proj(x).split([RANK, ROPE], dim=-1)
        out = mla_attention(q_nope, q_pe, kv_c, k_pe, self.kv_cache, self.w_uk, self.w_uv, batch, 0.3)
        return x + self.o_proj(out.flatten(1))


class Layers(nn.Module):
    """Layers, each with a cache and a batch, over the same tokens or over those of each batch."""

    def __init__(self, page_sizes: Sequence[int], *, same_tokens: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, page_sizes))
        self.same_tokens = same_tokens

    def forward(self, inputs: list[tuple[Tensor, Tensor, MLABatch]]) -> list[Tensor]:
        outs, out = [], inputs[0][0]
        for layer, (x, positions, batch) in zip(self.layers, inputs):
            out = layer(out if self.same_tokens else x, positions, batch)
            outs.append(out)
        return outs


class Passes:
    """A backend that runs the passes, hands the graph to AOTAutograd and counts its calls."""

    graphs = 0

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs += 1
        know_least_sizes(example_inputs)
        checks = checks_of(gm)
        return checked(
            lookup_backend("aot_eager")(pipeline.run(gm, example_inputs), list(example_inputs)), checks
        )


Rows = list[tuple[int, int, bool]]


def drawn_rows(r: random.Random, drafts: int) -> Rows:
    rows = []
    for _ in range(r.randint(1, MAX_ROWS)):
        sampled = r.random() < 0.5
        rows.append((r.randint(1, 1 + drafts) if sampled else r.randint(1, 7), r.randint(0, 9), sampled))
    return rows


def packed_rows(r: random.Random, rows: Rows, page_size: int, drafts: int) -> PackedBatch:
    lens, cached, sampled = (list(column) for column in zip(*rows))
    width = max(-(-(n + c) // page_size) for n, c, _ in rows) + r.randint(0, 2)
    pages = r.sample(range(1, NUM_PAGES), len(rows) * 16)
    table = torch.tensor(pages, dtype=torch.int32).view(len(rows), 16)[:, :width]
    x = torch.randn(sum(lens), HIDDEN, generator=torch.Generator().manual_seed(r.randrange(99)))
    sizes = {"page_size": page_size, "num_speculative_tokens": drafts}
    return pack_batch(lens, cached, table, x, has_sampled=sampled, **sizes)


def kind(packed: PackedBatch) -> tuple[bool, bool]:
    return packed.batch.decode is not None, packed.batch.prefill is not None


def check_layers(seed: int, backend: Any, count: Callable[[], int]) -> int:
    """One module with any number of batches, called with any rows. Returns the number of calls."""
    torch.compiler.reset()
    r, before = random.Random(seed), count()
    num, same_tokens = r.randint(1, 3), r.random() < 0.5
    page_sizes = [r.choice([1, 2, 4, 8]) for _ in range(num)]
    drafts = [r.randint(0, 3)] * num if same_tokens else [r.randint(0, 3) for _ in range(num)]
    torch.manual_seed(seed)
    model = Layers(page_sizes, same_tokens=same_tokens).requires_grad_(False)
    compiled, kinds = torch.compile(copy.deepcopy(model), backend=backend, fullgraph=True), set()
    for call in range(6):
        rows = drawn_rows(r, min(drafts))
        packed = []
        for page_size, k in zip(page_sizes, drafts):
            # In the first call all batches are alike.
            rows = rows if same_tokens or call == 0 else drawn_rows(r, k)
            packed.append(packed_rows(r, rows, page_size, k))
        kinds.add(tuple(map(kind, packed)))
        inputs = [(p.tensors[0], p.positions, p.batch) for p in packed]
        for got, expected in zip(compiled(inputs), model(inputs), strict=True):
            torch.testing.assert_close(got, expected)
    for got, expected in zip(compiled.layers, model.layers, strict=True):
        torch.testing.assert_close(got.kv_cache, expected.kv_cache)
    assert count() - before == len(kinds), (page_sizes, same_tokens, drafts)
    return 6


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_any_number_of_batches_in_one_module_make_a_graph_for_each_kind(seed: int) -> None:
    backend = Passes()
    check_layers(seed, backend, lambda: backend.graphs)


@pytest.mark.long
def test_batches_of_different_page_sizes_and_widths_in_one_module_on_inductor() -> None:
    check_layers(3, "mla", lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_one_decode_row_after_several_makes_no_graph_of_its_own() -> None:
    torch.compiler.reset()
    r, backend = random.Random(0), Passes()
    compiled = torch.compile(Layer(4).requires_grad_(False), backend=backend, fullgraph=True)
    prompt, decode = (9, 0, False), (4, 7, True)
    for rows in ([prompt], [decode] * 2, [decode] * 3 + [prompt], [decode, prompt], [decode]):
        packed = packed_rows(r, rows, 4, 3)
        compiled(packed.tensors[0], packed.positions, packed.batch)
    assert backend.graphs == 3


# --- refusals


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A result, or the type and the first line of an error."""
    try:
        return function(*args, **kwargs)
    except MLAError as error:
        return "MLAError", str(error).partition("\n")[0]
    except Exception as error:
        return "another", type(error).__name__


def check_same(eager: Any, compiled: Any) -> bool:
    """Whether eager refused by name, and then so did compiled code."""
    if isinstance(eager, tuple) and eager[0] == "MLAError":
        assert compiled == eager
        return True
    if isinstance(eager, Tensor):
        torch.testing.assert_close(compiled, eager)
    return False


def changed_tensor(r: random.Random, x: Tensor) -> Any:
    """A tensor with one property changed, or something else in its place."""
    dim = r.randrange(x.dim())
    changes: list[Callable[[], Any]] = [
        lambda: x.narrow(dim, 0, max(0, x.shape[dim] - r.randint(1, 2))),
        lambda: torch.cat([x, x], dim),
        lambda: torch.cat([x, x.narrow(dim, 0, 1)], dim),
        lambda: x.to(r.choice([torch.float64, torch.float16, torch.int32, torch.int64])),
        lambda: x.to("meta"),
        lambda: x[None],
        lambda: x.select(dim, 0),
        lambda: r.choice([None, 3, [1.0], "x", {}]),
    ]
    return r.choice(changes)()


def changed_batch(r: random.Random, batch: MLABatch) -> MLABatch:
    """A batch with one field of a segment changed, except prompt fields that compiled code does not read."""
    name = r.choice([n for n in ("decode", "prefill") if getattr(batch, n) is not None])
    segment = getattr(batch, name)
    unread = ("backend", *(("seq_lens", "block_table", "host_lens") if name == "prefill" else ()))
    fields = [f.name for f in dataclasses.fields(segment) if f.name not in unread]
    field = r.choice(fields)
    value = getattr(segment, field)
    if isinstance(value, int):
        value = value + r.choice([-1, 1, 4])
        segments = (batch.decode, batch.prefill) if field == "page_size" else (segment,)
    else:
        value, segments = changed_tensor(r, value), (segment,)
    changed = {id(s): dataclasses.replace(s, **{field: value}) for s in segments if s is not None}
    return MLABatch(*(changed.get(id(s), s) for s in (batch.decode, batch.prefill)))


def check_refusals(seed: int, backend: Any) -> int:
    """A module called with changed arguments, after good calls or at once. Returns how often eager refused by name."""
    torch.compiler.reset()
    r = random.Random(seed)
    page_size, drafts = r.choice([2, 4]), r.randint(0, 3)
    torch.manual_seed(seed)
    model = Layer(page_size).requires_grad_(False)
    other = copy.deepcopy(model)
    compiled = torch.compile(other, backend=backend, fullgraph=r.random() < 0.7)
    num_refused = 0
    for call in range(8):
        packed, second = (packed_rows(r, drawn_rows(r, drafts), page_size, drafts) for _ in range(2))
        args = [packed.tensors[0], packed.positions, packed.batch]
        args[:2] = [x.clone() if r.random() < 0.4 else x for x in args[:2]]  # not marked
        cache = None
        if call > 1 or r.random() < 0.3:
            part = r.randrange(5)
            if part == 0:  # tokens of another batch, marked or not, or the same for another batch
                args[:2] = second.tensors[0], second.positions
                args[:2] = [x.clone() for x in args[:2]] if r.random() < 0.5 else args[:2]
            elif part == 3 and r.random() < 0.3:
                args[2] = second.batch
            elif part == 1:
                args[:2] = changed_tensor(r, args[0]), args[1].clone()
            elif part == 2:
                cache = changed_tensor(r, model.kv_cache)
                cache = cache if isinstance(cache, Tensor) else model.kv_cache.mT.contiguous().mT
            else:
                args[2] = changed_batch(r, packed.batch)
        with torch.no_grad():
            kept = model.kv_cache, other.kv_cache
            if cache is not None:
                model.kv_cache, other.kv_cache = cache.clone(), cache.clone()
            num_refused += check_same(outcome(model, *args), outcome(compiled, *args))
            model.kv_cache, other.kv_cache = kept
        other.kv_cache.copy_(model.kv_cache)
    return num_refused


def test_a_cache_of_any_page_size_must_have_that_of_the_batch() -> None:
    torch.compiler.reset()
    table = torch.tensor([[1, 2]], dtype=torch.int32)
    decode, _ = decode_segment(torch.tensor([3], dtype=torch.int32), table, q_len=1, page_size=4)
    sizes = (1, HEADS, NOPE), (1, HEADS, ROPE), (1, RANK), (1, ROPE), (HEADS, NOPE, RANK), (HEADS, RANK, V)
    q_nope, q_pe, kv_c, k_pe, w_uk, w_uv = map(torch.randn, sizes)

    def step(kv_cache: Tensor) -> Tensor:
        return mla_attention(q_nope, q_pe, kv_c, k_pe, kv_cache, w_uk, w_uv, MLABatch(decode), 0.3)

    compiled = torch.compile(step, backend="aot_eager")
    for page_size in (4, 8):
        caches = [torch.zeros(NUM_PAGES, page_size, RANK + ROPE) for _ in range(2)]
        torch._dynamo.maybe_mark_dynamic(caches[0], 1)
        refused = check_same(outcome(step, caches[1]), outcome(compiled, caches[0]))
        assert refused == (page_size != 4)


def with_wrong_values(r: random.Random, batch: MLABatch) -> MLABatch:
    """A batch with out-of-bounds values in one field that compiled code reads."""
    name = r.choice([n for n in ("decode", "prefill") if getattr(batch, n) is not None])
    segment = getattr(batch, name)
    unread = ("seq_lens", "block_table", "host_lens") if name == "prefill" else ()
    tensors = {f.name: getattr(segment, f.name) for f in dataclasses.fields(segment) if f.name not in unread}
    field = r.choice([n for n, x in tensors.items() if isinstance(x, Tensor)])
    wrong = tensors[field].clone()
    wrong.view(-1)[r.randrange(wrong.numel())] = r.choice([-9, 9999])
    return dataclasses.replace(batch, **{name: dataclasses.replace(segment, **{field: wrong})})


def check_values(seed: int, backend: Any) -> int:
    """A compiled module is called with wrong values after a good call. Returns how often eager refused by name."""
    torch.compiler.reset()
    r = random.Random(seed)
    page_size, drafts, num_refused = r.choice([2, 4]), r.randint(0, 3), 0
    torch.manual_seed(seed)
    model = Layer(page_size).requires_grad_(False)
    other = copy.deepcopy(model)
    compiled = torch.compile(other, backend=backend)
    for _ in range(8):
        packed = packed_rows(r, drawn_rows(r, drafts), page_size, drafts)
        x, positions = packed.tensors[0], packed.positions
        torch.testing.assert_close(compiled(x, positions, packed.batch), model(x, positions, packed.batch))
        wrong, kept = with_wrong_values(r, packed.batch), other.kv_cache.clone()
        if check_same(outcome(model, x, positions, wrong), outcome(compiled, x, positions, wrong)):
            num_refused += 1
            assert torch.equal(other.kv_cache, kept) and torch.equal(model.kv_cache, kept)
        other.kv_cache.copy_(model.kv_cache)
    return num_refused


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_values_that_eager_refuses_on_a_cpu_compiled_code_refuses_before_it_runs(seed: int) -> None:
    assert check_values(seed, Passes()) > 4


def test_values_and_the_number_of_tokens_of_a_mixed_batch_are_checked_after_good_calls() -> None:
    torch.compiler.reset()
    r = random.Random(0)
    rows = [[(2, 3, True), (20 * i, 0, False)] for i in (1, 2, 3)]
    packed = [packed_rows(r, x, 8, 1) for x in rows]
    model = Layer(8).requires_grad_(False)
    compiled = torch.compile(model, backend="mla", fullgraph=True)
    for p in packed[:2]:  # the second graph is one for any number of tokens
        compiled(p.tensors[0].clone(), p.positions.clone(), p.batch)
    kept = model.kv_cache.clone()
    expected, got = (p.positions.shape[0] for p in packed[:0:-1])
    assert expected != got
    with pytest.raises(MLAError, match=rf"^q_nope: .*\b{expected} tokens.*batch.*\b{got}\b"):
        compiled(packed[1].tensors[0].clone(), packed[1].positions.clone(), packed[2].batch)
    decode = packed[2].batch.decode
    wrong = dataclasses.replace(decode, slot_mapping=decode.slot_mapping + 10_000)
    batch = dataclasses.replace(packed[2].batch, decode=wrong)
    with pytest.raises(MLAError, match=r"^batch\.decode\.slot_mapping: .*slots"):
        compiled(packed[2].tensors[0].clone(), packed[2].positions.clone(), batch)
    assert torch.equal(model.kv_cache, kept)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No values are checked; compiled code does not check them on any device."""
    monkeypatch.setattr(validate, "is_readable", lambda x: False)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_what_eager_refuses_by_name_compiled_code_refuses_with_the_same_words(
    as_on_a_gpu: None, seed: int
) -> None:
    assert check_refusals(seed, Passes()) > 0


def call_of(r: random.Random) -> tuple[Callable[..., Any], dict[str, Any]]:
    """An op that users call, with good arguments."""
    rows, q_len, pages, page_size = r.randint(1, 3), r.randint(1, 3), r.randint(1, 4), r.choice([2, 4])
    tokens, keys = rows * q_len, r.randint(2, 9)
    table = torch.ones(rows, pages, dtype=torch.int32)
    cache = torch.zeros(NUM_PAGES, page_size, RANK + ROPE)
    latents = {"kv_c": torch.randn(tokens, RANK), "k_pe": torch.randn(tokens, ROPE), "kv_cache": cache}
    q_latent, q_pe = torch.randn(tokens, HEADS, RANK), torch.randn(tokens, HEADS, ROPE)
    up = {"w_uk": torch.randn(HEADS, NOPE, RANK), "w_uv": torch.randn(HEADS, RANK, V)}
    lens = torch.full((rows,), q_len, dtype=torch.int32)
    sums = torch.zeros(rows + 1, dtype=torch.int32)
    return r.choice(
        [
            (mla_append, {**latents, "slot_mapping": torch.arange(tokens)}),
            (
                mla_decode,
                {"q_latent": q_latent, "q_pe": q_pe, "kv_cache": cache, "block_table": table}
                | {"seq_lens": lens * 0, "q_lens": lens, "q_len": q_len, "softmax_scale": 0.3},
            ),
            (
                mla_prefill,
                {"q": torch.randn(tokens, HEADS, NOPE + ROPE), "kv_cache": cache, **up}
                | {"cu_seqlens_q": sums, "cu_seqlens_k": sums[None], "softmax_scale": 0.3}
                | {"key_slots": torch.full((1, keys), -1)},
            ),
            (
                decode_segment,
                {"num_cached": lens, "block_table": table, "q_len": q_len, "page_size": page_size},
            ),
            (
                prefill_segment,
                {"chunk_lens": [1] * rows, "num_cached": [0] * rows, "block_table": table}
                | {"page_size": page_size, "num_chunks": r.choice([0, 4])},
            ),
        ]
    )


def check_op(seed: int) -> bool:
    """Whether eager refused an op's changed argument by name; compiled code did the same."""
    torch.compiler.reset()
    r = random.Random(seed)
    op, good = call_of(r)
    name = r.choice(list(good))
    value = good[name]
    if isinstance(value, Tensor):
        value = changed_tensor(r, value)
    elif isinstance(value, list):
        value = r.choice([[*value, 1], value[1:], [0] * len(value), None, [1.5] * len(value), tuple(value)])
    elif isinstance(value, int):
        value = r.choice([-1, 0, value + 1])
    compiled = torch.compile(lambda kwargs: op(**kwargs), backend="eager", fullgraph=r.random() < 0.7)
    if r.random() < 0.5:
        outcome(compiled, good)
    bad = {**good, name: value}
    return check_same(outcome(op, **bad), outcome(compiled, bad))


@pytest.mark.long
def test_what_eager_refuses_of_an_op_compiled_code_refuses_with_the_same_words(as_on_a_gpu: None) -> None:
    assert sum(map(check_op, range(24))) > 8


def test_an_error_of_compiled_code_begins_with_its_sentence_and_shows_the_users_line() -> None:
    torch.compiler.reset()
    packed = packed_rows(random.Random(0), [(2, 3, True)], 4, 1)
    compiled = torch.compile(Layer(4), backend="mla", fullgraph=True)
    with pytest.raises(MLAError) as caught:
        compiled(packed.tensors[0], packed.positions, packed.batch)
    sentence = str(caught.value).partition("\n")[0]
    shown = "".join(traceback.format_exception(caught.value))
    assert re.match("q_nope: .*requires_grad=True; .*inference", sentence)
    assert shown.partition("mla_compile.errors.MLAError: ")[2].startswith(sentence)
    assert shown.index(sentence) < 2000 and "in forward\n    out = mla_attention(q_nope" in shown
    assert "torch_internals" not in shown
    assert caught.value.name == "q_nope" and type(pickle.loads(pickle.dumps(caught.value))) is MLAError


def test_a_call_with_more_tokens_than_the_batch_is_refused_by_name_after_a_good_one() -> None:
    torch.compiler.reset()
    r = random.Random(0)
    one, two = (packed_rows(r, [(2, 3, True)] * rows, 4, 1) for rows in (2, 4))
    compiled = torch.compile(Layer(4).requires_grad_(False), backend=Passes(), fullgraph=True)
    compiled(one.tensors[0], one.positions, one.batch)
    for x, positions in ((two.tensors[0], two.positions), (torch.randn(8, HIDDEN), torch.arange(8))):
        with pytest.raises(MLAError, match=r"^q_nope: .*\b4 tokens.*batch.*\b8\b"):
            compiled(x, positions, one.batch)
    compiled(two.tensors[0], two.positions, two.batch)


@pytest.mark.parametrize(
    ("scale", "got"),
    [
        (None, "NoneType"),
        ("0.1", "str"),
        (True, "bool"),
        (float("nan"), "nan"),
        (torch.ones(()), "a tensor []"),
    ],
)
def test_a_scale_that_is_no_finite_number_is_refused_by_name(scale: Any, got: str) -> None:
    torch.compiler.reset()
    layer = Layer(4).requires_grad_(False)

    def step(packed: PackedBatch, scale: Any) -> Tensor:
        x, (w_uk, w_uv) = packed.tensors[0], (layer.w_uk, layer.w_uv)
        q, kv_c, k_pe = x.new_zeros(4, HEADS, NOPE + ROPE), x.new_zeros(4, RANK), x.new_zeros(4, ROPE)
        split = q.split([NOPE, ROPE], dim=-1)
        return mla_attention(*split, kv_c, k_pe, layer.kv_cache, w_uk, w_uv, packed.batch, scale)

    packed = packed_rows(random.Random(0), [(2, 3, True)] * 2, 4, 1)
    compiled = torch.compile(step, backend=Passes(), fullgraph=True)
    for run in (step, compiled):
        with pytest.raises(
            MLAError, match=rf"^softmax_scale: expected a finite number, got {re.escape(got)}"
        ):
            run(packed, scale)
    for good in (0.5, 0.25, 2):  # the second one makes it a symbolic number
        assert torch.isfinite(compiled(packed, good)).all()


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_batch_is_not_packed_in_compiled_code(fullgraph: bool) -> None:
    torch.compiler.reset()

    def step(table: Tensor, x: Tensor) -> Tensor:
        return pack_batch([2], [3], table, x, has_sampled=[True], page_size=4).positions

    compiled = torch.compile(step, backend="eager", fullgraph=fullgraph)
    with pytest.raises(MLAError, match=r"^pack_batch: .*compile.*; .*before"):
        compiled(torch.ones(1, 2, dtype=torch.int32), torch.zeros(2))


def test_a_batch_that_is_made_in_compiled_code_is_refused_there() -> None:
    torch.compiler.reset()
    packed = [
        packed_rows(random.Random(0), [(2, 3, sampled)], size, 1) for size, sampled in ((4, True), (2, False))
    ]
    decode, prefill = packed[0].batch.decode, packed[1].batch.prefill

    def page_size(x: Tensor, args: tuple[Any, ...]) -> Tensor:
        return x + MLABatch(*args).page_size

    compiled = torch.compile(page_size, backend="eager", fullgraph=True)
    for args in ((decode, prefill), (), ((decode, 0),), (packed[0].batch,)):
        assert check_same(outcome(page_size, torch.ones(2), args), outcome(compiled, torch.ones(2), args))


def test_a_cache_that_is_a_view_is_not_advised_to_be_copied() -> None:
    wrong = torch.zeros(9, 4, 3, RANK + ROPE)[:, :, 0]
    with pytest.raises(MLAError, match=r"^kv_cache: .*contiguous.*; .*layer"):
        mla_append(torch.zeros(2, RANK), torch.zeros(2, ROPE), wrong, torch.arange(2))
    right = torch.zeros(3, 9, 4, RANK + ROPE)
    mla_append(torch.ones(2, RANK), torch.ones(2, ROPE), right[1], torch.arange(2))
    assert right[1].count_nonzero() == 2 * (RANK + ROPE) == right.count_nonzero()
    with pytest.raises(MLAError, match=r"^kv_cache: .*dtype of kv_c.*float32.*float64.*; "):
        mla_append(torch.ones(2, RANK), torch.ones(2, ROPE), right[1].double(), torch.arange(2))
