"""Check that a model's tokens, log-probabilities and latents have the same bits alone and in any mix of requests."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mla_compile.engine import Completion, Engine, Request
from mla_compile.errors import MLAError, check_integer
from mla_compile.sampling_params import SamplingParams
from mla_compile.speculate import ServedModel

_DRAWN = ("max_model_len", "max_tokens_per_step", "num_pages", "num_speculative_tokens", "prefix_caching")
"""Settings that `check_batch_invariance` chooses itself."""

_LATENTS = 128
"""The most positions whose latents are compared: the last of those of the prompt and half of the completion."""


@dataclass
class BatchInvarianceReport:
    """The result of `check_batch_invariance`.

    num_requests, num_tokens: requests and tokens compared with the same request run alone; num_latents: positions
        whose latents, in all layers, were compared.
    differences: a line for each request with a different bit: the request, the mix, and the first difference.
    """

    num_requests: int = 0
    num_tokens: int = 0
    num_latents: int = 0
    differences: list[str] = field(default_factory=list)

    @property
    def num_different(self) -> int:
        """The number of requests with a different bit."""
        return len(self.differences)

    def __str__(self) -> str:
        counts = (
            f"{self.num_requests} requests, {self.num_tokens} tokens, latents of {self.num_latents} positions"
        )
        return "\n  ".join([f"{counts}: {self.num_different} requests differ", *self.differences[:10]])


_Query = tuple[list[int], SamplingParams]
"""The prompt and the sampling parameters of a request."""


@dataclass
class _Result:
    """The result of a request.

    latents: of each cache by its spec's name, `[heads, positions, width]` on the CPU, from position `start` on.
    """

    completion: Completion
    latents: dict[str, Tensor] | None = None
    start: int = 0


def check_batch_invariance(
    model: ServedModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[SamplingParams] = (SamplingParams(logprobs=0),),
    *,
    max_new_tokens: int = 64,
    drafts: Sequence[int] = (0, 3),
    max_rows: int = 8,
    rounds: int = 2,
    seed: int = 0,
    batch_invariant: bool = True,
    **settings: Any,
) -> BatchInvarianceReport:
    """Run every request alone and without drafts, then all of them in random mixes, and compare bits.

        report = mla_compile.testing.check_batch_invariance(model, prompts)
        assert not report.num_different, report

    Every second request has a second turn: its prompt, its completion and some more tokens are the next prompt. In a
    mix, requests arrive in another order and at other times, prompts are split into chunks of other sizes, the prefix
    cache has some prefixes, and pages run out, so some requests wait.

    Args:
        model: a model that an engine can serve; the engines allocate new caches for it.
        prompts: token ids. sampling: used for the prompts cyclically.
        max_new_tokens: of each request; no request ends earlier.
        drafts: numbers of drafts, an engine for each; above 0 the model needs an MTP layer, or `drafter="ngram"`.
        max_rows: the most requests that run at the same time.
        rounds: mixes for each number of drafts. seed: of the random mixes.
        batch_invariant: False measures the differences without batch invariance.
        settings: other settings of `EngineConfig`.

    Raises:
        MLAError: a bad argument, or a model that cannot be batch-invariant; the message names it.
    """
    for name, number in (("max_new_tokens", max_new_tokens), ("max_rows", max_rows), ("rounds", rounds)):
        check_integer(name, number, 1)
    if not prompts or not sampling or not drafts:
        raise MLAError("prompts, sampling, drafts", "at least one of each", "none")
    if drawn := [name for name in _DRAWN if name in settings]:
        raise MLAError(
            "settings", f"none of {', '.join(_DRAWN)}, which the check sets", ", ".join(drawn), "remove them"
        )
    draw = random.Random(seed)
    page_size = settings.setdefault("page_size", 16)
    settings["batch_invariant"] = batch_invariant

    queries = [(list(prompt), sampling[i % len(sampling)]) for i, prompt in enumerate(prompts)]
    longest = max(len(prompt) for prompt in prompts) + max_new_tokens
    max_model_len = 2 * longest + max_new_tokens
    positions = getattr(model, "max_position_embeddings", None) or max_model_len
    if max_model_len > positions:
        room = f"two prompts and three times max_new_tokens within the model's {positions} positions"
        raise MLAError("prompts, max_new_tokens", room, max_model_len)
    pages_per_row = -(-max_model_len // page_size)

    def engine_of(k: int) -> Engine:
        return Engine(
            model,
            num_speculative_tokens=k,
            max_rows=max_rows,
            max_model_len=max_model_len,
            # Enough pages for some rows at their full length, so the others wait.
            num_pages=1 + max(pages_per_row, max_rows * pages_per_row // 3),
            max_tokens_per_step=max_rows * (1 + k) + max(16, longest // 3),
            **settings,
        )

    engine = engine_of(0)
    expected = [_run_alone(engine, one, max_new_tokens) for one in queries]
    for i, (prompt, params) in enumerate(queries[::2]):
        completion = expected[2 * i].completion.token_ids
        more = queries[draw.randrange(len(prompts))][0][:max_new_tokens]
        queries.append(([*prompt, *completion, *more], params))
    expected += [_run_alone(engine, one, max_new_tokens) for one in queries[len(prompts) :]]

    report = BatchInvarianceReport()
    # Begin without drafts: that engine has compiled its steps, and a newer engine would replace its caches.
    for k in sorted(drafts):
        engine = engine if k == 0 else engine_of(k)
        for number in range(rounds):
            engine.reset_prefix_cache()
            # Second turns arrive later than first turns, whose pages are mostly in the prefix cache then.
            first = [draw.randrange(4 * len(queries)) for _ in prompts]
            second = [begin + max_new_tokens for begin in first[::2]]
            for i, result in enumerate(_run(engine, queries, max_new_tokens, first + second)):
                report.num_requests += 1
                report.num_tokens += len(result.completion.token_ids)
                report.num_latents += _num_compared(expected[i], result)
                if (difference := _difference(expected[i], result)) is not None:
                    report.differences.append(f"request {i}, {k} drafts, mix {number}: {difference}")
    return report


def _run_alone(engine: Engine, query: _Query, max_new_tokens: int) -> _Result:
    """Run one request without others, and with an empty prefix cache."""
    engine.reset_prefix_cache()
    return _run(engine, [query], max_new_tokens, [0])[0]


def _run(
    engine: Engine,
    queries: Sequence[_Query],
    max_new_tokens: int,
    arrivals: Sequence[int],
) -> list[_Result]:
    """Run requests in one engine. arrivals: the step before which each request is added."""
    waiting = sorted(range(len(queries)), key=lambda i: arrivals[i])
    requests: dict[int, Request] = {}
    results: dict[int, _Result] = {}
    step = 0
    while waiting or engine.has_work():
        while waiting and arrivals[waiting[0]] <= step:
            i = waiting.pop(0)
            prompt, params = queries[i]
            requests[i] = engine.add(prompt, params, max_new_tokens=max_new_tokens, stop_ids=())
            results[i] = _Result(requests[i].completion)
        engine.step()
        step += 1
        for i, request in requests.items():
            if results[i].latents is None and not request.has_ended:
                _read_latents(engine, request, max_new_tokens // 2, results[i])
    return [results[i] for i in range(len(queries))]


def _read_latents(engine: Engine, request: Request, num_new: int, result: _Result) -> None:
    """Copy a request's latents once its pages are certain to have those of the prompt and of `num_new` tokens."""
    end = len(request.prompt) + num_new - 1
    under_way = (1 + engine.config.num_speculative_tokens) * (1 + engine.report_lag)
    if num_new < 1 or not (
        request.is_running and request.is_decoding and request.num_cached - under_way >= end
    ):
        return
    result.start = max(0, end - _LATENTS)
    position = torch.arange(result.start, end, device=engine.device)
    size = engine.config.page_size
    pages = torch.tensor(request.pages, device=engine.device)
    result.latents = {}
    for spec in [spec for spec in engine._caches.specs if spec.owner == "target"]:
        head = torch.arange(spec.heads, device=engine.device)[:, None]
        slots = (pages[position // size] * spec.heads + head) * size + position % size
        latents = spec.cache.flatten(0, 1).index_select(0, slots.flatten())
        result.latents[spec.name] = latents.view(*slots.shape, spec.width).cpu()


def _num_compared(expected: _Result, got: _Result) -> int:
    """The number of positions with latents in both results; a short request may end before its latents are certain."""
    if expected.latents is None or got.latents is None:
        return 0
    return next(iter(got.latents.values())).shape[1]


def _difference(expected: _Result, got: _Result) -> str | None:
    """The first difference, in latents before tokens, which are computed from them; None if all bits are equal."""
    if expected.latents is not None and got.latents is not None:
        names, pairs = list(got.latents), list(zip(expected.latents.values(), got.latents.values()))
        differ = torch.stack([(a.view(torch.uint8) != b.view(torch.uint8)).any(2).any(0) for a, b in pairs])
        if bool(differ.any()):  # [caches, positions]
            place = int(differ.any(0).nonzero()[0])
            i = int(differ[:, place].nonzero()[0])
            a, b = (x[:, place].double() for x in pairs[i])
            before = "the embedding" if i == 0 else names[i - 1]
            return (
                f"the latents of {names[i]} at position {expected.start + place} are the first, "
                f"{(a - b).abs().max():.3g} apart: look between {before} and the latents of {names[i]}"
            )
    outputs = zip(_outputs(expected.completion), _outputs(got.completion))
    for place, (alone, mixed) in enumerate(outputs):
        if alone != mixed:
            return f"token {place} of the completion is {mixed}, alone {alone}"
    return None


def _outputs(completion: Completion) -> list[tuple[Any, Any]]:
    """Each token with its log-probabilities, then the finish reason."""
    logprobs: Sequence[Any] = completion.logprobs or [None] * len(completion.token_ids)
    return [*zip(completion.token_ids, logprobs, strict=True), (completion.finish_reason, None)]
