"""Random traces through the real engine in which something fails: an interrupt, a cancellation, an allocation.

KeyboardInterrupt, CancelledError or an exception comes before the n-th line that the engine's files run in steps,
`add`, `abort` or `warm_up`, or while a step is recorded; or the n-th operation of torch in one of these finds no
memory. Some engines record their steps, on stand-ins for CUDA graphs. Reports are also late by a number that changes.
After it each request goes on, or has ended by name. Those that ended are added again, and all tokens are then right,
no page is lost, and every invariant of `check_invariants` holds.
"""

import argparse
import ast
import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mla_compile.engine
from mla_compile.engine import Request
from mla_compile.engine.engine import INTERRUPTED
from stress.engines import drawn_trace
from stress.runner import Case, Draw, command
from tests.engine.engine_traces import EngineRun, Outcome, check_invariants, model
from tests.engine.replays import recording
from tests.engine.toy_engine import Arrival, Trace

ENGINE = str(Path(mla_compile.engine.__file__).parent)
MESSAGE = "what the test raises"
NAMES = (MESSAGE, INTERRUPTED, "generator didn't yield")
"""The last: a context manager's generator has caught the error before its `yield`, where no real one comes."""
ERRORS: tuple[Callable[[], BaseException], ...] = (
    lambda: KeyboardInterrupt(MESSAGE),
    lambda: asyncio.CancelledError(MESSAGE),
    lambda: RuntimeError(MESSAGE),
)


RECORD, WARM_UP = "record", "warm_up"
PARTS = {"step": (8, 3000), "add": (1, 150), "abort": (1, 40), RECORD: (2, 60), WARM_UP: (1, 400)}
"""The calls of an engine in which something fails: how often, and the most events before it."""


class Fault:
    """Fails once, before the n-th event while it is `armed`. where: the place that failed; None before that."""

    def __init__(self, n: int, error: BaseException) -> None:
        self.n, self.error = n, error
        self.where: str | None = None

    def happens(self, place: Callable[[], str]) -> None:
        self.n -= 1
        if self.n == 0:
            self.where = place()
            raise self.error


@cache
def _heads(file: str) -> set[int]:
    """The lines of a file's `with` statements, without those of their blocks."""
    nodes = [node for node in ast.walk(ast.parse(Path(file).read_text())) if isinstance(node, ast.With)]
    return {line for node in nodes for line in range(node.lineno, node.body[0].lineno)}


class LineFault(Fault):
    """The events are lines of the engine's files.

    The end of a `with` block is none: Python traces its line again, but handles no signal before it calls `__exit__`.
    """

    def _trace(self, frame: FrameType, _: str, __: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(ENGINE):
            return None
        begun: set[int] = set()

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            line = frame.f_lineno
            if event == "line" and not (line in begun and line in _heads(file)):
                begun.add(line)
                self.happens(lambda: f"{Path(file).name}:{line}")
            return trace

        return trace

    @contextmanager
    def armed(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._trace if self.where is None else before)
        try:
            yield
        finally:
            sys.settrace(before)


class OpFault(Fault, TorchDispatchMode):
    """The events are operations of torch."""

    def __init__(self, n: int, error: BaseException) -> None:
        TorchDispatchMode.__init__(self)
        Fault.__init__(self, n, error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.happens(lambda: f"op {func}")
        return func(*args, **(kwargs or {}))

    @contextmanager
    def armed(self) -> Iterator[None]:
        with self:
            yield


class FaultRun(EngineRun):
    """A trace with a fault in its calls of `part`, a name of `PARTS`."""

    def __init__(
        self, trace: Trace, fault: LineFault | OpFault, part: str, lags: list[int], *, captured: bool
    ) -> None:
        super().__init__(trace, captured=captured)
        self.fault, self.part, self.lags = fault, part, lags
        self.num_hit = 0
        if part == RECORD:
            return
        real = getattr(self.engine, part)

        def failing(*args: Any, **kwargs: Any) -> Any:
            with self.fault.armed():
                return real(*args, **kwargs)

        setattr(self.engine, part, failing)

    def serve(self, arrivals: tuple[Arrival, ...]) -> Outcome:
        if self.part == WARM_UP:
            try:
                self.engine.warm_up()
            except BaseException as error:
                self._is_the_fault(error)
            check_invariants(self.engine)
        return super().serve(arrivals)

    def _add(self, number: int, arrival: Arrival) -> None:
        try:
            super()._add(number, arrival)
        except BaseException as error:
            self._is_the_fault(error)
            super()._add(number, arrival)

    def _step(self) -> None:
        self.engine.report_lag = self.lags[self.engine.stats.num_steps % len(self.lags)]
        try:
            super()._step()
        except BaseException as error:
            self._is_the_fault(error)
            check_invariants(self.engine)
        waiting = set(self.engine._scheduler.requests())
        for number, request in list(self.requests.items()):
            error = request.completion.error or ""
            if request.has_ended and any(name in error for name in NAMES):
                self.num_hit += 1
                self._check_beginning(number, request)
                self._add(number, self.trace.arrivals[number])
            else:
                assert request.has_ended or request in waiting, f"request {number} is lost"

    def _check_beginning(self, number: int, request: Request) -> None:
        """Of the tokens of a request that the fault ended."""
        before = request.completion
        alone = self.alone(self.trace.arrivals[number])
        assert before.finish_reason == "error" and before.token_ids == alone[: len(before.token_ids)]

    def abort(self, request: Request) -> None:
        try:
            request.abort()
        except BaseException as error:
            self._is_the_fault(error)
            request.abort()
        assert request.has_ended and request not in self.engine._scheduler.requests()

    def _is_the_fault(self, error: BaseException) -> None:
        if error is not self.fault.error and str(error) != NAMES[-1]:
            raise error


def run(draw: Draw) -> str:
    trace = drawn_trace(draw)
    trace = replace(trace, poison=None)
    part = draw.choices(list(PARTS), [often for often, _ in PARTS.values()])[0]
    n = draw.randint(1, PARTS[part][1])
    error = draw.choice(ERRORS)()
    fault: LineFault | OpFault = LineFault(n, error)
    if part not in ("add", "abort") and draw.random() < 0.3:
        fault = OpFault(n, torch.OutOfMemoryError(MESSAGE))
    lags = [draw.randint(0, 2) for _ in range(draw.randint(1, 4))]
    draw.note(part, type(fault).__name__, n, type(error).__name__, "lags", lags, trace)
    draw.note(lambda: f"at {fault.where}")
    captured = part == RECORD or draw.random() < 0.2
    inside = fault.armed if part == RECORD else nullcontext
    with torch.compiler.set_stance("force_eager"), ExitStack() as stack:
        if captured:
            stack.enter_context(recording(model(), inside=inside, eagerly=True))
        ran = FaultRun(trace, fault, part, lags, captured=captured)
        ran.run()
    if fault.where is None:
        return f"{part}: no such event"
    kind = "no memory" if isinstance(fault, OpFault) else type(error).__name__
    return f"{part}, {kind}: {'requests ended by name' if ran.num_hit else 'all went on'}"


def make(_: argparse.Namespace) -> Case:
    return run


def main() -> None:
    command("faults", make)


if __name__ == "__main__":
    main()
