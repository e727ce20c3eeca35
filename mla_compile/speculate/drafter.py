"""The drafters, which propose the tokens that a step verifies, and their table.

A drafter never changes the emitted tokens, which are the target's own.

No other code in the package refers to a drafter by its name. A new one is a class with the methods of `Drafter`, an
entry of `DRAFTERS`, and its name in `defaults.DrafterName`, for the command's flag (`docs/add-a-drafter.md`). A custom
drafter needs no entry: see `examples/add_a_drafter.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mla_compile.batch import ForwardOutput, MLABatch
from mla_compile.caches import CacheSpec
from mla_compile.defaults import DrafterName
from mla_compile.errors import MLAError
from mla_compile.models.eagle3 import check_head, load_head
from mla_compile.ops.attention.segments import decode_segment
from mla_compile.speculate.choice import choose_tokens
from mla_compile.speculate.chunks import PromptChunks
from mla_compile.speculate.ngram import lookup_drafts
from mla_compile.speculate.state import DecodeState
from mla_compile.speculate.target import Target


@dataclass(frozen=True)
class Verified:
    """The result of a verification, from which the drafter proposes, before the state advances.

    k: drafts per row.
    sampled: whether any row samples; see `choose_tokens`.
    targets: the target's tokens, int64 `[rows, k + 1]`, 0 in place of a missing one; they take the positions after the
        state's `num_cached`.
    accepted: accepted drafts that a row emits, int32 `[rows]`; a stop id or the row's length may cut them.
    count: targets that a row emits, int32 `[rows]`; 0 for an inactive row.
    output: the output of the trunk's forward at the k + 1 positions, `[rows * (k + 1), hidden_size]`.
    num_cached: the state's new value, int32 `[rows]`.
    active: the rows that go on, bool `[rows]`.
    q_lens: positions of the k + 1 that a row that goes on has run, int32 `[rows]`; 0 for any other row.
    """

    k: int
    sampled: bool
    targets: Tensor
    accepted: Tensor
    count: Tensor
    output: ForwardOutput
    num_cached: Tensor
    active: Tensor
    q_lens: Tensor


class Drafter(Protocol):
    """Proposes k tokens per row. It owns its weights and caches; all steps of an engine share one.

    Its methods are part of the captured step: the host reads nothing. It may have two more members: `cache_specs()`
    returns a list of `CacheSpec` for its own caches, which the engine allocates; `aux_layers` is a tuple of indices of
    target layers whose outputs it reads besides the final hidden states.
    """

    def fill(self, chunks: PromptChunks, output: ForwardOutput) -> None:
        """Process prompt chunks; `output` is the output of the trunk's forward for their tokens."""

    def draft(self, state: DecodeState, verified: Verified) -> Tensor:
        """Drafts for the `verified.k` positions after the newest tokens, int64 `[rows, k]`; any ids for inactive rows,
        and after a row's own `num_drafts`. A row's text is the first `verified.num_cached + 1` ids of its history."""


@dataclass(frozen=True)
class DrafterSettings:
    """The arguments of `DrafterKind.build`.

    model: the target; its caches have `page_size` tokens per page.
    num_speculative_tokens: k, the drafts of a step.
    decode_backend: of decode segments; see `DecodeSegment`.
    drafter_model: the directory of the drafter's weights, for a kind with `needs_model`.
    """

    model: Target
    num_speculative_tokens: int
    page_size: int
    decode_backend: str | None
    drafter_model: str | Path | None = None


