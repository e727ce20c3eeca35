"""Traces of requests through the real engine, on a tiny model in float64, eagerly on the CPU.

Everything that a trace may not change is checked: each request's tokens are those that it has alone, one token a step,
in one piece, and in the end every page and row is free. Free pages hold NaN, so reading one shows. The drafts are
planted: some right, some wrong, as the tiny model's own are hardly ever right. Some models are poisoned: where the text
has a certain id, the request ends in an error, and its neighbours do not.
"""

import copy
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor

from mla_compile import Engine, Grammar, MLABatch, SamplingParams
from mla_compile.batch import ForwardOutput
from mla_compile.engine import Completion, Request
from mla_compile.engine.detokenizer import Found
from mla_compile.engine.reports import RowReport
from mla_compile.engine.scheduler import Plan
from mla_compile.models import MLAForCausalLM
from mla_compile.speculate import DecodeState, Verified
from tests.engine.engines import is_registered, pool_of, references, with_lag, with_new_caches
from tests.engine.test_grammar import EOS, grammar
from tests.engine.toy_engine import Arrival, Trace
from tests.engine.watching import Watch
from tests.models_for_tests import one_layer_model
from tests.speculate.prompt_lookup import prompt_lookup

POISONS = ("latents", "logits", "infinite logits", "drafts")
"""What an id may spoil; see `poisoned`."""
KINDS = (
    SamplingParams(),
    SamplingParams(temperature=1.2, seed=7, top_k=20),
    SamplingParams(frequency_penalty=0.9, repetition_penalty=1.3, logprobs=2),
    SamplingParams(temperature=0.8, seed=3, top_p=0.9, min_p=0.02, presence_penalty=0.5),
    SamplingParams(min_tokens=6, logit_bias={20: 2.0, 35: 2.0, 8: 1.0, 19: 1.5}),
    SamplingParams(
        temperature=1.0, seed=-5, min_tokens=3, logit_bias={4: 2.5, 7: -100}, frequency_penalty=0.3
    ),
)
"""How a request is sampled, by its arrival's seed."""


@cache
def model() -> MLAForCausalLM:
    """What all traces share."""
    return one_layer_model()


class Poisoned(MLAForCausalLM):
    """`model()`, but for what comes of reading a certain id; see `poisoned`."""

    where: str
    poison: int

    def forward(
        self, token_ids: Tensor, positions: Tensor, batch: MLABatch, aux_layers: Sequence[int] = ()
    ) -> ForwardOutput:
        output = super().forward(token_ids, positions, batch, aux_layers)
        worst = {"logits": torch.nan, "infinite logits": torch.inf}.get(self.where)
        if worst is None:
            return output
        return output.map(lambda x: torch.where((token_ids == self.poison)[:, None], worst, x))

    def forward_mtp(
        self, next_token_ids: Tensor, hidden: Tensor, positions: Tensor, batch: MLABatch
    ) -> Tensor:
        out = super().forward_mtp(next_token_ids, hidden, positions, batch)
        bad = (next_token_ids == self.poison)[:, None] if self.where == "drafts" else False
        return torch.where(torch.as_tensor(bad), torch.nan, out)


@cache
def poisoned(where: str, poison: int) -> MLAForCausalLM:
    """`model()`, in which reading the id `poison` gives NaN.

    where: "latents", from the embedding on, so that a draft's spoils all positions of its row; "logits", or "infinite
    logits", of that position alone; "drafts", of the MTP layer alone.
    """
    made = copy.deepcopy(model())
    made.__class__, made.where, made.poison = Poisoned, where, poison
    if where == "latents":
        made.embed_tokens.weight[poison] = torch.nan
    return made


def stop_ids(trace: Trace, arrival: Arrival) -> list[int]:
    """The smaller the trace's vocabulary, the sooner a text ends. A grammar needs an id to end with."""
    if arrival.grammar is not None:
        return [EOS]
    return {4: list(range(0, 40, 4)), 20: [19, 35]}.get(trace.vocab_size, [])


def sampling(arrival: Arrival) -> SamplingParams:
    kind = KINDS[arrival.seed % len(KINDS)]
    return replace(kind, min_tokens=min(kind.min_tokens, arrival.max_new_tokens))


