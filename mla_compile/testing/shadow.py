"""A step that is checked while it runs: its eager twin runs on the same inputs, and what they leave is compared."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from mla_compile.engine import Engine
from mla_compile.engine.config import check_positive
from mla_compile.errors import MLAError
from mla_compile.ops.paging import slots_of
from mla_compile.speculate import DecodeState, PackedChunks, SpeculativeDecoder
from mla_compile.speculate.drafter import cache_specs
from mla_compile.speculate.state import FIRST_TOKEN


class ShadowCheckError(AssertionError):
    """A step and its eager run differ. The message has a line for each layer and tensor of the state that does, with
    its first place."""


@contextmanager
def shadow_check(engine: Engine, *, every: int = 1, tolerance: float | None = None) -> Iterator[None]:
    """Inside, every n-th call of each of an engine's steps also runs eagerly and is compared.

        with mla_compile.testing.shadow_check(engine, every=16):
            engine.generate(prompts)

    What must be so after a checked call:

    - The state, with the tokens and drafts, is eager's exactly; reported log-probabilities are within `tolerance`, and
      the ids beside them are not compared. Nor are tokens and drafts that nobody reads: those of padding and of rows
      that have ended.
    - Latents of positions that an active row may write, `num_cached` to `max_len - 2`, are eager's within `tolerance`,
      those of a prompt chunk too.
    - Every other slot, page 0 and other rows' pages too, holds the bits it held before. NaN there is no difference.

    The stream goes on with what the step did, at the same addresses. Eager runs the same ops, on a GPU with the same
    kernels: this finds what compiling and capturing break, not what both get wrong. Steps whose tokens the host
    chooses (a grammar, `choose`) run in two halves and are not checked.

    Load the model in float32 or float64. In half types a compiled step rounds less often than eager, so healthy steps
    differ too: near-ties of two tokens, whose logits the message has, and of two experts go either way.

    A checked call waits for the device and holds a copy of all caches, and one of a layer's for a while.

    Args:
        engine: the caches of its model and drafter are all that a step changes besides the state.
        every: check each step's first call and every n-th after it.
        tolerance: of a latent, relative to its largest entry. By default the square root of the dtype's epsilon:
            0.09 in bfloat16, 0.03 in float16, 3.5e-4 in float32 and float64 (rotary angles are float32 in both).

    Raises:
        MLAError: a bad argument, named.
        ShadowCheckError: from the engine's call, on a difference; state and caches are left as the step left them.
    """
    check_positive("every", every)
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise MLAError("tolerance", "a finite number >= 0", tolerance)
    checked: dict[Callable[..., None], Callable[..., None]] = {}

    def around(step: Callable[..., None], decoder: SpeculativeDecoder) -> Callable[..., None]:
        if step not in checked:
            checked[step] = checked_step(step, decoder, every=every, tolerance=tolerance)
        return checked[step]

    steps = engine._launcher.steps
    steps.around = around
    try:
        yield
    finally:
        steps.around = None


def checked_step(
    step: Callable[..., None],
    decoder: SpeculativeDecoder,
    *,
    every: int = 1,
    tolerance: float | None = None,
) -> Callable[..., None]:
    """A step that does what `step` does, checked as `shadow_check` says.

    Args:
        step: changes a `DecodeState` in place; it may take `PackedChunks` too, as `SpeculativeDecoder.mixed` does.
        decoder: does the same eagerly.
    """
    calls = 0

    def run(state: DecodeState, *chunks: PackedChunks) -> None:
        nonlocal calls
        calls += 1
        if (calls - 1) % every:
            step(state, *chunks)
        elif differences := _differences(step, decoder, tolerance, state, *chunks):
            lines = "\n  ".join(differences)
            raise ShadowCheckError(f"step {calls} and its eager run on the same inputs differ:\n  {lines}")

    return run


def _differences(
    step: Callable[..., None],
    decoder: SpeculativeDecoder,
    tolerance: float | None,
    state: DecodeState,
    *chunks: PackedChunks,
) -> list[str]:
    """Run a step, in place; a line for each layer and tensor of the state in which its eager run differs."""
    specs = cache_specs(decoder.model, decoder.drafter)
    caches = [spec.cache for spec in specs]
    live = [*caches, *state.tensors()]
    kept = [tensor.clone() for tensor in live]
    inputs = DecodeState(**{name: tensor.clone() for name, tensor in state.named().items()})

    step(state, *chunks)

    slots = _Slots(inputs, chunks, decoder.page_size, caches)
    latents = [slots.outside(spec.name, cache, before) for spec, cache, before in zip(specs, caches, kept)]
    for tensor, other in zip(live, kept):
        result = tensor.clone()
        tensor.copy_(other)
        other.copy_(result)
    try:
        # A model that was compiled in place runs eagerly too.
        with torch.compiler.set_stance("force_eager"):
            (decoder.mixed if chunks else decoder.forward)(state, *chunks)
            compiled = DecodeState(**dict(zip(state.named(), kept[len(caches) :], strict=True)))
            latents += [
                slots.inside(spec.name, got, expected, tolerance)
                for spec, got, expected in zip(specs, kept, caches)
            ]
            read = _read_later(decoder, inputs, chunks, state)
            tokens = _tokens(decoder, inputs, chunks, compiled, state, read)
            found = [*latents, tokens, *_state(compiled, state, read, _tolerance(tolerance, caches[0].dtype))]
    finally:
        for tensor, result in zip(live, kept):
            tensor.copy_(result)
    return [line for line in found if line]


def _read_later(
    decoder: SpeculativeDecoder, inputs: DecodeState, chunks: Sequence[PackedChunks], eager: DecodeState
) -> dict[str, Tensor]:
    """Which places `[rows, n]` of some tensors of the state anybody reads; with other padding, the rest is other.

    A row has a token for each position that it ran. It goes on with the drafts that it will run.
    """
    ran = decoder.query_lens(inputs)
    for packed in chunks:
        ran = torch.where(packed.begins, 1, ran)
    runs_next = decoder.query_lens(eager)
    of_tokens, of_drafts = (
        torch.arange(n, device=ran.device) < lens[:, None]
        for n, lens in (
            (eager.report.shape[1] - FIRST_TOKEN, ran),
            (eager.drafts.shape[1], runs_next - 1),
        )
    )
    return {"report": of_tokens, "logprobs": of_tokens[..., None], "drafts": of_drafts}


def _tokens(
    decoder: SpeculativeDecoder,
    inputs: DecodeState,
    chunks: Sequence[PackedChunks],
    compiled: DecodeState,
    eager: DecodeState,
    read: dict[str, Tensor],
) -> str:
    """The target's tokens, with what eager's logits say of the two."""
    got, expected = (state.report[:, FIRST_TOKEN:] for state in (compiled, eager))
    wrong = (got != expected) & read["report"]
    if not wrong.any():
        return ""
    row, j = _first(wrong)
    both = int(got[row, j]), int(expected[row, j])
    # Eager has just written the trunk's latents of these very inputs, so once more changes nothing.
    logits = decoder.verify(inputs, *chunks)[0][row, j]
    position = int(inputs.num_cached[row]) + 1 + j  # of a row that begins, `verify` has just told it
    of_both = ", ".join(f"{float(logits[t]):.9g}" if 0 <= t < len(logits) else "none" for t in both)
    place = f"tokens: row {row}, token {j}, position {position}"
    return _line(place, *both, wrong, f"eager's logits of the two: {of_both}")


class _Slots:
    """Which slots of the caches a step may write.

    state: before the step. chunks: of prompts, at most one. page_size: tokens a page. caches: `[num_pages, page_size,
    width]`, all alike.
    """

    def __init__(
        self, state: DecodeState, chunks: Sequence[PackedChunks], page_size: int, caches: list[Tensor]
    ) -> None:
        self.page_size = page_size
        rows, pages = state.block_table.shape
        position = torch.arange(pages * page_size, device=state.block_table.device)
        self.of_rows = slots_of(state.block_table, position.expand(rows, -1), page_size)
        own = (position >= state.num_cached[:, None]) & (position < state.max_len[:, None] - 1)
        own &= state.active[:, None]
        for packed in chunks:
            real = packed.rows >= 0
            row, (count, end) = packed.rows[real], packed.lens[real].T[..., None]
            # Where a prompt ends, its row decodes from there on.
            last = torch.where(packed.begins[row, None], state.max_len[row, None] - 1, end)
            own[row] = (position >= end - count) & (position < last)
        self.writable = torch.zeros(caches[0].shape[0] * page_size, dtype=torch.bool, device=position.device)
        self.writable[self.of_rows[own]] = True

    def outside(self, layer: str, got: Tensor, before: Tensor) -> str:
        """The first bit that changed in a slot that no row may write."""
        wrong = (_bits(got) != _bits(before)) & ~self.writable[:, None]
        if not wrong.any():
            return ""
        slot, column = _first(wrong)
        now, then = (float(x.flatten(0, 1)[slot, column]) for x in (got, before))
        place = f"{layer}: {self._place(slot, column)}"
        return _line(place, now, then, wrong, "no row may write there", "before")

    def inside(self, layer: str, got: Tensor, expected: Tensor, tolerance: float | None) -> str:
        """The first value of a slot that rows may write which is not near `expected`."""
        different = (_bits(got) != _bits(expected)).any(-1) & self.writable
        slots = different.nonzero()[:, 0]
        tolerance = _tolerance(tolerance, got.dtype)
        got, expected = (x.flatten(0, 1)[slots].double() for x in (got, expected))
        scale = expected.nan_to_num(0, 0, 0).abs().amax(-1, keepdim=True)
        wrong = ~((got - expected).abs() <= tolerance * scale) & (got != expected)
        wrong &= ~(got.isnan() & expected.isnan())
        if not wrong.any():
            return ""
        i, column = _first(wrong)
        place = self._place(int(slots[i]), column)
        return _line(f"{layer}: {place}", float(got[i, column]), float(expected[i, column]), wrong)

    def _place(self, slot: int, column: int) -> str:
        page, offset = divmod(slot, self.page_size)
        owners = (self.of_rows == slot).nonzero().tolist()
        if page == 0:
            owner = "the dummy page"
        elif owners:
            owner = f"row {owners[0][0]}, position {owners[0][1]}"
        else:
            owner = "a page of no row"
        return f"{owner} (page {page}, slot {offset} of it), column {column}"


def _tolerance(given: float | None, dtype: torch.dtype) -> float:
    """The default follows from the type of latents."""
    if given is not None:
        return given
    return float(max(torch.finfo(dtype).eps for dtype in (dtype, torch.float32)) ** 0.5)


def _state(
    compiled: DecodeState, eager: DecodeState, read: dict[str, Tensor], tolerance: float
) -> Iterator[str]:
    """A line for each tensor of the state that differs, where it is `read`; the report's tokens are told elsewhere."""
    for name, got in compiled.named().items():
        expected = getattr(eager, name)
        if name == "logprob_ids":
            continue
        if name == "report":
            got, expected = got[:, :FIRST_TOKEN], expected[:, :FIRST_TOKEN]
        wrong = got != expected
        if name == "logprobs":
            wrong = ~torch.isclose(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
        if name in ("logprobs", "drafts"):
            wrong &= read[name]
        if wrong.any():
            row, *column = _first(wrong)
            place = f"{name}: row {row}" + "".join(f", column {c}" for c in column)
            yield _line(place, got[row, *column].item(), expected[row, *column].item(), wrong)


def _first(wrong: Tensor) -> list[int]:
    """The index of the first true value, which there must be."""
    first = wrong.flatten().to(torch.uint8).argmax()
    return [int(i) for i in torch.unravel_index(first, wrong.shape)]


def _bits(x: Tensor) -> Tensor:
    """Latents `[num_pages, page_size, width]` as integers `[slots, width]`, of which NaN equals itself."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.view(integers[x.element_size()]).flatten(0, 1)


def _line(
    place: str, got: float, expected: float, wrong: Tensor, note: str = "", source: str = "eager"
) -> str:
    others = int(wrong.sum()) - 1
    notes = [note] * bool(note) + [f"{others:,} more differ"] * bool(others)
    return "; ".join([f"{place}: {got!r}, {source} {expected!r}", *notes])
