"""What proposes the tokens that a step verifies: the table of drafters.

Whatever they propose, the tokens are the target's own.

Nothing else in the package asks for a drafter by its name. A new one is a class with the methods of `Drafter`, a row of
`DRAFTERS`, and its name in `defaults.DrafterName`, for the command's flag (`docs/add-a-drafter.md`). One's own needs no
row: see `examples/add_a_drafter.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from mla_compile.batch import ForwardOutput, MLABatch
from mla_compile.caches import CacheSpec
from mla_compile.defaults import DrafterName
from mla_compile.errors import MLAError
from mla_compile.speculate.choice import choose_tokens
from mla_compile.speculate.chunks import PromptChunks
from mla_compile.speculate.ngram import lookup_drafts
from mla_compile.speculate.state import DecodeState
from mla_compile.speculate.target import Target


@dataclass(frozen=True)
class Verified:
    """What came of a verification, before the state moves on, and what the step asks of its drafter.

    k: drafts a row.
    sampled: whether any row samples; see `choose_tokens`.
    targets: the target's tokens, int64 `[rows, k + 1]`, 0 where there is none; they take the positions after the
        state's `num_cached`.
    accepted: how many drafts a row emits, int32 `[rows]`: those that were accepted, as far as stop ids and its length
        let them.
    count: how many of them a row emits, int32 `[rows]`; 0 for an inactive row.
    output: what the trunk's forward gave at the k + 1 positions, `[rows * (k + 1), hidden_size]`.
    num_cached: the state's from now on, int32 `[rows]`.
    active: the rows that go on, bool `[rows]`.
    q_lens: how many of its k + 1 positions a row that goes on has run, int32 `[rows]`; 0 for any other row.
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
    """Proposes k tokens a row. It owns its weights and caches; all steps of an engine share one.

    Its methods are part of the captured step: nothing is read on the host. It may have two more members:
    `cache_specs()`, for caches of its own, which the engine allocates (a list of `CacheSpec`); and `aux_layers`, a
    tuple of the target's layers, by index, whose outputs it reads beside the final hidden states.
    """

    def fill(self, chunks: PromptChunks, output: ForwardOutput) -> None:
        """Take in prompt chunks, of whose tokens the trunk's forward gave `output`."""

    def draft(self, state: DecodeState, verified: Verified) -> Tensor:
        """Drafts for the `verified.k` positions behind the newest tokens, int64 `[rows, k]`; anything for inactive
        rows, and behind a row's own `num_drafts`. A row's text is the first `verified.num_cached + 1` ids of its
        history."""


@dataclass(frozen=True)
class DrafterSettings:
    """What a drafter is made for.

    model: whose caches have `page_size` tokens a page.
    num_speculative_tokens: k, the drafts of a step.
    decode_backend: of decode segments; see `DecodeSegment`.
    """

    model: Target
    num_speculative_tokens: int
    page_size: int
    decode_backend: str | None


@dataclass(frozen=True)
class DrafterKind:
    """A row of `DRAFTERS`, or a drafter of one's own, for `Engine(drafter=...)`.

    name: what errors call it.
    build: makes the one drafter of an engine.
    needs_mtp: whether it runs the model's MTP layer.
    needs_history: whether it reads `DecodeState.history`; states have none otherwise.
    """

    name: str
    build: Callable[[DrafterSettings], Drafter]
    needs_mtp: bool = False
    needs_history: bool = False

    def __post_init__(self) -> None:
        if not callable(self.build):
            raise MLAError("build", "a function of DrafterSettings that makes a drafter", repr(self.build))

    def serves(self, *, has_mtp: bool) -> bool:
        """Whether a model has what it needs."""
        return has_mtp or not self.needs_mtp


