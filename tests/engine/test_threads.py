"""One thread at a time owns an engine: a call from another raises at once, and the owner's calls are not affected."""

import asyncio
import copy
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mla_compile import Completion, Engine, MLAError
from mla_compile.engine import Request
from mla_compile.engine.single_owner import SingleOwner
from tests.engine.engines import engine, finish

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9], [10, 11, 12, 13, 14], list(range(1, 30))]
LENGTH = 12


@pytest.fixture(autouse=True)
def threads_switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return [completion.token_ids for completion in engine().generate(PROMPTS, max_new_tokens=LENGTH)]


class Client:
    """A thread that adds, steps and aborts at random, and remembers what was taken on and how often it was refused."""

    def __init__(self, of: Engine, seed: int) -> None:
        self.engine, self.random = of, random.Random(seed)
        self.taken: list[tuple[int, Request]] = []
        self.aborted: set[Request] = set()
        self.refusals: list[str] = []

    def run(self) -> None:
        for _ in range(60):
            try:
                self.act()
            except MLAError as error:
                self.refusals.append(str(error))

    def act(self) -> None:
        dice = self.random.random()
        if dice < 0.2:
            number = self.random.randrange(len(PROMPTS))
            self.taken.append((number, self.engine.add(PROMPTS[number], max_new_tokens=LENGTH)))
        elif dice < 0.25 and self.taken:
            _, generation = self.random.choice(self.taken)
            generation.abort()
            self.aborted.add(generation)
        elif dice < 0.3:
            self.engine.capture_report()
        else:
            assert self.engine.stats.rows_in_use <= 4 and self.engine.has_work() in (True, False)
            self.engine.step()


@pytest.mark.parametrize("seed", range(4))
def test_threads_that_meet_are_refused_and_what_was_taken_on_is_right(
    seed: int, expected: list[list[int]]
) -> None:
    mine = engine()
    clients = [Client(mine, 10 * seed + i) for i in range(4)]
    run_together([client.run for client in clients])
    finish(mine)
    taken = [pair for client in clients for pair in client.taken]
    aborted = set().union(*(client.aborted for client in clients))
    for number, generation in taken:
        completion = generation.completion
        if generation in aborted and completion.finish_reason == "abort":
            assert completion.token_ids == expected[number][: len(completion.token_ids)]
        else:
            assert (completion.token_ids, completion.finish_reason) == (expected[number], "length")
    refusals = [refusal for client in clients for refusal in client.refusals]
    assert taken and refusals
    assert all(
        refusal.startswith("engine: expected one thread at a time, got Thread") for refusal in refusals
    )
    assert mine.stats.pages_in_use == mine.stats.rows_in_use == mine.stats.num_waiting == 0


def run_together(calls: Sequence[Callable[[], object]]) -> None:
    """Run each call in a thread of its own; none may fail or hang."""
    with ThreadPoolExecutor(len(calls), thread_name_prefix="Thread") as pool:
        for future in [pool.submit(call) for call in calls]:
            future.result(timeout=120)


