"""The engine's process: what fails for one request ends that request, and its neighbours never notice.

`MLA_FAULTS=5000` sets how many cases there are.
"""

import os
import random
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest

from mla_compile import SamplingParams
from mla_compile.engine import Request
from mla_compile.serving import engine_process
from mla_compile.serving.engine_process import _Served, run
from mla_compile.serving.messages import Add, Asked, GrammarSource, Progress, Update
from tests.engine.engines import engine
from tests.engine.test_grammar import EOS, REGEX, SMALL
from tests.engine.test_isolation import NONSENSE, Fault
from tests.models_for_tests import one_layer_model

NUM_CASES = int(os.environ.get("MLA_FAULTS", "24"))
NO_TEXTS = [each for each in NONSENSE if not isinstance(each, str | None)]


class ServedInThread:
    """`run` with an engine of a small model, and the server's end of its connection. fault: of one of its calls."""

    def __init__(self, fault: Fault, patched: pytest.MonkeyPatch) -> None:
        model = one_layer_model()
        model.stop_ids = [EOS]
        self.engine = engine(2, model, tokenizer=SMALL)
        self.connection, theirs = Pipe()
        served = _Served(self.engine, SMALL)
        # Faults are set in the calls themselves: nothing public makes them fail.
        thread, add = served._grammars._thread, self.engine.add
        fields, compiled, submit = engine_process._fields_of_update, engine_process.compiled, thread.submit

        def failing(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
            if fault.kind == "nonsense":  # which only the tokenizer's text can be
                return real
            return lambda *args, **settings: fault.call(name, partial(real, *args, **settings))

        def with_text(request: Request, num_sent: int) -> Any:
            if fault.kind == "nonsense" and request.has_ended and request.params.stop_strings:
                request.completion.text = fault.call("text", lambda: request.completion.text)
            return fields(request, num_sent)

        patched.setattr(self.engine, "add", failing("add", add))
        patched.setattr(engine_process, "_fields_of_update", failing("fields", with_text))
        patched.setattr(engine_process, "compiled", failing("compile", compiled))
        patched.setattr(thread, "submit", failing("submit", submit))
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(theirs, served), daemon=True)
        self.thread.start()

    def _run(self, connection: Connection, served: _Served) -> None:
        try:
            run(connection, served)
        except BaseException as error:
            self.error = error

    def answers(self, asked: dict[int, Asked]) -> dict[int, Update]:
        for key, each in asked.items():
            self.connection.send(Add(key, each, client=f"client {key % 3}"))
        found = {key: Update() for key in asked}
        while any(update.finish_reason is None for update in found.values()):
            assert self.connection.poll(60), (self.error, found)
            progress = self.connection.recv()
            assert isinstance(progress, Progress)
            for key, fields in progress.updates:
                assert found[key].finish_reason is None, "it had ended"
                found[key].extend(Update(*fields))
        return found

    def ends(self) -> BaseException | None:
        self.connection.close()
        self.thread.join(60)
        assert not self.thread.is_alive()
        return self.error


def fields_of(update: Update) -> tuple[object, ...]:
    return update.token_ids, update.finish_reason, update.text, update.error


def drawn(draw: random.Random) -> dict[int, Asked]:
    def asked() -> Asked:
        params = SamplingParams(
            temperature=draw.choice([0.0, 1.0]),
            seed=draw.randrange(9),
            max_tokens=draw.randint(1, 12),
            stop=draw.choice([(), ("ab",)]),
        )
        source = GrammarSource("regex", draw.choice([REGEX, "[abc]+!"])) if draw.random() < 0.5 else None
        return Asked([draw.randrange(1, 30) for _ in range(draw.randint(1, 9))], params, source)

    return {key: asked() for key in range(draw.randint(1, 6))}


def case(seed: int) -> Fault:
    draw = random.Random(seed)
    asked = drawn(draw)
    kind = draw.choice(["exception", "panic", "nonsense"])
    with pytest.MonkeyPatch.context() as patched:
        sound = ServedInThread(Fault(), patched)
        expected = sound.answers(asked)
        assert isinstance(sound.ends(), EOFError)
    with pytest.MonkeyPatch.context() as patched:
        fault = Fault(at=draw.randint(1, 3 * len(asked)), kind=kind, nonsense=draw.choice(NO_TEXTS))
        served = ServedInThread(fault, patched)
        found = served.answers(asked)
        differ = [key for key in asked if fields_of(found[key]) != fields_of(expected[key])]
        assert len(differ) <= (fault.met is not None), (differ, fault.met)
        if fault.kind != "nonsense" and fault.met is not None:
            assert differ
        for key in differ:
            assert found[key].finish_reason == "error" and found[key].error
            assert found[key].token_ids == expected[key].token_ids[: len(found[key].token_ids)]
        fault.at = None
        again = served.answers({100 + key: each for key, each in asked.items()})
        assert all(fields_of(again[100 + key]) == fields_of(expected[key]) for key in asked)
        assert isinstance(served.ends(), EOFError)
        stats = served.engine.stats
        assert (stats.rows_in_use, stats.num_waiting, stats.pages_in_use) == (0, 0, 0)
    return fault


def test_one_call_that_fails_ends_one_request() -> None:
    met = [case(seed).met for seed in range(NUM_CASES)]
    assert {"add", "fields", "compile", "submit", "text"} <= set(met), met