class MtpDrafter(nn.Module):
    """The model's own MTP layer, k times in turn.

    It has read each token's hidden state beside the token after it. So after an acceptance it catches up on the
    emitted tokens, k + 1 positions a row as in verification, which gives the first draft; each further one comes from a
    pass over the output of the one before.
    """

    model: Target

    def __init__(self, settings: DrafterSettings) -> None:
        super().__init__()
        self.model = settings.model
        self.page_size = settings.page_size
        self.decode_backend = settings.decode_backend

    def cache_specs(self) -> list[CacheSpec]:
        """The cache of the layer."""
        return [spec for spec in self.model.cache_specs() if spec.owner == "drafter"]

    def fill(self, chunks: PromptChunks, output: ForwardOutput) -> None:
        """Write the layer's latents of the chunks."""
        # Nobody reads what this returns, so in a graph it comes down to the latents. They are there before a decode row
        # attends. That of a prompt's last token, whose successor is yet unknown, `draft` writes again.
        batch = MLABatch(prefill=chunks.segment)
        self.model.forward_mtp(chunks.next_token_ids, output.hidden, chunks.positions, batch)

    def draft(self, state: DecodeState, verified: Verified) -> Tensor:
        """See `Drafter`."""
        q_len, accepted = verified.k + 1, verified.accepted
        hidden = self._run(
            state, verified.targets.view(-1), verified.output.hidden, state.num_cached, verified.q_lens, q_len
        )
        picked = torch.arange(accepted.shape[0], device=accepted.device) * q_len + accepted
        hidden = torch.index_select(hidden, 0, picked)
        drafts: list[Tensor] = []
        for j in range(verified.k):
            if j > 0:
                place = verified.num_cached + (j - 1)
                # What the layer drafts there takes the position after the next, which must be one of the row's.
                runs = verified.active & (j < state.num_drafts) & (place + 2 < state.max_len)
                hidden = self._run(state, drafts[-1], hidden, place, runs.to(torch.int32), 1)
            position = (verified.num_cached + (1 + j)).long()[:, None]
            before = torch.stack(drafts, dim=1) if drafts else state.drafts[:, :0]
            logits = self.model.logits(hidden)[:, None]
            drafts.append(choose_tokens(state, logits, position, before, sampled=verified.sampled)[:, 0])
        return torch.stack(drafts, dim=1)

    def _run(
        self,
        state: DecodeState,
        next_token_ids: Tensor,
        hidden: Tensor,
        num_cached: Tensor,
        q_lens: Tensor,
        q_len: int,
    ) -> Tensor:
        """The layer at `q_len` positions a row, of which `q_lens` `[rows]` count: `[rows * q_len, hidden_size]`."""
        batch, positions = state.decode_batch(
            num_cached, q_lens, q_len, page_size=self.page_size, backend=self.decode_backend
        )
        return self.model.forward_mtp(next_token_ids, hidden, positions, batch)


class NgramDrafter(nn.Module):
    """Prompt look-up in `DecodeState.history`, for any model: no weights, no caches."""

    def __init__(self, settings: DrafterSettings) -> None:
        super().__init__()

    def fill(self, chunks: PromptChunks, output: ForwardOutput) -> None:
        """Nothing: a row's history has its whole prompt from the start."""

    def draft(self, state: DecodeState, verified: Verified) -> Tensor:
        """See `Drafter`."""
        if state.history is None:
            raise MLAError("state.history", "a tensor, for n-gram drafts", None, "allocate with history_len")
        return lookup_drafts(state.history, verified.num_cached + 1, verified.k)


DRAFTERS = (
    DrafterKind("mtp", MtpDrafter, needs_mtp=True),
    DrafterKind("ngram", NgramDrafter, needs_history=True),
)
"""The first one that serves a model drafts for it where nobody has asked for another."""

ANY_MODEL = next(kind.name for kind in DRAFTERS if kind.serves(has_mtp=False))
"""The drafter to recommend to those whose model has no MTP layer."""


def cache_specs(model: Target, drafter: Drafter | None) -> list[CacheSpec]:
    """The caches that steps of a model and its drafter use, the target's first."""
    specs = [spec for spec in model.cache_specs() if spec.owner == "target"]
    own: list[CacheSpec] = getattr(drafter, "cache_specs", list)()
    return specs + own


def known_drafter(drafter: object) -> DrafterKind | None:
    """The drafter of that name, or one's own; None for None.

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


def select_drafter(drafter: DrafterName | DrafterKind | None, *, has_mtp: bool) -> DrafterKind:
    """What drafts for a model.

    Raises:
        MLAError: an unknown drafter, or one that needs an MTP layer for a model without one.
    """
    kind = known_drafter(drafter)
    if kind is None:
        return next(kind for kind in DRAFTERS if kind.serves(has_mtp=has_mtp))
    if not kind.serves(has_mtp=has_mtp):
        hint = "load a checkpoint with one"
        raise MLAError(
            "drafter", f"{ANY_MODEL!r} or None for a model without an MTP layer", repr(kind.name), hint
        )
    return kind


def loads_mtp(num_speculative_tokens: int | None, drafter: DrafterName | DrafterKind | None) -> bool | None:
    """`load_model`'s `mtp` for these drafts: False where the layer would do nothing, None where it may help."""
    kind = known_drafter(drafter)
    return False if num_speculative_tokens == 0 or (kind is not None and not kind.needs_mtp) else None