def text(trace: Trace, arrival: Arrival) -> Completion:
    """The model's tokens for a request alone, one per step, up to any of its `stop_ids`."""
    prompt, params, ends = arrival.prompt(), sampling(arrival), stop_ids(trace, arrival)
    key = repr((prompt, params, ends, arrival.grammar))
    if key not in _TEXTS:
        room, rules = len(prompt) + 40, rules_of(arrival)
        alone = Engine(model(), num_speculative_tokens=0, max_rows=1, max_model_len=room, compile=False)
        (_TEXTS[key],) = alone.generate([prompt], params, max_new_tokens=40, stop_ids=ends, grammars=rules)
    return _TEXTS[key]


def rules_of(arrival: Arrival) -> Grammar | None:
    return None if arrival.grammar is None else grammar(arrival.grammar)


_TEXTS: dict[str, Completion] = {}


class StopsAfter:
    """Stands for stop strings: the text ends with a certain token."""

    def __init__(self, num_tokens: int) -> None:
        self.num_left = num_tokens
        self.text = ""

    def feed(self, tokens: list[int], *, is_end: bool) -> Found | None:
        before, self.num_left = self.num_left, self.num_left - len(tokens)
        return Found(before, "...") if 0 < before <= len(tokens) else None


def prepare_texts(trace: Trace) -> None:
    for arrival in trace.arrivals:
        text(trace, arrival)


def check_invariants(engine: Engine) -> None:
    """Of the pool, the rows and the states, between two steps; all of them private."""
    scheduler, pool, rows = engine._scheduler, pool_of(engine), engine._launcher.rows
    running = scheduler._running
    held = Counter(page for request in running for page in request.pages)
    assert held == Counter({page: n for page, n in enumerate(pool._references) if n}), "references"
    free = [*pool._blank, *pool._reusable]
    assert len(set(free)) == len(free) and not held.keys() & {0, *free}
    assert len(held) + len(free) == pool.num_pages - 1, "pages are lost"
    assert all(len(set(request.pages)) == len(request.pages) for request in running)
    assert not any(request.has_ended for request in scheduler.requests())
    assert len(running) <= engine.config.max_rows
    placed = [request for request in running if request in rows._row_of]
    places = rows.of(placed)
    assert len(set(places)) == len(places)
    state = rows.state
    for request, row in zip(placed, places):
        pages = state.block_table[row, : len(request.pages)].tolist() if state is not None else []
        assert pages == request.pages, "a block table is not that of its request"
    if state is not None:
        whole = engine._launcher.steps.state_for(engine.config.max_rows, sampled=False)
        empty = [row for row in range(len(whole.active)) if row not in rows._row_of.values()]
        assert not whole.active[empty].any() and not whole.block_table[empty].any(), "a row without a request"


@dataclass
class Outcome:
    """What a trace has exercised."""

    num_steps: int = 0
    num_mixed_steps: int = 0
    num_emitting_mixed_steps: int = 0
    num_preemptions: int = 0
    num_reused_tokens: int = 0
    num_accepted: int = 0
    num_ngram_drafts: int = 0
    num_aborted: int = 0
    num_stopped: int = 0
    num_cut: int = 0
    num_accepted_of_few: int = 0
    num_failed: int = 0
    tokens: list[list[int]] = field(default_factory=list)


