"""Rank 0's engine tells the other ranks what it does, before it does it."""

from array import array
from dataclasses import fields

from mla_compile.engine.config import EngineConfig, FittedConfig
from mla_compile.engine.orders import Order, order_with, written
from mla_compile.engine.request import Request
from mla_compile.engine.scheduler import Plan
from mla_compile.engine.variants import Variant
from mla_compile.ranks import Ranks


class Leader:
    """Gives the orders of one engine, which `follow` carries out.

    Args:
        ranks: this process is rank 0 of them.
        config: of the engine; the others make launchers of the same settings.
    """

    def __init__(self, ranks: Ranks, config: FittedConfig) -> None:
        self._ranks = ranks
        self._number_of: dict[Request, int] = {}  # of each from its admission until it is removed
        self._next = 0
        settings = {field.name: getattr(config, field.name) for field in fields(EngineConfig)}
        ranks.say(order_with(Order.ENGINE, settings | {"drafter": config.drafter.name}))

    def launch(self, plan: Plan) -> None:
        """Launch a plan."""
        number_of = self._number_of
        removed = [number_of.pop(request) for request in plan.removed]
        for request in plan.admitted:
            number_of[request] = self._next
            self._next += 1
        content = (
            removed,
            [(number_of[request], written(request)) for request in plan.admitted],
            [(number_of[grant.request], grant.first, grant.pages) for grant in plan.grants],
            [number_of[request] for request in plan.decodes],
            [(number_of[c.request], c.start, c.length, c.is_last) for c in plan.chunks],
        )
        self._ranks.say(order_with(Order.LAUNCH, content))

    def warm_up(self, variant: Variant, num_stop_ids: int, prompts: bool) -> None:
        """See `Launcher.warm_up`."""
        others = {"num_stop_ids": num_stop_ids, "prompts": prompts}
        self._ranks.say(order_with(Order.WARM_UP, vars(variant) | others))

    def begin_anew(self) -> None:
        """Forget all requests."""
        self._number_of.clear()
        self._ranks.say(array("q", [Order.BEGIN_ANEW]))

    def fail(self) -> None:
        """This rank could not do what it has told the others to do, who may wait for it in a collective: they end."""
        self._ranks.fail()

    def close(self) -> None:
        """Follow no longer."""
        self._ranks.say(array("q", [Order.CLOSE]))
