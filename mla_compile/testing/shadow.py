"""Check compiled steps at run time: run the same step eagerly on the same inputs, and compare the state and caches."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial

import torch
from torch import Tensor

from mla_compile.caches import CacheSpec
from mla_compile.engine import Engine
from mla_compile.errors import MLAError, check_integer
from mla_compile.latents import FP8, unpack
from mla_compile.speculate import DecodeState, PackedChunks, SpeculativeDecoder
from mla_compile.speculate.drafter import cache_specs
from mla_compile.speculate.state import FIRST_TOKEN


class ShadowCheckError(AssertionError):
    """A step and its eager run differ. The message has a line for each layer and each tensor of the state that differs,
    with the first different value."""


@contextmanager
def shadow_check(engine: Engine, *, every: int = 1, tolerance: float | None = None) -> Iterator[None]:
    """Inside the context, every n-th call of each of an engine's steps also runs eagerly and is compared.

        with mla_compile.testing.shadow_check(engine, every=16):
            engine.generate(prompts)

    The conditions after a checked call:

    - The state, including the tokens and drafts, equals eager's exactly. Tokens and drafts without a reader are not
      compared: those of padding and of ended rows.
    - Latents that eager writes are within `tolerance` of eager's. Every other slot, including page 0 and other rows'
      pages, keeps its bits. NaN equals NaN.

    Generation continues with the compiled step's results, at the same addresses. Eager runs the same ops, on a GPU with
    the same kernels. So the check finds errors of compilation and capture, not errors that both runs share. Steps whose
    logits are read between their parts (a grammar, `choose`, log-probabilities) are not checked.

    Load the model in float32 or float64. In half types a compiled step rounds less often than eager, so correct steps
    may differ too, in near-ties of two tokens or of two experts.

    A checked call waits for the device and holds two copies of all caches.

    Args:
        engine: besides the state, its steps change only the caches of its model and drafter.
        every: check each step's first call and every n-th after it.
        tolerance: of a latent, relative to its largest entry. By default the square root of the dtype's epsilon:
            0.09 in bfloat16, 0.03 in float16, 3.5e-4 in float32 and float64 (rotary angles are float32 in both).

    Raises:
        MLAError: a bad argument; the message names it.
        ShadowCheckError: from the engine's call, on a difference; state and caches keep the compiled step's results.
    """
    check_integer("every", every, 1)
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise MLAError("tolerance", "a finite number >= 0", tolerance)
    steps = engine._launcher.steps
    steps.around = cache(
        partial(checked_step, every=every, tolerance=tolerance)
    )  # each step counts its calls
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
    """A step that runs `step` and checks it as `shadow_check` does.

    Args:
        step: changes a `DecodeState` in place; it may take `PackedChunks` too, as `SpeculativeDecoder` does.
        decoder: runs the same step eagerly.
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
    """Run a step in place; return a line for each layer and tensor of the state in which its eager run differs."""
    specs = cache_specs(decoder.model, decoder.drafter)
    caches = [spec.cache for spec in specs]
    live = [*caches, *state.tensors()]
    before = [tensor.clone() for tensor in live]
    step(state, *chunks)
    results = [tensor.clone() for tensor in live]
    try:
        for tensor, other in zip(live, before, strict=True):
            tensor.copy_(other)
        ran = decoder.query_lens(state)
        for packed in chunks:
            ran = torch.where(packed.begins, 1, ran)
        # A model that was compiled in place runs eagerly too.
        with torch.compiler.set_stance("force_eager"):
            decoder.forward(state, *chunks)
        found = [
            _in_cache(spec, got, was, tolerance)
            for spec, got, was in zip(specs, results, before, strict=False)
        ]
        compiled = dict(zip(state.named(), results[len(caches) :], strict=True))
        read = _read_later(ran, decoder.query_lens(state), state)
        found += _in_state(compiled, state, read)
    finally:
        for tensor, result in zip(live, results, strict=True):
            tensor.copy_(result)
    return [line for line in found if line]


def _read_later(ran: Tensor, runs_next: Tensor, eager: DecodeState) -> dict[str, Tensor]:
    """Masks `[rows, n]` of the places of some state tensors that are read later; the others depend on the padding.

    ran: each row's positions in this step, each with a token. runs_next: those in the next step, one more than drafts.
    """

    def first(n: int, lens: Tensor) -> Tensor:
        return torch.arange(n, device=lens.device) < lens[:, None]

    tokens = first(eager.report.shape[1] - FIRST_TOKEN, ran)
    counts = tokens.new_ones(len(ran), FIRST_TOKEN)
    return {
        "report": torch.cat([counts, tokens], 1),
        "drafts": first(eager.drafts.shape[1], runs_next - 1),
    }


def _in_cache(spec: CacheSpec, got: Tensor, before: Tensor, tolerance: float | None) -> str:
    """A line for the first wrong value: not near eager's in a slot that eager writes, or changed in any other slot."""
    expected = spec.cache
    is_written = (_bits(expected) != _bits(before)).any(-1)
    if expected.dtype == FP8:  # the nearest values of two latents may be neighbours, 1/8 apart
        got, expected = (unpack(x, spec.kv_lora_rank, torch.float32) for x in (got, expected))
        tolerance = max(tolerance or 0, 0.125)
    elif tolerance is None:
        tolerance = math.sqrt(max(torch.finfo(got.dtype).eps, torch.finfo(torch.float32).eps))
    differs = _bits(got) != _bits(expected)
    slots = differs.any(-1).nonzero()[:, 0]
    mine, theirs = (x.flatten(0, 1)[slots].double() for x in (got, expected))
    scale = theirs.nan_to_num(0, 0, 0).abs().amax(-1, keepdim=True)
    wrong = ~((mine - theirs).abs() <= tolerance * scale) & (mine != theirs)
    wrong &= ~(mine.isnan() & theirs.isnan())
    wrong = torch.where(is_written[slots, None], wrong, differs[slots])
    if not wrong.any():
        return ""
    i, column = _first(wrong)
    page, offset = divmod(int(slots[i]), got.shape[1])
    note = "" if is_written[slots[i]] else "eager writes nothing there"
    place = f"{spec.name}: page {page}, slot {offset} of it, column {column}"
    return _line(place, float(mine[i, column]), float(theirs[i, column]), wrong, note)


def _in_state(compiled: dict[str, Tensor], eager: DecodeState, read: dict[str, Tensor]) -> Iterator[str]:
    """A line for each tensor of the state that differs in a place that is `read`."""
    for name, got in compiled.items():
        expected = getattr(eager, name)
        wrong = got != expected
        if name in read:
            wrong &= read[name]
        if wrong.any():
            row, *column = _first(wrong)
            place = f"{name}: row {row}" + "".join(f", column {c}" for c in column)
            yield _line(place, got[row, *column].item(), expected[row, *column].item(), wrong)


def _first(wrong: Tensor) -> list[int]:
    """The index of the first true value; there must be one."""
    first = wrong.flatten().to(torch.uint8).argmax()
    return [int(i) for i in torch.unravel_index(first, wrong.shape)]


def _bits(x: Tensor) -> Tensor:
    """Latents `[num_pages, page_size, width]` as integers `[slots, width]`, so that NaN equals itself."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.view(integers[x.element_size()]).flatten(0, 1)


def _line(place: str, got: float, expected: float, wrong: Tensor, note: str = "") -> str:
    others = int(wrong.sum()) - 1
    notes = [note] * bool(note) + [f"{others:,} more differ"] * bool(others)
    return "; ".join([f"{place}: {got!r}, eager {expected!r}", *notes])
