"""Prefills a batch, for decode loops without an engine."""

from collections.abc import Callable, Sequence

from mla_compile.engine import Engine
from mla_compile.engine.scheduler import Chunk, Grant, Plan
from mla_compile.errors import MLAError
from mla_compile.sampling_params import SamplingParams
from mla_compile.speculate import DecodeState


def start(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sequence[SamplingParams],
    stop_ids: Sequence[int],
) -> tuple[Callable[[DecodeState], None], DecodeState]:
    """Prefill up to `max_rows` prompts, sample their first tokens (in `state.report`) and draft behind them.

    Returns the step and the state to call it with, which are good until the engine takes on its next request. Row i is
    that of prompt i, with pages for all of its tokens.

    Args:
        engine: without requests, and with the whole model in this process.
        prompts, max_new_tokens, sampling, stop_ids: see `Engine.stream`.

    Raises:
        MLAError: as `Engine.stream` does; requests are under way; more prompts than the engine has rows or pages for.
    """
    engine.reset_prefix_cache()
    requests = engine._intake.requests(prompts, sampling, max_new_tokens, stop_ids)
    config, launcher = engine.config, engine._launcher
    room = min(config.max_rows, (config.num_pages - 1) // config.pages_per_row)
    if not 1 <= len(requests) <= room:
        raise MLAError("prompts", f"1 to {room}, for which there are rows and pages", len(requests))
    plan, grants = Plan(admitted=requests), config.pages_per_row // config.pages_per_grant
    for i, request in enumerate(requests):
        plan.grants.append(Grant(request, 0, [1 + i * grants + j for j in range(grants)]))
        plan.chunks.append(Chunk(request, 0, len(request.prompt), is_last=True))
    try:
        launcher.launch(plan)
        state = launcher.rows.state
        assert state is not None
    finally:
        engine.reset_prefix_cache()
    sampled = not all(request.params.is_argmax for request in requests)
    return launcher.steps.whole(sampled=sampled, prompts=False), state
