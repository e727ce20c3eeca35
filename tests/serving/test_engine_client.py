"""The engine in its own process: requests come back completed, and the process restarts after failures.

Tests kill or stop `_process`, which nothing public leads to.
"""

import asyncio
import errno
import os
import random
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from multiprocessing.connection import Connection

import pytest

from mla_compile import Engine, SamplingParams, load_model, load_tokenizer
from mla_compile.defaults import SHIPPED_MODEL
from mla_compile.engine.config import EngineConfig
from mla_compile.engine.stats import EngineStats
from mla_compile.errors import MLAError
from mla_compile.serving import engine_client, processes
from mla_compile.serving.engine_client import Answer, EngineClient
from mla_compile.serving.failures import Busy, NotReady
from mla_compile.serving.grammars import GrammarCheck
from mla_compile.serving.messages import Asked, GrammarSource, ModelLimits, Ready, Update
from mla_compile.serving.settings import ServerSettings

SETTINGS = ServerSettings(
    engine=EngineConfig(num_speculative_tokens=2, compile=False, max_rows=4, max_model_len=256), max_waiting=8
)
PROMPTS = [[5, 6, 7], [100, 200, 300, 400], [9]]


def with_client(test: Callable[[EngineClient], Awaitable[None]], settings: ServerSettings = SETTINGS) -> None:
    async def run() -> None:
        client = EngineClient(settings)
        try:
            await client.start()
            await test(client)
        finally:
            await client.stop()

    asyncio.run(run())


async def joined(answer: Answer) -> list[Update]:
    """All updates of each completion as one."""
    whole: dict[int, Update] = {}
    while answer.has_more():
        index, update, _ = await answer.next()
        known = whole.setdefault(index, Update())
        known.token_ids += update.token_ids
        known.draft_positions += update.draft_positions
        if update.logprobs is not None:
            known.logprobs = (known.logprobs or []) + update.logprobs
        known.finish_reason, known.text, known.error = update.finish_reason, update.text, update.error
        known.is_refused = update.is_refused
    return [whole[index] for index in sorted(whole)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def test_answers_are_the_engines_completions() -> None:
    params = [
        SamplingParams(max_tokens=24),
        SamplingParams(temperature=0.8, seed=3, logprobs=2, max_tokens=24),
        SamplingParams(max_tokens=24, stop=["e"]),
    ]
    tokenizer = load_tokenizer(SHIPPED_MODEL)
    engine = Engine(load_model(SHIPPED_MODEL), SETTINGS.engine, tokenizer=tokenizer)
    expected = engine.generate(PROMPTS, params, stop_ids=[0])

    async def test(client: EngineClient) -> None:
        answers = [client.submit([Asked(prompt, each)]) for prompt, each in zip(PROMPTS, params, strict=True)]
        together = client.submit([Asked(PROMPTS[0], params[0]), Asked(PROMPTS[1], params[1])])
        found = [(await joined(answer))[0] for answer in answers]
        for update, completion in zip([*found, *await joined(together)], [*expected, *expected[:2]]):
            assert update.token_ids == completion.token_ids
            assert update.draft_positions == completion.draft_positions
            assert (update.logprobs is None) == (completion.logprobs is None)
            for mine, theirs in zip(update.logprobs or [], completion.logprobs or [], strict=True):
                assert mine.keys() == theirs.keys()
                sent = [[each[token].logprob for token in mine] for each in (mine, theirs)]
                assert sent[0] == pytest.approx(sent[1], abs=1e-3)
            assert update.finish_reason == completion.finish_reason
        assert found[2].text == expected[2].text
        assert client.num_running == 0 and client.stats.num_tokens > 24

    with_client(test)


def test_a_grammar_is_followed_and_a_wrong_one_refused_alone() -> None:
    async def test(client: EngineClient) -> None:
        digits = Asked(PROMPTS[0], SamplingParams(max_tokens=9), GrammarSource("regex", "[0-9]{4}"))
        wrong = replace(digits, grammar=GrammarSource("json_schema", "{"))
        # It compiles, and is too much for llguidance once the text goes on.
        large = replace(digits, grammar=GrammarSource("regex", "(a{1000}){1000}"))
        free = Asked(PROMPTS[1], SamplingParams(max_tokens=9))
        followed, refused, ended, other = [client.submit([each]) for each in (digits, wrong, large, free)]
        tokenizer = load_tokenizer(SHIPPED_MODEL)
        assert tokenizer is not None
        (update,) = await joined(followed)
        text = tokenizer.decode(update.token_ids, skip_special_tokens=True)
        assert text.isdigit() and len(text) == 4 and update.finish_reason == "stop"
        (update,) = await joined(refused)
        assert update.is_refused and "expected a JSON schema" in (update.error or "")
        (update,) = await joined(ended)
        assert update.is_refused and "grammar that can continue" in (update.error or "")
        assert (await joined(other))[0].finish_reason == "length"

    with_client(test)


def test_no_more_wait_than_may_and_those_that_leave_make_room() -> None:
    async def test(client: EngineClient) -> None:
        asked = Asked(PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True))
        answers = [client.submit([asked]) for _ in range(12)]
        with pytest.raises(Busy):
            client.submit([asked])
        for answer in answers[1:]:
            client.abort(answer)
        client.abort(client.submit([asked] * 11))
        assert len((await joined(answers[0]))[0].token_ids) == 200
        await until(lambda: client.num_running == 0)

    with_client(test)