@dataclass(frozen=True)
class DrafterKind:
    """An entry of `DRAFTERS`, or a custom drafter for `Engine(drafter=...)`.

    name: its name in errors.
    build: builds the drafter of an engine.
    needs_mtp: whether it runs the model's MTP layer.
    needs_history: whether it reads `DecodeState.history`; states have none otherwise.
    needs_model: whether it has weights in a directory, `drafter_model`.
    check_model: raises `MLAError` for a `drafter_model` that cannot be its, before a target is loaded.
    sizes: of `drafter_model`, for a target: the bytes of its weights, and those of its caches per token. Without it
        the default `max_model_len` leaves no memory for them.
    """

    name: str
    build: Callable[[DrafterSettings], Drafter]
    needs_mtp: bool = False
    needs_history: bool = False
    needs_model: bool = False
    check_model: Callable[[str | Path], None] | None = None
    sizes: Callable[[str | Path, Target], tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        if not callable(self.build):
            raise MLAError("build", "a function of DrafterSettings that returns a drafter", repr(self.build))

    def serves(self, *, has_mtp: bool, has_model: bool = False) -> bool:
        """Whether it supports a model with or without an MTP layer, with a `drafter_model` or without."""
        return (has_mtp or not self.needs_mtp) and self.needs_model == has_model


class LayerDrafter(nn.Module):
    """A drafter that runs one layer with a cache, k times in sequence.

    The layer's input at each position is a hidden state and the next token. So after an acceptance it first processes
    the emitted tokens, k + 1 positions per row as in verification, which gives the first draft; each further draft
    comes from a pass over the previous pass's output.
    """

    model: Target

    def __init__(self, settings: DrafterSettings) -> None:
        super().__init__()
        self.model = settings.model
        self.page_size = settings.page_size
        self.decode_backend = settings.decode_backend

    def hidden_of(self, output: ForwardOutput) -> Tensor:
        """The layer's hidden states at positions that the target has run, `[tokens, hidden_size]`."""
        raise NotImplementedError

    def run(self, next_token_ids: Tensor, hidden: Tensor, positions: Tensor, batch: MLABatch) -> Tensor:
        """Run the layer, and append to its cache; see `Target.forward_mtp`."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits of what `run` returned, `[..., vocab_size]`."""
        raise NotImplementedError

    def fill(self, chunks: PromptChunks, output: ForwardOutput) -> None:
        """Write the layer's cache for the chunks."""
        # The result is unused, so a compiled graph computes only the cache, before any decode row attends to it.
        # `draft` rewrites the entry of a prompt's last token, as the next token is not known yet.
        batch = MLABatch(prefill=chunks.segment)
        self.run(chunks.next_token_ids, self.hidden_of(output), chunks.positions, batch)

    def draft(self, state: DecodeState, verified: Verified) -> Tensor:
        """See `Drafter`."""
        q_len, accepted = verified.k + 1, verified.accepted
        hidden = self.hidden_of(verified.output)
        hidden = self._decode(
            state, verified.targets.view(-1), hidden, state.num_cached, verified.q_lens, q_len
        )
        picked = torch.arange(accepted.shape[0], device=accepted.device) * q_len + accepted
        hidden = torch.index_select(hidden, 0, picked)
        drafts: list[Tensor] = []
        for j in range(verified.k):
            if j > 0:
                place = verified.num_cached + (j - 1)
                # The draft made at `place` takes position `place + 2`, which must be within the row's length.
                runs = verified.active & (j < state.num_drafts) & (place + 2 < state.max_len)
                hidden = self._decode(state, drafts[-1], hidden, place, runs.to(torch.int32), 1)
            position = (verified.num_cached + (1 + j)).long()[:, None]
            before = torch.stack(drafts, dim=1) if drafts else state.drafts[:, :0]
            logits = self.logits(hidden)[:, None]
            drafts.append(choose_tokens(state, logits, position, before, sampled=verified.sampled)[:, 0])
        return torch.stack(drafts, dim=1)

    def _decode(
        self,
        state: DecodeState,
        next_token_ids: Tensor,
        hidden: Tensor,
        num_cached: Tensor,
        q_lens: Tensor,
        q_len: int,
    ) -> Tensor:
        """The layer at `q_len` positions per row, `q_lens` `[rows]` of them valid: `[rows * q_len, hidden_size]`."""
        segment, positions = decode_segment(
            num_cached,
            state.block_table,
            q_len=q_len,
            page_size=self.page_size,
            q_lens=q_lens,
            backend=self.decode_backend,
        )
        return self.run(next_token_ids, hidden, positions, MLABatch(segment))


class MtpDrafter(LayerDrafter):
    """The model's own MTP layer."""

    def cache_specs(self) -> list[CacheSpec]:
        """The cache of the layer."""
        return [spec for spec in self.model.cache_specs() if spec.owner == "drafter"]

    def hidden_of(self, output: ForwardOutput) -> Tensor:
        return output.hidden

    def run(self, next_token_ids: Tensor, hidden: Tensor, positions: Tensor, batch: MLABatch) -> Tensor:
        return self.model.forward_mtp(next_token_ids, hidden, positions, batch)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)


class Eagle3Drafter(LayerDrafter):
    """An EAGLE-3 head, whose weights are beside the target's.

    aux_layers: the target layers whose outputs it reads.
    """

    def __init__(self, settings: DrafterSettings) -> None:
        super().__init__(settings)
        assert settings.drafter_model is not None  # `EngineConfig` checks it
        target: Any = settings.model
        self.head, self.aux_layers = load_head(settings.drafter_model, target)
        self.decode_backend = None  # the engine's serves the target's widths, perhaps not the head's
        self.embed: Callable[[Tensor], Tensor] = self.head.embed_tokens or target.embed

    def cache_specs(self) -> list[CacheSpec]:
        """The cache of the head's layer."""
        return self.head.cache_specs()

    def fill(self, chunks: PromptChunks, output: ForwardOutput) -> None:
        """Write the cache of the head's layer for the chunks."""
        batch, hidden = MLABatch(prefill=chunks.segment), self.hidden_of(output)
        self.head.fill(self.embed(chunks.next_token_ids), hidden, chunks.positions, batch)

    def hidden_of(self, output: ForwardOutput) -> Tensor:
        return self.head.join(output.aux)

    def run(self, next_token_ids: Tensor, hidden: Tensor, positions: Tensor, batch: MLABatch) -> Tensor:
        out: Tensor = self.head(self.embed(next_token_ids), hidden, positions, batch)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head.logits(hidden)