class EngineRun:
    """One trace, and the checks of it.

    captured: on a GPU, steps are compiled and captured, and their drafts are the model's own.
    """

    def __init__(self, trace: Trace, *, captured: bool = False) -> None:
        self.trace, self.outcome = trace, Outcome()
        self.random = random.Random(trace.seed)
        lengths = [a.num_shared + a.num_own + a.max_new_tokens for a in trace.arrivals]
        self.max_model_len = max(lengths)
        pages = 1 + -(-self.max_model_len // trace.page_size)
        self.model = model() if trace.poison is None else poisoned(*trace.poison)
        self.requests: dict[int, Request] = {}
        self.arrival_of: dict[Request, Arrival] = {}
        self.watch = Watch(self._plant)
        self.engine = Engine(
            self.model,
            num_speculative_tokens=trace.k,
            drafter=trace.drafter if captured else self.watch.kind(trace.drafter),
            max_rows=trace.max_rows,
            max_model_len=self.max_model_len,
            page_size=trace.page_size,
            num_pages=pages + trace.spare_pages,
            max_tokens_per_step=trace.max_rows * (1 + trace.k) + trace.spare_tokens,
            compile=None if captured else trace.batch_invariant,
            batch_invariant=trace.batch_invariant,
        )
        with_lag(self.engine, trace.lag)
        scheduler = self.engine._scheduler  # its updates are watched, which no public call shows
        update = scheduler.update

        def watched(plan: Plan, reports: Sequence[RowReport]) -> None:
            emits = any(report.tokens for report in reports[: len(plan.decodes)])
            self.outcome.num_emitting_mixed_steps += bool(plan.chunks) and emits
            update(plan, reports)

        scheduler.update = watched

    def run(self) -> Outcome:
        # Before this engine's caches are used: they belong to the newest engine.
        prepare_texts(self.trace)
        with_new_caches(self.engine, self.engine.config.num_pages)
        return self.serve(self.trace.arrivals)

    def serve(self, arrivals: tuple[Arrival, ...]) -> Outcome:
        """Run the requests to their end, and check what came of them. Their texts are known."""
        self.trace = replace(self.trace, arrivals=arrivals)
        self.requests, self.arrival_of, self.outcome.tokens = {}, {}, []
        clock, last = 0, max(arrival.step for arrival in arrivals)
        limit = last + 50 + 20 * sum(a.num_shared + a.num_own + a.max_new_tokens for a in arrivals)
        while clock <= last or self.engine.has_work():
            assert clock < limit, "no end"
            for number, arrival in enumerate(arrivals):
                if arrival.step == clock:
                    self._add(number, arrival)
                if arrival.abort_step == clock and number in self.requests:
                    self.abort(self.requests[number])
                    self.abort(self.requests[number])  # again: nothing happens
            self._step()
            clock += 1
        self._check_end()
        return self.outcome

    def abort(self, request: Request) -> None:
        request.abort()

    def alone(self, arrival: Arrival) -> list[int]:
        """The tokens of a request without limits of its own."""
        return text(self.trace, arrival).token_ids

    def _add(self, number: int, arrival: Arrival) -> None:
        prompt = arrival.prompt()
        longest = len(prompt) + arrival.max_new_tokens == self.max_model_len
        request = self.engine.add(
            prompt,
            sampling(arrival),
            max_new_tokens=arrival.max_new_tokens + 5 * longest,  # the model's length ends it, not its own
            stop_ids=stop_ids(self.trace, arrival),
            grammar=rules_of(arrival),
            priority=arrival.priority,
            max_drafts=(number + 1) % (self.trace.k + 1) if self.trace.few_drafts else None,
            client=arrival.client,
        )
        if arrival.num_until_stop is not None:
            request.reader = StopsAfter(arrival.num_until_stop)
        self.requests[number] = request
        self.arrival_of[request] = arrival

    def _step(self) -> None:
        engine, pool = self.engine, pool_of(self.engine)
        # Free pages and caches are private: only there does a read of a free page show.
        caches = [spec.cache for spec in engine._caches.specs]
        blank = torch.tensor(pool._blank, dtype=torch.int64)
        for latents in caches:
            latents[blank] = torch.nan
        engine.step()
        check_invariants(engine)
        shared = [page for page in range(engine.config.num_pages) if is_registered(pool, page)]
        for latents in caches[: len(self.model.layers)]:
            assert latents[shared].isfinite().all(), "a page that others may find holds NaN"

    def _plant(self, state: DecodeState, verified: Verified, drafts: Tensor) -> Tensor:
        """If the host knows the text: in most rows a random number of the drafts is right.

        What an n-gram drafter drafts is checked first.
        """
        for request, row in self.watch.rows(self.requests.values()):
            known = text(self.trace, self.arrival_of[request]).token_ids
            start = int(verified.num_cached[row]) + 1 - len(request.prompt)
            is_known = (
                request.grammar is None or request.grammar.error is None
            )  # else its tokens do not matter
            if self.trace.drafter == "ngram" and verified.active[row] and is_known:
                so_far = [*request.prompt, *known[:start]]
                k = drafts.shape[1]
                assert drafts[row].tolist() == prompt_lookup(so_far, k), f"drafts after {so_far}"
                self.outcome.num_ngram_drafts += 1
            for j in range(drafts.shape[1]):
                if self.random.random() < self.trace.acceptance and 0 <= start + j < len(known):
                    drafts[row, j] = known[start + j]
                if self.trace.poison is not None and self.random.random() < 0.1:
                    drafts[row, j] = self.trace.poison[1]
        return drafts

    def _check_end(self) -> None:
        stats, outcome = self.engine.stats, self.outcome
        for number, arrival in enumerate(self.trace.arrivals):
            self._check_request(number, arrival, self.requests[number])
        outcome.num_steps, outcome.num_mixed_steps = stats.num_steps, stats.num_mixed_steps
        outcome.num_preemptions, outcome.num_reused_tokens = stats.num_preemptions, stats.num_reused_tokens
        outcome.num_accepted = stats.num_verified_tokens - stats.num_verified
        pool = pool_of(self.engine)
        assert pool.num_free == pool.num_pages - 1, "pages leaked"
        assert not any(references(pool, page) for page in range(pool.num_pages))
        assert (stats.rows_in_use, stats.num_waiting, stats.pages_in_use) == (0, 0, 0)
        assert not self.engine.has_work(), "a request was forgotten"

    def _check_request(self, number: int, arrival: Arrival, request: Request) -> None:
        completion, ends = request.completion, stop_ids(self.trace, arrival)
        alone = text(self.trace, arrival)
        limit = min(arrival.max_new_tokens, self.max_model_len - len(request.prompt))
        whole = next((i + 1 for i, token in enumerate(alone.token_ids[:limit]) if token in ends), limit)
        reason = "stop" if alone.token_ids[whole - 1] in ends else "length"
        if arrival.num_until_stop is not None and arrival.num_until_stop <= whole:
            whole, reason = arrival.num_until_stop, "stop"
            self.outcome.num_cut += completion.finish_reason == "stop"
        failed = self._fails_after(request.prompt, alone.token_ids)
        if failed is not None and failed < whole:
            whole, reason = failed, "error"
        if completion.finish_reason == "abort":
            assert len(completion.token_ids) <= whole
            whole, reason = len(completion.token_ids), "abort"
            assert arrival.abort_step is not None
        self.outcome.num_aborted += reason == "abort"
        self.outcome.num_stopped += reason == "stop"
        self.outcome.num_failed += reason == "error"
        message = f"the model's logits for position {len(request.prompt) + whole} are NaN or infinite"
        assert completion.error == (message if reason == "error" else None)
        where = f"request {number}"
        assert completion.token_ids == alone.token_ids[:whole], where
        assert completion.finish_reason == reason, where
        if alone.logprobs is not None and whole:
            assert completion.logprobs is not None
            for mine, expected in zip(completion.logprobs, alone.logprobs[:whole], strict=True):
                assert mine.keys() == expected.keys(), where
                for token, entry in mine.items():
                    assert abs(entry.logprob - expected[token].logprob) < 1e-5, where
        if request.max_drafts is not None:
            most = max(completion.draft_positions, default=0)
            assert most <= request.max_drafts, where
            self.outcome.num_accepted_of_few += most > 0
        self.outcome.tokens.append(completion.token_ids)

    def _fails_after(self, prompt: list[int], tokens: list[int]) -> int | None:
        """The number of tokens that the poisoned model emits after the prompt; None for all of them."""
        where, poison = self.trace.poison or ("drafts", 0)
        # Latents spoil all that follows them. Of a prompt's logits the last ones alone are asked for.
        if where == "drafts":
            return None
        if poison in (prompt if where == "latents" else prompt[-1:]):
            return 0
        return tokens.index(poison) + 1 if poison in tokens else None


def run(trace: Trace) -> Outcome:
    with torch.compiler.set_stance("force_eager"):  # steps that must be compiled too
        return EngineRun(trace).run()
