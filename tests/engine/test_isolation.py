"""Host-side work on one request fails: that request ends, and its neighbours never notice.

Every call that the engine makes on behalf of one request (the tokenizer, the grammar's matcher, the token chooser,
log-probabilities) raises or returns nonsense, one at a time. `MLA_FAULTS=5000` sets how many cases there are.
"""

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from mla_compile import Engine, Grammar, SamplingParams
from mla_compile.engine import Completion, Request, reports
from tests.engine.engines import engine, finish, pool_of, with_lag
from tests.engine.test_grammar import EOS, SMALL, grammar
from tests.models_for_tests import one_layer_model

llguidance_numpy = pytest.importorskip("llguidance.numpy")

NUM_CASES = int(os.environ.get("MLA_FAULTS", "20"))
NONSENSE = (None, object(), -1, "\ufffd", [], 1.5)


class Panic(BaseException):
    """As pyo3's: what a Rust library raises where it has a mistake."""


ERRORS = {"exception": Exception, "panic": Panic, "interrupt": KeyboardInterrupt}


@dataclass
class Fault:
    """Fails one call.

    name, at: which call: of those of a name, or of all.
    kind: of `ERRORS`, or "nonsense". met: the name of the call that failed.
    """

    name: str | None = None
    at: int | None = None
    kind: str = "exception"
    nonsense: object = None
    counts: Counter[str] = field(default_factory=Counter)
    met: str | None = None

    def call(self, name: str, real: Callable[[], Any]) -> Any:
        self.counts[name] += 1
        count = self.counts.total() if self.name is None else self.counts[self.name]
        if count != self.at or self.name not in (None, name):
            return real()
        self.met = name
        if self.kind == "nonsense":
            return self.nonsense
        raise ERRORS[self.kind]("it went\nwrong")


class FaultyTokenizer(PreTrainedTokenizerFast):
    fault = Fault()

    def decode(self, token_ids: Sequence[int], **settings: object) -> Any:
        real = partial(super().decode, token_ids, **settings)
        return self.fault.call("decode", real)


TOKENIZER = FaultyTokenizer(tokenizer_object=SMALL.backend_tokenizer, eos_token="</s>")


class FaultyMatcher:
    def __init__(self, real: Any, fault: Fault) -> None:
        self.real, self.fault, self.is_broken = real, fault, False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: self.fault.call(name, lambda: getattr(self.real, name)(*args))

    def filled(self) -> Any:
        """What filling a mask takes; it fails as often as it is asked."""
        if not self.is_broken:
            self.is_broken = True
            real = self.fault.call("fill", lambda: self.real)
            self.is_broken = False
            return real
        raise Panic("it went wrong again")


def patch(patched: pytest.MonkeyPatch, fault: Fault) -> None:
    matcher, fill, by_id = (
        Grammar.matcher,
        llguidance_numpy.fill_next_token_bitmask_par,
        reports._by_id,  # no public call fails for one request's log-probabilities alone
    )

    def made(self: Grammar, *args: Any) -> Any:
        return fault.call("matcher", lambda: FaultyMatcher(matcher(self, *args), fault))

    def filled(executor: object, asked: list[tuple[Any, int]], bits: object) -> None:
        fill(executor, [(each.filled(), place) for each, place in asked], bits)

    patched.setattr(Grammar, "matcher", made)
    patched.setattr(llguidance_numpy, "fill_next_token_bitmask_par", filled)
    patched.setattr(reports, "_by_id", lambda *args: fault.call("logprobs", lambda: by_id(*args)))
    patched.setattr(FaultyTokenizer, "fault", fault)


@dataclass(frozen=True)
class Asked:
    """One request. kind: what the host does for it."""

    kind: str
    seed: int
    arrival: int

    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.seed % 2,
            seed=self.seed,
            stop=("ab", "d") if self.kind == "stop" else (),
            logprobs=2 if self.kind == "logprobs" else None,
        )

    def prompt(self) -> list[int]:
        return [random.Random(self.seed).randrange(1, 36) for _ in range(2 + self.seed % 9)]

    def start(self, of: Engine, fault: Fault) -> "Request | Iterator[list[Completion]]":
        if self.kind != "chosen":
            rules = grammar(("regex", "ebnf")[self.seed % 2]) if self.kind == "grammar" else None
            return of.add(self.prompt(), self.params(), max_new_tokens=10, stop_ids=[EOS], grammar=rules)

        def choose(logits: torch.Tensor, *_: object) -> Any:
            return fault.call("choose", lambda: logits.topk(2).indices[..., 1])

        return of.stream([self.prompt()], max_new_tokens=10, stop_ids=[EOS], choose=choose)


