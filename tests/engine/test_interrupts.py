"""An interrupt in the middle of a change of requests, rows and pages: all requests end, and no page is lost.

`stress.faults` has them before any line. The interrupted methods are private: no public call is between two of them.
"""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from mla_compile import Engine
from mla_compile.engine import engine as engine_module
from mla_compile.engine.pages import PagePool
from mla_compile.engine.request import Request
from mla_compile.engine.scheduler import Scheduler
from tests.engine.engine_traces import check_invariants
from tests.engine.engines import engine, finish, pool_of, texts


@contextmanager
def interrupted(of: type, name: str, before: bool) -> Iterator[None]:
    """The next call of a method is interrupted, before or after its work."""
    method, calls = getattr(of, name), []

    def once(*args: object) -> object:
        calls.append(args)
        if len(calls) == 1 and before:
            raise KeyboardInterrupt("stopped")
        result = method(*args)
        if len(calls) == 1:
            raise KeyboardInterrupt("stopped")
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of, name, once)
        with pytest.raises(KeyboardInterrupt):
            yield


PROMPTS = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]


def check_serves(of: Engine, requests: list[Request]) -> None:
    """All have ended, nothing is lost, and new requests get their tokens."""
    assert all(request.has_ended for request in requests)
    check_invariants(of)
    again = [of.add(prompt, max_new_tokens=9) for prompt in PROMPTS]
    finish(of)
    expected = [engine(0).generate([prompt], max_new_tokens=9)[0].token_ids for prompt in PROMPTS]
    assert texts(again) == expected
    assert pool_of(of).num_free == pool_of(of).num_pages - 1


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    ("part", "name"), [(Scheduler, "_leave_queue"), (PagePool, "release"), (Scheduler, "_stop")]
)
def test_of_an_abort(part: type, name: str, before: bool) -> None:
    mine = engine(1)
    requests = [mine.add(prompt, max_new_tokens=9) for prompt in PROMPTS]
    mine.step()
    with interrupted(part, name, before):
        requests[1].abort()
    check_serves(mine, requests)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("name", ["_leave_queue", "_wait", "_grant"])
def test_of_an_admission_or_a_preemption(name: str, before: bool) -> None:
    mine = engine(1, max_model_len=16, num_pages=5, max_rows=2)  # too few pages for two rows
    requests = [mine.add(prompt, max_new_tokens=9) for prompt in PROMPTS]
    with interrupted(Scheduler, name, before):
        finish(mine)
    check_serves(mine, requests)


@pytest.mark.parametrize("before", [True, False])
def test_of_an_addition(before: bool) -> None:
    mine = engine(1)
    first = mine.add(PROMPTS[0], max_new_tokens=9)
    with interrupted(Scheduler, "_wait", before):
        mine.add(PROMPTS[1], max_new_tokens=9)
    assert first.completion.error == "stopped"
    check_serves(mine, [first])


def test_an_interrupt_has_a_name_in_the_requests_that_it_ends() -> None:
    mine = engine(1)
    first = mine.add(PROMPTS[0], max_new_tokens=9)
    with pytest.raises(KeyboardInterrupt), mine._whole_or_nothing():
        raise KeyboardInterrupt
    assert first.completion.error == "KeyboardInterrupt"
    second = mine.add(PROMPTS[1], max_new_tokens=9)
    change = mine._whole_or_nothing()
    change.__enter__()
    del change  # as by an interrupt between the last line of a block and its exit
    assert second.completion.error == "interrupted"
    check_serves(mine, [first, second])


def test_a_request_that_is_too_long_ends_no_other() -> None:
    mine = engine(1, num_pages=5, max_model_len=16)
    first = mine.add(PROMPTS[0], max_new_tokens=3)
    check: Callable[..., object] = mine.add
    with pytest.raises(ValueError, match="prompt"):
        check([1] * 99, max_new_tokens=3)
    finish(mine)
    assert first.completion.finish_reason == "length"


def test_an_abort_in_a_signal_handler_ends_the_request_with_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = engine(1)
    requests = [mine.add(prompt, max_new_tokens=9) for prompt in PROMPTS]
    mine.step()
    plan = Scheduler._plan_chunks

    def interrupted(*args: Any, **kwargs: Any) -> None:
        signal.raise_signal(signal.SIGUSR1)  # the decodes are planned
        plan(*args, **kwargs)

    before = signal.signal(signal.SIGUSR1, lambda *_: requests[1].abort())
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Scheduler, "_plan_chunks", interrupted)
            mine.step()
    finally:
        signal.signal(signal.SIGUSR1, before)
    finish(mine)
    assert [request.completion.finish_reason for request in requests] == ["length", "abort", "length"]
    check_serves(mine, requests)


@pytest.mark.parametrize(
    "line", ["self._is_changing = True", "yield", "self._is_changing = is_within_another"]
)
def test_an_interrupt_at_the_end_of_a_step_leaves_an_engine_that_steps(line: str) -> None:
    mine, text = engine(1), Path(engine_module.__file__).read_text().splitlines()
    number = 1 + next(i for i, each in enumerate(text) if each.strip() == line)
    requests = [mine.add(prompt, max_new_tokens=9) for prompt in PROMPTS]

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if (event, frame.f_code.co_filename, frame.f_lineno) == ("line", engine_module.__file__, number):
            sys.settrace(before)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            mine.step()
    finally:
        sys.settrace(before)
    check_serves(mine, requests)
