"""Rank 0's launcher of a shared model: it broadcasts each call to the other ranks, then runs it."""

from collections.abc import Sequence
from dataclasses import fields

from mla_compile.engine.config import EngineConfig, FittedConfig
from mla_compile.engine.launch import Launch, Launcher
from mla_compile.engine.request import Request
from mla_compile.engine.scheduler import Plan
from mla_compile.hub import find_checkpoint
from mla_compile.ranks import Ranks
from mla_compile.sampling_params import SamplingParams
from mla_compile.speculate import Drafter, ServedModel

_TYPES = {field.name: field.type for field in fields(SamplingParams) if field.type in (int, float)}
"""The numeric sampling parameters; of the others a step reads `logprobs` and `logit_bias`."""


class LeadingLauncher(Launcher):
    """A `Launcher` whose calls `follow` repeats on the other ranks. A request is identified there by its id()."""

    def __init__(
        self, model: ServedModel, drafter: Drafter | None, config: FittedConfig, ranks: Ranks
    ) -> None:
        super().__init__(model, drafter, config, ranks)
        self._order = ranks.broadcast
        settings = {field.name: getattr(config, field.name) for field in fields(EngineConfig)}
        head = config.drafter_model
        drafter_model = None if head is None else str(find_checkpoint(head, "drafter_model").absolute())
        self._order(["begin", settings | {"drafter": config.drafter.name, "drafter_model": drafter_model}])

    def launch(self, plan: Plan) -> Launch:
        self._order(
            [
                "launch",
                [id(request) for request in plan.removed],
                [(id(request), _written(request)) for request in plan.admitted],
                [(id(grant.request), grant.first, grant.pages) for grant in plan.grants],
                [id(request) for request in plan.decodes],
                [(id(c.request), c.start, c.length, c.is_last) for c in plan.chunks],
            ]
        )
        return super().launch(plan)

    def warm_up(self, kinds: Sequence[bool], *, prompts: bool, parts: bool) -> None:
        self._order(["warm_up", list(kinds), prompts, parts])
        super().warm_up(kinds, prompts=prompts, parts=parts)

    def clear(self) -> None:
        self._order(["clear"])
        super().clear()


def _written(request: Request) -> dict[str, object]:
    """The fields of a request that a step reads."""
    params = {name: kind(getattr(request.params, name)) for name, kind in _TYPES.items()}
    return {
        "prompt": request.prompt,
        "max_len": request.max_len,
        "max_drafts": request.max_drafts,
        "stop_ids": sorted(request.stop_ids),
        "params": params | {"logprobs": request.params.logprobs, "logit_bias": request.params.logit_bias},
        "emitted": request.completion.token_ids,
        "is_chosen_on_host": request.is_chosen_on_host,
    }