def test_a_client_finds_places_though_others_fill_the_room() -> None:
    """Clients come, ask for more or fewer, leave and end at random."""
    for seed in range(40):
        draw = random.Random(seed)
        rows, waiting = draw.randint(1, 9), draw.randint(1, 60)
        client = EngineClient(replace(SETTINGS, max_waiting=waiting))
        client.ready = Ready(ModelLimits("shipped", 99, 64), EngineStats(max_rows=rows))
        room, held, answers = rows + waiting, Counter[str](), []
        for _ in range(300):
            name = draw.choice("abcdefghij"[: draw.randint(1, 10)])
            count = draw.choice([1, 1, draw.randint(1, room)])
            others = {each for each in held if held[each] and each != name}
            share = room // (len(others) + 1)
            try:
                answer = client.submit([Asked([5], SamplingParams())] * count, name)
            except Busy:
                assert held.total() + count > room and held[name] + count > share, "its share was refused"
            else:
                assert held.total() + count <= room or held[name] + count <= share
                answers.append((answer, name, count))
                held[name] += count
            clients = sum(count > 0 for count in held.values())
            assert client.num_running == held.total() <= room * sum(1 / i for i in range(1, clients + 1))
            while answers and draw.random() < 0.4:
                answer, name, count = answers.pop(draw.randrange(len(answers)))
                client.abort(answer)
                held[name] -= count


def test_an_engine_that_dies_ends_its_requests_by_name_and_comes_back() -> None:
    async def test(client: EngineClient) -> None:
        asked = Asked(PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True))
        answer = client.submit([asked])
        await answer.next()
        assert client._process is not None
        os.kill(client._process.pid, signal.SIGKILL)
        (update,) = await joined(answer)
        assert update.finish_reason == "error"
        assert update.error == "the engine failed: its process exited with status -9"
        with pytest.raises(NotReady):
            client.submit([asked])
        await until(lambda: client.ready is not None)
        assert len((await joined(client.submit([asked])))[0].token_ids) == 200

    with_client(test)