class NgramDrafter(nn.Module):
    """Prompt lookup in `DecodeState.history`, for any model: no weights, no caches."""

    def __init__(self, settings: DrafterSettings) -> None:
        super().__init__()

    def fill(self, chunks: PromptChunks, output: ForwardOutput) -> None:
        """Does nothing: a row's history has its whole prompt from the start."""

    def draft(self, state: DecodeState, verified: Verified) -> Tensor:
        """See `Drafter`."""
        if state.history is None:
            raise MLAError("state.history", "a tensor, for n-gram drafts", None, "allocate with history_len")
        return lookup_drafts(state.history, verified.num_cached + 1, verified.k)


def _sizes_of_head(drafter_model: str | Path, model: Target) -> tuple[int, int]:
    """See `DrafterKind.sizes`; no weight is read."""
    head, _ = load_head(drafter_model, model, on_meta=True)
    weights = sum(weight.nbytes for weight in head.parameters())
    return weights, sum(spec.bytes_per_token for spec in head.cache_specs())


DRAFTERS = (
    DrafterKind("mtp", MtpDrafter, needs_mtp=True),
    DrafterKind("ngram", NgramDrafter, needs_history=True),
    DrafterKind("eagle3", Eagle3Drafter, needs_model=True, check_model=check_head, sizes=_sizes_of_head),
)
"""By default the first one that supports a model drafts for it."""

ANY_MODEL = next(kind.name for kind in DRAFTERS if kind.serves(has_mtp=False))
"""The drafter that errors recommend for a model without an MTP layer."""


def cache_specs(model: Target, drafter: Drafter | None) -> list[CacheSpec]:
    """The caches that steps of a model and its drafter use, the target's first."""
    specs = [spec for spec in model.cache_specs() if spec.owner == "target"]
    own: list[CacheSpec] = getattr(drafter, "cache_specs", list)()
    return specs + own


def known_drafter(drafter: object) -> DrafterKind | None:
    """The drafter of that name, or the given custom one; None for None.

    Raises:
        MLAError: anything else.
    """
    if drafter is None or isinstance(drafter, DrafterKind):
        return drafter
    for kind in DRAFTERS:
        if drafter == kind.name:
            return kind
    names = ", ".join(repr(kind.name) for kind in DRAFTERS)
    raise MLAError("drafter", f"{names}, a DrafterKind or None", repr(drafter))


def check_drafter(drafter: object, drafter_model: object) -> None:
    """Check the settings of these names.

    Raises:
        MLAError: an unknown drafter; a `drafter_model` for a drafter without weights, or none for one with weights.
    """
    kind = known_drafter(drafter)
    if drafter_model is not None and (not isinstance(drafter_model, str | Path) or drafter_model == ""):
        raise MLAError("drafter_model", "a directory with a head, or None", f"{drafter_model!r:.80}")
    if drafter_model is not None and kind is not None and not kind.needs_model:
        hint = "leave one of the two out"
        raise MLAError(
            "drafter_model", f"None, as drafter {kind.name!r} has no weights of its own", drafter_model, hint
        )
    if drafter_model is None and kind is not None and kind.needs_model:
        raise MLAError("drafter_model", f"the directory of the head, for drafter={kind.name!r}", None)
    if drafter_model is not None:
        chosen = kind or select_drafter(None, has_mtp=False, has_model=True)
        if chosen.check_model is not None:
            chosen.check_model(drafter_model)


def select_drafter(
    drafter: DrafterName | DrafterKind | None, *, has_mtp: bool, has_model: bool = False
) -> DrafterKind:
    """The drafter kind for a model, and for a `drafter_model` if there is one.

    Raises:
        MLAError: an unknown drafter, or one that needs an MTP layer for a model without one.
    """
    kind = known_drafter(drafter)
    if kind is None:
        return next(kind for kind in DRAFTERS if kind.serves(has_mtp=has_mtp, has_model=has_model))
    if kind.needs_mtp and not has_mtp:
        expected = f"{ANY_MODEL!r} or None for a model without an MTP layer"
        raise MLAError("drafter", expected, repr(kind.name), "load a checkpoint with one")
    return kind


def loads_mtp(settings: Mapping[str, object]) -> bool | None:
    """The `mtp` of `load_model` for an engine's settings: False if no draft uses the layer, None if one may.

    Raises:
        MLAError: a wrong `drafter` or `drafter_model`, before a model is loaded for it.
    """
    check_drafter(settings.get("drafter"), settings.get("drafter_model"))
    kind = known_drafter(settings.get("drafter"))
    is_other = settings.get("drafter_model") is not None or (kind is not None and not kind.needs_mtp)
    return False if settings.get("num_speculative_tokens") == 0 or is_other else None
