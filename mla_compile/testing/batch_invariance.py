"""Whether a model's tokens, log-probabilities and latents have the same bits alone and in any mix of requests."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mla_compile.engine import Completion, Engine, Request
from mla_compile.engine.config import check_positive
from mla_compile.errors import MLAError
from mla_compile.sampling_params import SamplingParams
from mla_compile.speculate import ServedModel

_DRAWN = ("max_model_len", "max_tokens_per_step", "num_pages", "num_speculative_tokens", "prefix_caching")
"""Settings that `check_batch_invariance` chooses itself."""

_LATENTS = 128
"""Positions of a request whose latents are compared: the last ones of its prompt and of half of its completion."""


@dataclass
class BatchInvarianceReport:
    """What `check_batch_invariance` found.

    num_requests, num_tokens: that were compared with the same request alone; num_latents: positions whose latents, of
        all layers, were.
    differences: a line for each request with any other bit: which one, in which mix, and what differs first.
    """

    num_requests: int = 0
    num_tokens: int = 0
    num_latents: int = 0
    differences: list[str] = field(default_factory=list)

    @property
    def num_different(self) -> int:
        """Requests with any other bit."""
        return len(self.differences)

    def __str__(self) -> str:
        counts = (
            f"{self.num_requests} requests, {self.num_tokens} tokens, latents of {self.num_latents} positions"
        )
        return "\n  ".join([f"{counts}: {self.num_different} requests differ", *self.differences[:10]])


_Asked = tuple[list[int], SamplingParams]


@dataclass
class _Result:
    """What came of one. latents: `[layers, positions, width]` on the CPU, of the positions from `start` on."""

    completion: Completion
    latents: Tensor | None = None
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
    """Run every request alone and without drafts, then all of them in drawn mixes, and compare bits.

        report = mla_compile.testing.check_batch_invariance(model, prompts)
        assert not report.num_different, report

    Every second request has a second turn: its text and some tokens more are the next prompt. In a mix requests come in
    another order and at other times, prompts are cut into chunks of other sizes, prefixes are found in the cache, and
    pages run out, so that some wait.

    Args:
        model: what an engine serves; its caches are allocated anew.
        prompts: token ids. sampling: of the prompts in turn.
        max_new_tokens: of each request, none ends earlier.
        drafts: numbers of drafts, an engine for each; more than 0 needs what drafts: an MTP layer or `drafter="ngram"`.
        max_rows: requests that run at once.
        rounds: mixes for each number of drafts. seed: of what is drawn.
        batch_invariant: False tells how much differs without it.
        settings: others of `EngineConfig`.

    Raises:
        MLAError: a bad argument, or a model that cannot promise it, by name.
    """
    for name, number in (("max_new_tokens", max_new_tokens), ("max_rows", max_rows), ("rounds", rounds)):
        check_positive(name, number)
    if not prompts or not sampling or not drafts:
        raise MLAError("prompts, sampling, drafts", "at least one of each", "none")
    if drawn := [name for name in _DRAWN if name in settings]:
        raise MLAError(
            "settings", f"none of {', '.join(_DRAWN)}, which it chooses", ", ".join(drawn), "leave them out"
        )
    draw = random.Random(seed)
    page_size = settings.setdefault("page_size", 16)
    settings["batch_invariant"] = batch_invariant

    asked = [(list(prompt), sampling[i % len(sampling)]) for i, prompt in enumerate(prompts)]
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
            # Enough pages for some rows at their longest, so that others wait.
            num_pages=1 + max(pages_per_row, max_rows * pages_per_row // 3),
            max_tokens_per_step=max_rows * (1 + k) + max(16, longest // 3),
            **settings,
        )

    engine = engine_of(0)
    expected = [_run_alone(engine, one, max_new_tokens) for one in asked]
    for i, (prompt, params) in enumerate(asked[::2]):
        said = expected[2 * i].completion.token_ids
        more = asked[draw.randrange(len(prompts))][0][:max_new_tokens]
        asked.append(([*prompt, *said, *more], params))
    expected += [_run_alone(engine, one, max_new_tokens) for one in asked[len(prompts) :]]

    report = BatchInvarianceReport()
    # Without drafts first: that engine has compiled its steps, and a newer one takes over the caches.
    for k in sorted(drafts):
        engine = engine if k == 0 else engine_of(k)
        for number in range(rounds):
            engine.reset_prefix_cache()
            # Second turns come later than first ones, whose pages they mostly find in the cache.
            first = [draw.randrange(4 * len(asked)) for _ in prompts]
            second = [begin + max_new_tokens for begin in first[::2]]
            for i, result in enumerate(_run(engine, asked, max_new_tokens, first + second)):
                report.num_requests += 1
                report.num_tokens += len(result.completion.token_ids)
                report.num_latents += _num_compared(expected[i], result)
                if (difference := _difference(expected[i], result)) is not None:
                    report.differences.append(f"request {i}, {k} drafts, mix {number}: {difference}")
    return report


def _run_alone(engine: Engine, asked: _Asked, max_new_tokens: int) -> _Result:
    """No other request is there, nor what one has left in the prefix cache."""
    engine.reset_prefix_cache()
    return _run(engine, [asked], max_new_tokens, [0])[0]


def _run(
    engine: Engine,
    asked: Sequence[_Asked],
    max_new_tokens: int,
    arrivals: Sequence[int],
) -> list[_Result]:
    """arrivals: before which step each request comes."""
    waiting = sorted(range(len(asked)), key=lambda i: arrivals[i])
    requests: dict[int, Request] = {}
    results: dict[int, _Result] = {}
    step = 0
    while waiting or engine.has_work():
        while waiting and arrivals[waiting[0]] <= step:
            i = waiting.pop(0)
            prompt, params = asked[i]
            requests[i] = engine.add(prompt, params, max_new_tokens=max_new_tokens)
            results[i] = _Result(requests[i].completion)
        engine.step()
        step += 1
        for i, request in requests.items():
            if results[i].latents is None and not request.has_ended:
                _read_latents(engine, request, max_new_tokens // 2, results[i])
    return [results[i] for i in range(len(asked))]


def _read_latents(engine: Engine, request: Request, num_new: int, result: _Result) -> None:
    """Copy its latents, once those of the prompt and of `num_new` tokens are sure to be in its pages."""
    end = len(request.prompt) + num_new - 1
    under_way = (1 + engine.config.num_speculative_tokens) * (1 + engine.report_lag)
    if num_new < 1 or not (
        request.is_running and request.is_decoding and request.num_cached - under_way >= end
    ):
        return
    caches = [spec.cache for spec in engine._caches.specs if spec.owner == "target"]
    result.start = max(0, end - _LATENTS)
    position = torch.arange(result.start, end, device=engine.device)
    size = engine.config.page_size
    pages = torch.tensor(request.pages, device=engine.device)
    slots = pages[position // size] * size + position % size
    result.latents = torch.stack([cache.flatten(0, 1).index_select(0, slots).cpu() for cache in caches])


def _num_compared(expected: _Result, got: _Result) -> int:
    """Positions whose latents are known of both; few tokens end before those of drafts are sure to be written."""
    return 0 if expected.latents is None or got.latents is None else got.latents.shape[1]


def _difference(expected: _Result, got: _Result) -> str | None:
    """What differs first, latents before the tokens that are made of them; None where no bit does."""
    if expected.latents is not None and got.latents is not None:
        bits = [x.contiguous().view(torch.uint8).flatten(2) for x in (expected.latents, got.latents)]
        differ = (bits[0] != bits[1]).any(2)  # [layers, positions]
        if bool(differ.any()):
            place = int(differ.any(0).nonzero()[0])
            layer = int(differ[:, place].nonzero()[0])
            apart = (expected.latents[layer, place].double() - got.latents[layer, place].double()).abs().max()
            before = "the embedding" if layer == 0 else f"layer {layer - 1}"
            return (
                f"the latents of layer {layer} at position {expected.start + place} are the first, {apart:.3g} apart: "
                f"look between {before} and the latents of layer {layer}"
            )
    told = zip(_told(expected.completion), _told(got.completion))
    for place, (mine, theirs) in enumerate(told):
        if mine != theirs:
            return f"token {place} of the completion is {theirs}, alone {mine}"
    return None


def _told(completion: Completion) -> list[tuple[Any, Any]]:
    """Each place's token and what is told of it, then how the completion ended."""
    logprobs: Sequence[Any] = completion.logprobs or [None] * len(completion.token_ids)
    return [*zip(completion.token_ids, logprobs, strict=True), (completion.finish_reason, None)]
