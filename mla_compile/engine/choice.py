"""Tokens that the host chooses between a step's halves: by grammars and `TokenChooser`s."""

from collections.abc import Callable

import torch
from torch import Tensor

from mla_compile.engine.grammar import allowed_tokens
from mla_compile.engine.rows import Rows
from mla_compile.engine.scheduler import Plan
from mla_compile.errors import MLAError, is_request_error
from mla_compile.speculate import DecodeState
from mla_compile.speculate.choice import NO_TOKEN

ChooseTargets = Callable[[DecodeState, Tensor, Tensor | None], Tensor]
"""`SpeculativeDecoder.choose_targets`, compiled or not."""


class RankZeroFailed(Exception):
    """Rank 0 could not choose tokens, so the step does not take place."""


def choose_on_host(
    plan: Plan, rows: Rows, state: DecodeState, logits: Tensor, choose_targets: ChooseTargets
) -> Tensor:
    """The target's tokens, int64 `[rows, k + 1]`, from the logits of a step's first half."""
    vocab_size = logits.shape[-1]
    sampled = {rows[request]: request for request in plan.sampled}
    first, drafts = set(rows.of(plan.first_sampled)), state.drafts
    grammars = {row: request.grammar for row, request in sampled.items() if request.grammar is not None}
    allowed = allowed_tokens(grammars, drafts, vocab_size=vocab_size, first=first) if grammars else None
    targets = choose_targets(state, logits, allowed).clone()
    choosers = dict.fromkeys(request.choose for request in plan.sampled if request.choose is not None)
    for choose in choosers:
        mine = {row for row, request in sampled.items() if request.choose is choose}
        # A first token follows no drafts.
        for n, asked in ((1, sorted(mine & first)), (targets.shape[1], sorted(mine - first))):
            if not asked:
                continue
            index = torch.tensor(asked, device=logits.device)
            has_token = targets[index, :n] != NO_TOKEN
            try:
                completions = [sampled[row].completion for row in asked]
                chosen = choose(logits[index, :n], drafts[index, : n - 1], completions)
                _check_chosen(chosen, has_token, vocab_size)
                targets[index, :n] = torch.where(has_token, chosen, NO_TOKEN)
            except BaseException as error:
                if not is_request_error(error):
                    raise
                for row in asked:
                    sampled[row].failure = error
    return targets


def _check_chosen(chosen: object, counts: Tensor, vocab_size: int) -> None:
    """Raises `MLAError` unless a `TokenChooser` returned tokens `[rows, n]`; counts: bool, the places that matter."""
    expected = f"int64 {list(counts.shape)} of ids in [0, {vocab_size})"
    if not isinstance(chosen, Tensor):
        raise MLAError("choose", expected, repr(chosen))
    if chosen.dtype != torch.int64 or chosen.shape != counts.shape:
        raise MLAError("choose", expected, f"{chosen.dtype} {list(chosen.shape)}")
    outside = chosen[((chosen < 0) | (chosen >= vocab_size)) & counts]
    if len(outside):
        raise MLAError("choose", expected, int(outside[0]))