CALLS: dict[str, Callable[[Engine, Request], object]] = {
    "add": lambda of, _: of.add([1, 2]),
    "abort": lambda of, first: of.abort(first),
    "step": lambda of, _: of.step(),
    "generate": lambda of, _: of.generate([[1, 2]], max_new_tokens=2),
    "stream": lambda of, _: list(of.stream([[1, 2]], max_new_tokens=2)),
    "async": lambda of, first: asyncio.run(anext(aiter(first))),  # type: ignore[arg-type]
    "warm_up": lambda of, _: of.warm_up(),
    "reset_prefix_cache": lambda of, _: of.reset_prefix_cache(),
    "capture_report": lambda of, _: of.capture_report(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_refused_call_names_the_owning_thread_and_changes_nothing(
    name: str, expected: list[list[int]]
) -> None:
    mine, errors = engine(), []

    def meet() -> None:
        try:
            CALLS[name](mine, first)
        except MLAError as error:
            errors.append(error)

    def choose(logits: torch.Tensor, drafts: torch.Tensor, completions: Sequence[Completion]) -> torch.Tensor:
        """In the middle of a step."""
        if not errors:
            other = threading.Thread(target=meet, name="the second")
            other.start()
            other.join()
        return logits.argmax(dim=-1)

    first = mine.add(PROMPTS[0], max_new_tokens=LENGTH)
    completions = [[], *mine.stream(PROMPTS[1:2], max_new_tokens=LENGTH, choose=choose)][-1]
    (error,) = errors
    assert (
        error.name == "engine" and "the second while MainThread" in error.got and "one thread" in error.hint
    )
    finish(mine)
    assert completions[0].token_ids == expected[1]
    left = name == "async"  # its iteration has ended, so it is aborted when the step ends
    assert (first.completion.finish_reason, mine.stats.num_waiting) == ("abort" if left else "length", 0)
    assert first.completion.token_ids == expected[0][: len(first.completion.token_ids)]


def test_an_abort_in_a_callback_of_a_step_ends_the_request_with_that_step(expected: list[list[int]]) -> None:
    mine, ended = engine(), list[bool]()
    first, second = (mine.add(prompt, max_new_tokens=LENGTH) for prompt in PROMPTS[:2])

    def choose(logits: torch.Tensor, *_: object) -> torch.Tensor:
        second.abort()
        ended.append(second.has_ended)
        return logits.argmax(dim=-1)

    texts = list(mine.stream(PROMPTS[2:3], max_new_tokens=LENGTH, choose=choose))[-1]
    finish(mine)
    assert ended[:2] == [False, True]  # the first step has its row
    assert second.completion.finish_reason == "abort"
    assert [texts[0].token_ids, first.completion.token_ids] == [expected[2], expected[0]]
    assert (mine.stats.rows_in_use, mine.stats.num_waiting) == (0, 0)


@pytest.mark.parametrize("call", [Engine.step, lambda of: of.generate([[1]], max_new_tokens=2)])
def test_a_step_in_a_callback_of_a_step_ends_that_stream_alone(
    call: Callable[[Engine], object], expected: list[list[int]]
) -> None:
    mine = engine()

    def choose(logits: torch.Tensor, *_: object) -> torch.Tensor:
        call(mine)
        return logits.argmax(dim=-1)

    first = mine.add(PROMPTS[0], max_new_tokens=LENGTH)
    with pytest.raises(MLAError, match=r"^engine: expected no step inside a step.*return from it"):
        list(mine.stream(PROMPTS[1:2], max_new_tokens=LENGTH, choose=choose))
    finish(mine)
    assert first.completion.token_ids == expected[0]
    assert (mine.stats.rows_in_use, mine.stats.num_waiting) == (0, 0)


def test_threads_may_take_turns(expected: list[list[int]]) -> None:
    mine, texts = engine(), []
    for i, prompt in enumerate(PROMPTS):
        other = threading.Thread(
            target=lambda p=prompt: texts.append(mine.generate([p], max_new_tokens=LENGTH))
        )
        other.start()
        other.join()
        assert texts[i][0].token_ids == expected[i]


def test_deferred_calls_run_once_the_lock_is_released_in_whatever_order_threads_run() -> None:
    for seed in range(20):
        lock, done, dice = SingleOwner(), [], random.Random(seed)
        orders = [[dice.random() < 0.5 for _ in range(200)] for _ in range(3)]

        def act(order: list[bool], lock: SingleOwner = lock, done: list[int] = done) -> None:
            for enters in order:
                if not enters:
                    lock.when_released(lambda: done.append(1))
                    continue
                try:
                    with lock, lock:
                        pass
                except MLAError:
                    pass

        run_together([lambda order=order: act(order) for order in orders])
        assert len(done) == sum(not enters for order in orders for enters in order)


def test_an_engine_may_be_copied() -> None:
    copied = copy.deepcopy(engine())
    assert copied.generate(PROMPTS[:1], max_new_tokens=2)[0].finish_reason == "length"
