"""What the ranks above 0 of a model that processes share run: what rank 0's engines tell them."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from mla_compile.engine.buckets import CaptureReport
from mla_compile.engine.caches import EngineCaches
from mla_compile.engine.choice import RankZeroFailed
from mla_compile.engine.config import EngineConfig
from mla_compile.engine.launch import Launcher
from mla_compile.engine.orders import Order, content_of, plan_of
from mla_compile.engine.request import Request
from mla_compile.engine.variants import Variant
from mla_compile.errors import MLAError
from mla_compile.models import MLAForCausalLM
from mla_compile.ranks import Ranks
from mla_compile.speculate import DrafterKind
from mla_compile.speculate.drafter import DRAFTERS


@torch.inference_mode(False)
def follow(model: MLAForCausalLM, *, drafters: Sequence[DrafterKind] = ()) -> CaptureReport | None:
    """Run the steps of rank 0's engines on this rank's part of the model, until rank 0 closes one or its program ends.

    Args:
        model: what `load_model(parallel=...)` returned, on a rank above 0.
        drafters: kinds of one's own, of which rank 0's engines may have any (`Engine(drafter=...)`).

    Returns:
        What this rank compiled and captured for the last engine; None where there was none.

    Raises:
        MLAError: the model is not shared, or this is rank 0.
        Exception: what the model raised; rank 0 ends then.
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
    return None if follower.launcher is None else follower.launcher.steps.report()


class _Follower:
    """launcher: of rank 0's newest engine."""

    def __init__(self, model: MLAForCausalLM, ranks: Ranks, drafters: Sequence[DrafterKind]) -> None:
        self._model, self._ranks, self._drafters = model, ranks, drafters
        self._requests: dict[int, Request] = {}
        self.launcher: Launcher | None = None

    def run_next_order(self) -> bool:
        """False: it was the last one, or rank 0 has shut down cleanly."""
        numbers = self._ranks.hear()
        order = Order.CLOSE if numbers is None else Order(numbers[0])
        if order == Order.CLOSE or numbers is None:
            return False
        if order == Order.ENGINE:
            self._make_launcher(content_of(numbers))
            return True
        launcher = self.launcher
        assert launcher is not None, "an engine comes first"
        if order == Order.LAUNCH:
            with suppress(RankZeroFailed):  # it says next to begin anew
                launcher.launch(plan_of(numbers, self._requests))
        elif order == Order.WARM_UP:
            settings = content_of(numbers)
            num_stop_ids, prompts = settings.pop("num_stop_ids"), settings.pop("prompts")
            launcher.warm_up(Variant(**settings), num_stop_ids, prompts)
        else:
            self._requests.clear()
            launcher.rows.clear()
        return True

    def _make_launcher(self, settings: dict[str, Any]) -> None:
        name = settings["drafter"]
        kind = next((kind for kind in self._drafters if kind.name == name), None)
        if kind is None:
            names = ", ".join(repr(kind.name) for kind in self._drafters)
            raise MLAError("drafters", f"rank 0's among {names}", repr(name), "give it to `follow` too")
        config = EngineConfig(**settings | {"drafter": kind}).fitted_to(self._model)
        drafter = config.build_drafter(self._model)
        EngineCaches(self._model, drafter).allocate(config)
        self.launcher = Launcher(self._model, drafter, config, self._ranks)
        self._requests.clear()