KINDS = ("plain", "stop", "logprobs", "grammar", "chosen")


@dataclass
class Run:
    """What came of requests.

    raised: by streams, or by a step that was interrupted.
    """

    outcomes: list[Any]
    raised: list[BaseException] = field(default_factory=list)


def run(of: Engine, asked: Sequence[Asked], fault: Fault) -> Run:
    started: dict[int, Request | Iterator[list[Completion]]] = {}
    found = Run([None] * len(asked))
    for tick in range(1000):
        for i, each in enumerate(asked):
            if each.arrival == tick:
                started[i] = each.start(of, fault)
        streams = {i: each for i, each in started.items() if not isinstance(each, Request)}
        for i, stream in streams.items():
            try:
                (found.outcomes[i],) = next(stream)
            except StopIteration:
                del started[i]
            except (Exception, Panic, KeyboardInterrupt) as error:
                found.raised.append(error)
                found.outcomes[i] = Completion(finish_reason="error", error=str(error))
                del started[i]
        if not streams:
            try:
                of.step()
            except KeyboardInterrupt as error:
                found.raised.append(error)
        started = {i: each for i, each in started.items() if not _has_ended(each, i, found)}
        if not started and tick > max(each.arrival for each in asked):
            break
    finish(of)  # late reports
    assert of.stats.rows_in_use == of.stats.num_waiting == of.stats.pages_in_use == 0
    return found


def _has_ended(each: object, i: int, found: Run) -> bool:
    if not isinstance(each, Request):
        return False
    found.outcomes[i] = each.completion
    return each.has_ended


@cache
def alone(asked: Asked) -> Completion:
    of = engine(0, one_layer_model(), max_rows=1, tokenizer=TOKENIZER)
    (completion,) = run(of, [Asked(asked.kind, asked.seed, 0)], Fault()).outcomes
    assert completion.finish_reason in ("stop", "length")
    return completion


def differ(outcomes: Sequence[Completion], asked: Sequence[Asked]) -> list[int]:
    def visible(of: Completion) -> tuple[Any, ...]:
        return of.token_ids, of.finish_reason, of.text, of.error, str(of.logprobs)[:40]

    return [i for i, each in enumerate(asked) if visible(outcomes[i]) != visible(alone(each))]


def case(seed: int, patched: pytest.MonkeyPatch) -> Fault:
    draw = random.Random(seed)
    asked = [
        Asked(draw.choice(KINDS), draw.randrange(16), draw.randrange(6)) for _ in range(draw.randrange(2, 5))
    ]
    # Each kind of call is as likely to fail as the others: a run without faults counts them.
    size = {"max_rows": draw.choice([2, 4]), "num_pages": draw.choice([17, 33])}
    k, lag = draw.choice([0, 1, 3]), draw.choice([0, 1])
    expected = [alone(each) for each in asked]  # before anything is patched

    def once(fault: Fault) -> tuple[Engine, Run]:
        of = with_lag(engine(k, one_layer_model(), tokenizer=TOKENIZER, **size), lag)
        with patched.context() as inner:
            patch(inner, fault)
            return of, run(of, asked, fault)

    calls = Fault()
    assert not differ(once(calls)[1].outcomes, asked), "without a fault"
    kind = draw.choice([*ERRORS, "nonsense", "nonsense"])
    name = draw.choice(sorted(calls.counts))
    fault = Fault(name, draw.randrange(1, calls.counts[name] + 1), kind, draw.choice(NONSENSE))
    of, found = once(fault)
    assert fault.met is not None
    wrong = differ(found.outcomes, asked)
    if kind == "interrupt":
        assert [type(error) for error in found.raised].count(KeyboardInterrupt) == 1
    elif kind == "nonsense":
        assert len(wrong) <= 1
    else:
        (failed,) = wrong
        outcome = found.outcomes[failed]
        assert outcome.finish_reason == "error"
        assert "it went" in outcome.error
        assert outcome.token_ids == expected[failed].token_ids[: len(outcome.token_ids)]
    assert pool_of(of).num_free == pool_of(of).num_pages - 1
    assert not differ(run(of, asked, Fault()).outcomes, asked), "afterwards"
    return fault


@pytest.mark.long
def test_one_call_that_fails_ends_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    met: dict[str, int] = {}
    for seed in range(NUM_CASES):
        try:
            fault = case(seed, monkeypatch)
        except BaseException:
            print("the case", seed)
            raise
        met[f"{fault.met}"] = met.get(f"{fault.met}", 0) + 1
    print(met)
    assert {"decode", "choose", "logprobs", "fill"} <= met.keys(), met
