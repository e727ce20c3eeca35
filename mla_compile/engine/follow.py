"""The loop of ranks above 0 of a shared model: receive the orders of rank 0's engine, and run them."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from mla_compile.engine.buckets import CaptureReport
from mla_compile.engine.caches import EngineCaches
from mla_compile.engine.choice import RankZeroFailed
from mla_compile.engine.completion import Completion
from mla_compile.engine.config import EngineConfig
from mla_compile.engine.launch import Launcher
from mla_compile.engine.request import Request
from mla_compile.engine.scheduler import Chunk, Grant, Plan
from mla_compile.errors import MLAError
from mla_compile.models import MLAForCausalLM
from mla_compile.ranks import Ranks
from mla_compile.sampling_params import SamplingParams
from mla_compile.speculate import DrafterKind
from mla_compile.speculate.drafter import DRAFTERS


@torch.inference_mode(False)
def follow(model: MLAForCausalLM, *, drafters: Sequence[DrafterKind] = ()) -> CaptureReport | None:
    """Run the steps of rank 0's engines on this rank's part of the model, until rank 0 closes one or its program ends.

    Args:
        model: what `load_model(parallel=...)` returned, on a rank above 0.
        drafters: custom kinds that rank 0's engines may use (`Engine(drafter=...)`).

    Returns:
        What this rank compiled and captured for the last engine; None if there was none.

    Raises:
        MLAError: the model is not shared, or this is rank 0.
        Exception: what the model raised; rank 0 then ends.
    """
    ranks = None if model.parallel is None else model.parallel.ranks
    if ranks is None or ranks.rank == 0:
        got = "one that no other process shares" if ranks is None else "rank 0, which takes requests"
        raise MLAError("model", "a model on a rank above 0", got, "use Engine")
    follower = _Follower(model, ranks, [*drafters, *DRAFTERS])
    ranks.follows = True
    try:
        while follower.run_next_order():
            pass
    except BaseException:
        ranks.fail()
        raise
    finally:
        ranks.follows = False
    return follower.launcher.steps.report() if hasattr(follower, "launcher") else None


class _Follower:
    """Runs orders. An order of rank 0 is the name of a method of this class, with its arguments.

    launcher: of rank 0's newest engine.
    """

    def __init__(self, model: MLAForCausalLM, ranks: Ranks, drafters: Sequence[DrafterKind]) -> None:
        self._model, self._ranks, self._drafters = model, ranks, drafters
        self._requests: dict[int, Request] = {}  # running ones, by rank 0's id
        self.launcher: Launcher

    def run_next_order(self) -> bool:
        """Returns False after the last one, or when rank 0 has shut down cleanly."""
        name, *content = self._ranks.receive() or ["close"]
        if name == "close":
            return False
        getattr(self, name)(*content)
        return True

    def begin(self, settings: dict[str, Any]) -> None:
        """Prepare for a new engine with these settings."""
        name = settings["drafter"]
        kind = next((kind for kind in self._drafters if kind.name == name), None)
        if kind is None:
            names = ", ".join(repr(kind.name) for kind in self._drafters)
            expected = f"rank 0's drafter, one of {names}"
            raise MLAError("drafters", expected, repr(name), "pass it to `follow` too")
        config = EngineConfig(**settings | {"drafter": kind}).fitted_to(self._model)
        drafter = config.build_drafter(self._model)
        EngineCaches(self._model, drafter, config)
        self.launcher = Launcher(self._model, drafter, config, self._ranks)
        self._requests.clear()

    def launch(self, removed: list[int], admitted: Any, grants: Any, decodes: list[int], chunks: Any) -> None:
        """Run a `Plan`."""
        requests = self._requests
        ended = [requests.pop(number) for number in removed]
        if admitted:
            self.launcher.weights.have_changed()
        requests |= {number: _read(content) for number, content in admitted}
        plan = Plan(
            ended,
            [requests[number] for number, _ in admitted],
            [Grant(requests[number], *grant) for number, *grant in grants],
            [requests[number] for number in decodes],
            [Chunk(requests[number], *chunk) for number, *chunk in chunks],
        )
        with suppress(RankZeroFailed):  # its next order is `clear`
            self.launcher.launch(plan)

    def warm_up(self, kinds: list[bool], prompts: bool, parts: bool) -> None:
        """See `Launcher.warm_up`."""
        self.launcher.warm_up(kinds, prompts=prompts, parts=parts)

    def clear(self) -> None:
        """Forget all requests."""
        self._requests.clear()
        self.launcher.clear()


def _read(content: dict[str, Any]) -> Request:
    return Request(
        content["prompt"],
        content["max_len"],
        params=SamplingParams(**content["params"]),
        stop_ids=frozenset(content["stop_ids"]),
        completion=Completion(token_ids=content["emitted"]),
        choose=_chosen_by_rank_0 if content["is_chosen_on_host"] else None,
        max_drafts=content["max_drafts"],
    )


def _chosen_by_rank_0(logits: Tensor, drafts: Tensor, completions: Sequence[Completion]) -> Tensor:
    """A placeholder: launchers receive the tokens that rank 0 chose."""
    raise AssertionError("rank 0 chooses")