@pytest.mark.long
def test_an_engine_that_hangs_ends_its_requests_by_name_and_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where a step on a GPU never ends, so that its report never comes. An idle one sends signs of life."""
    monkeypatch.setattr(engine_client, "_PATIENCE", 0.25)

    async def test(client: EngineClient) -> None:
        asked = Asked(PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True))
        expected = (await joined(client.submit([asked])))[0]
        await asyncio.sleep(11 * 0.25)
        assert client.ready is not None, "it is idle"
        answer = client.submit([asked])
        await answer.next()
        assert client._process is not None
        client._process.send_signal(signal.SIGSTOP)
        (update,) = await joined(answer)
        assert update.error == "the engine failed: it has hung for 2.5 s"
        assert client.num_running == 0
        await until(lambda: client.ready is not None)
        assert (await joined(client.submit([asked])))[0].token_ids == expected.token_ids

    with_client(test)


@pytest.mark.parametrize("how", ["it dies", "it cannot start"])
def test_a_process_that_fails_before_it_reads_anything_is_started_again(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    begin, num_failing = processes.start, 1

    def start(module: str) -> tuple[subprocess.Popen[bytes], Connection]:
        nonlocal num_failing
        if num_failing == 0:
            return begin(module)
        num_failing -= 1
        if how == "it cannot start":
            raise BlockingIOError(errno.EAGAIN, "no more processes")
        process, connection = begin("mla_compile.no_such_module")
        process.wait()
        return process, connection

    monkeypatch.setattr(processes, "start", start)
    monkeypatch.setattr(engine_client, "_FIRST_WAIT", 0.01)

    async def never(client: EngineClient) -> None:
        pytest.fail("it has started")

    with pytest.raises(RuntimeError, match=r"no more processes|exited with status 1"):
        with_client(never)

    async def test(client: EngineClient) -> None:
        nonlocal num_failing
        num_failing = 1
        assert client._process is not None
        client._process.kill()
        await until(lambda: client.ready is None)
        await until(lambda: client.ready is not None)
        assert num_failing == 0

    with_client(test)


def test_a_signal_to_all_processes_is_the_servers_alone() -> None:
    """As systemd sends it to a group."""

    async def test(client: EngineClient) -> None:
        answer = client.submit([Asked(PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True))])
        await answer.next()
        assert client._process is not None
        for each in (signal.SIGTERM, signal.SIGINT):
            client._process.send_signal(each)
        assert (await joined(answer))[0].finish_reason == "length"

    with_client(test)


def test_how_the_engine_stands_is_known_before_the_first_request_and_after_a_failure() -> None:
    async def test(client: EngineClient) -> None:
        fresh = client.stats
        assert (fresh.max_rows, fresh.num_pages > 0, fresh.rows_in_use) == (4, True, 0)
        answer = client.submit([Asked(PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True))] * 6)
        await until(lambda: client.stats.num_waiting > 0)
        assert client._process is not None
        client._process.kill()
        await joined(answer)
        assert client.stats == EngineStats()
        await until(lambda: client.ready is not None)
        assert replace(client.stats, step_seconds=0, total_step_seconds=0) == replace(
            fresh, step_seconds=0, total_step_seconds=0
        )

    with_client(test)


def test_a_bad_setting_raises_the_engines_error() -> None:
    settings = replace(SETTINGS, engine=replace(SETTINGS.engine, num_pages=2))

    async def test(client: EngineClient) -> None:
        pytest.fail("it has started")

    with pytest.raises(MLAError, match=r"num_pages: expected at least 17"):
        with_client(test, settings)


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ({"grammar_seconds": 1e-4}, "compiling it takes more than 0.0001 s"),
        ({"grammar_bytes": 2**24}, "compiling it takes too much memory"),
    ],
    ids=["time", "memory"],
)
def test_grammars_that_take_long_or_much_memory_are_refused(limits: dict[str, float], why: str) -> None:
    words = "|".join(f"word{i}x{i * i}" for i in range(50_000))
    large, small = GrammarSource("regex", words), GrammarSource("regex", "[a-z]+")
    check, other = GrammarCheck(replace(SETTINGS, **limits)), GrammarCheck(SETTINGS)

    async def run() -> None:
        assert await check.why_not(large) == why
        assert await other.why_not(small) is None
        assert "JSON" in (await other.why_not(GrammarSource("json_schema", "{")) or "")
        if "grammar_bytes" in limits:
            assert await check.why_not(small) is None, "the next one finds a new process"

    try:
        asyncio.run(run())
    finally:
        check.stop()
        other.stop()


def test_a_killed_check_is_no_verdict_on_its_grammar() -> None:
    check, source = GrammarCheck(SETTINGS), GrammarSource("regex", "[a-z]+")

    async def run() -> None:
        for is_loaded in (False, True):
            asked = asyncio.create_task(check.why_not(source if not is_loaded else other))
            if not is_loaded:
                await until(lambda: check._process is not None)
            else:
                assert check._process is not None
                check._process.send_signal(signal.SIGSTOP)  # it has not begun
                await asyncio.sleep(0.1)
            check._process.kill()
            with pytest.raises(NotReady):
                await asked
            assert await check.why_not(source) is None

    other = GrammarSource("regex", "[0-9]+")
    try:
        asyncio.run(run())
    finally:
        check.stop()


def test_a_check_that_took_too_long_is_made_again_when_asked_again() -> None:
    check, source = GrammarCheck(replace(SETTINGS, grammar_seconds=0.5)), GrammarSource("regex", "[a-z]+")

    async def run() -> None:
        assert await check.why_not(GrammarSource("regex", "a")) is None
        assert check._process is not None
        check._process.send_signal(signal.SIGSTOP)  # the machine is busy
        assert await check.why_not(source) == "compiling it takes more than 0.5 s"
        check._settings = SETTINGS
        assert await check.why_not(source) is None

    try:
        asyncio.run(run())
    finally:
        check.stop()


def test_grammars_that_are_slow_to_check_hold_up_no_thread_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    checked, go = [], threading.Event()

    def slow(_: GrammarCheck, source: GrammarSource) -> str:
        checked.append(source)
        go.wait(60)
        return source.text

    monkeypatch.setattr(GrammarCheck, "_ask", slow)
    check = GrammarCheck(replace(SETTINGS, max_waiting=80))

    async def run() -> None:
        sources = [GrammarSource("regex", str(i % 40)) for i in range(80)]
        answers = [asyncio.create_task(check.why_not(source)) for source in sources]
        await asyncio.wait_for(asyncio.to_thread(go.set), 30)  # asyncio has fewer threads than these
        assert await asyncio.gather(*answers) == [source.text for source in sources]

    try:
        asyncio.run(run())
    finally:
        check.stop()
    assert len(checked) == 40, "equal grammars wait for one check"


def test_checks_whose_clients_hung_up_are_not_made_and_clients_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked, go = list[str](), threading.Event()

    def slow(source: GrammarSource) -> None:
        checked.append(source.text)
        go.wait(60)

    check = GrammarCheck(SETTINGS)
    monkeypatch.setattr(check, "_ask", slow)

    async def run() -> None:
        asked = {
            (client, text): asyncio.create_task(check.why_not(GrammarSource("regex", text), client))
            for client, text in ("a1", "a2", "a3", "a4", "b1", "b5", "c6", "d6", "e7", "f8")
        }
        await until(lambda: checked == ["1"])
        gone = [asked.pop(each) for each in [("a", "1"), ("a", "3"), ("c", "6"), ("e", "7")]]
        for each in gone:
            each.cancel()
        await asyncio.wait(gone)
        go.set()
        assert await asyncio.gather(*asked.values()) == [None] * 6
        assert sorted(checked) == ["1", "2", "4", "5", "6", "8"], "b waits for 1 too, and d for 6"
        assert {*checked[-2:]} & {"4", "5"} and checked.index("8") < checked.index("4")
        assert await check.why_not(GrammarSource("regex", "7"), "e") is None, "it is made when asked again"

    try:
        asyncio.run(run())
    finally:
        check.stop()


def test_slow_readers_get_several_steps_as_one_update() -> None:
    async def run(rng: random.Random) -> int:
        answer = Answer(3)
        sent: list[list[tuple[int, int]]] = [[], [], []]  # tokens of each completion, with their steps

        async def steps() -> None:
            for step in range(40):
                for index in range(3):
                    tokens = [rng.randrange(99) for _ in range(rng.randint(1, 4))]
                    sent[index] += [(token, step) for token in tokens]
                    answer.put(
                        index, Update([*tokens], [*tokens], None, "length" if step == 39 else None), step
                    )
                if rng.random() < 0.5:
                    await asyncio.sleep(0)

        writer, num_updates = asyncio.create_task(steps()), 0
        seen: list[list[int]] = [[], [], []]
        while answer.has_more():
            index, update, read_at = await answer.next()
            assert read_at == sent[index][len(seen[index])][1], "of the oldest that is in it"
            assert update.token_ids == update.draft_positions
            seen[index] += update.token_ids
            is_last = sent[index][len(seen[index]) - 1][1] == 39
            assert update.finish_reason == ("length" if is_last else None)
            num_updates += 1
            if rng.random() < 0.5:
                await asyncio.sleep(0)
        await writer
        assert seen == [[token for token, _ in each] for each in sent]
        return num_updates

    assert sum(asyncio.run(run(random.Random(seed))) for seed in range(20)) < 20 * 120


def test_no_more_grammars_wait_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    check, go = GrammarCheck(SETTINGS), threading.Event()
    monkeypatch.setattr(check, "_ask", lambda source: None if go.wait(60) else "too late")

    async def run() -> None:
        room = SETTINGS.engine.max_rows + SETTINGS.max_waiting
        sources = [GrammarSource("regex", "a" * n) for n in range(1, 2 + room)]
        waiting = [asyncio.create_task(check.why_not(source)) for source in sources[:-1]]
        await asyncio.sleep(0)
        with pytest.raises(Busy):
            await check.why_not(sources[-1])
        other = asyncio.create_task(check.why_not(sources[0], "with less than its share"))
        await asyncio.sleep(0)
        go.set()
        assert await asyncio.gather(*waiting, other) == [None] * (room + 1)
        assert await check.why_not(sources[-1]) is None

    try:
        asyncio.run(run())
    finally:
        check.stop()
