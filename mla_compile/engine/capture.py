"""Captures buckets as CUDA graphs within a byte budget, and measures the first calls of each."""

import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from mla_compile.engine.buckets import Bucket, CaptureReport, row_sizes
from mla_compile.engine.config import FittedConfig
from mla_compile.ops.attention.segments import MAX_KEYS
from mla_compile.progress import announce_if_slow
from mla_compile.ranks import Ranks
from mla_compile.speculate import DecodeState, PackedChunks
from mla_compile.torch_internals import (
    compile_seconds,
    cuda_graph_usage,
    last_cuda_graph,
    num_cuda_graphs,
    recording_cuda_graphs,
)

_Shape = tuple[int, int, int, int]
"""Rows; tokens, chunks and keys of prompts."""

CALLS_TO_RECORD = 2
"""Torch runs a graph's first call as a warm-up, in the graphs' memory pool, and records the second."""

SPENT = "the budget is spent"
LONG = f"prompts of more than {MAX_KEYS:,} keys, whose kernels take longer than the host does"
REFUSED = "torch recorded no graph; TORCH_LOGS=cudagraphs shows why"


class Captures:
    """Runs compiled steps, and captures the bucket of each state that they are called with while the budget lasts.

    Args:
        config: of the engine. Once recordings hold `capture_budget` bytes, no further one is begun, and other buckets
            run the same compiled code uncaptured. Buckets with prompts, which come first, take at most half of it.
            None for no limit.
        device: of the states.
        why_not: why nothing can be captured here; None if capturing is possible.
        ranks: the processes that share the model: each has its own memory, and rank 0 decides for all whether the
            budget is spent.
    """

    def __init__(
        self, config: FittedConfig, device: torch.device, why_not: str | None, ranks: Ranks | None = None
    ) -> None:
        self.sizes = row_sizes(config.max_rows)
        self.device, self.why_not = device, why_not
        self._q_len, self._budget, self._ranks = (
            1 + config.num_speculative_tokens,
            config.capture_budget,
            ranks,
        )
        self._buckets: dict[tuple[str, *_Shape], Bucket] = {}
        self._steps: list[_MeasuredStep] = []

    def check_again(self) -> None:
        """Make each step's next call run Dynamo's guards and torch's checks of addresses, which detect changes."""
        for step in self._steps:
            step.check_again()

    def report(self) -> CaptureReport:
        """A snapshot of the buckets so far."""
        buckets = [replace(bucket) for bucket in self._buckets.values()]
        return CaptureReport(buckets, self._budget, self.why_not)

    def measured(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a compiled step, or part of one: capture it within the budget, and measure its first calls.

        The wrapper takes a `DecodeState` and the other arguments of `step`, a mixed step's `PackedChunks` first. Once a
        recorded graph makes up a whole call of a bucket, a call with the same arguments replays it without the compiled
        step: Dynamo's guards and torch's checks take longer than the launch. After `check_again` each bucket's next
        call runs them. A replay does not repeat what the model does on the host.
        """
        self._steps.append(_MeasuredStep(self, name, step))
        return self._steps[-1]

    def uncaptured(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a compiled step, or part of one, so that no graph is recorded for it."""
        return step if self.why_not else _recording(step, False)

    def why_not_recorded(self, bucket: Bucket) -> str | None:
        """Why no graph of a bucket is recorded when it is first called; None if one is."""
        if self.why_not is not None:
            return self.why_not
        if bucket.prompt_keys > MAX_KEYS:
            return LONG
        return SPENT if self._is_spent(of_prompts=bucket.prompt_tokens > 0) else None

    def _is_spent(self, *, of_prompts: bool) -> bool:
        """Whether the budget is spent, for steps with prompts or for the others."""
        if self._budget is None:
            return False
        prompts = sum(bucket.num_bytes for bucket in self._buckets.values() if bucket.prompt_tokens)
        others = sum(bucket.num_bytes for bucket in self._buckets.values() if not bucket.prompt_tokens)
        is_spent = others + min(prompts, self._budget / 2) >= self._budget
        is_spent |= of_prompts and 2 * prompts >= self._budget
        return is_spent if self._ranks is None else bool(self._ranks.agree(is_spent))

    def bucket(self, step: str, shape: _Shape) -> Bucket:
        rows, tokens, chunks, keys = shape
        bucket = Bucket(step, rows, self._q_len, tokens, chunks, keys)
        return self._buckets.setdefault((step, *shape), bucket)


class _MeasuredStep:
    """See `Captures.measured`.

    _checked: by shape, how to call the step, once it has passed Dynamo's guards and torch's checks.
    _graphs: by shape, the graph that makes up a whole call; None if a call does more.
    """

    def __init__(self, captures: Captures, name: str, step: Callable[..., Any]) -> None:
        self._captures, self._name, self._step = captures, name, step
        self._uncaptured, self._captured = captures.uncaptured(step), _recording(step, True)
        self._num_calls: Counter[_Shape] = Counter()
        self._checked: dict[_Shape, Callable[..., Any]] = {}
        self._graphs: dict[_Shape, torch.cuda.CUDAGraph | None] = {}

    def __call__(self, state: DecodeState, *args: Any) -> Any:
        sizes = (0, 0, 0)
        if args and isinstance(args[0], PackedChunks) and not self._captures.why_not:
            sizes = args[0].sizes
        shape = len(state.active), *sizes  # identifies the bucket of this step
        call = self._checked.get(shape)
        return self._check(shape, state, *args) if call is None else call(state, *args)

    def check_again(self) -> None:
        self._checked.clear()

    def _check(self, shape: _Shape, *args: Any) -> Any:
        """Call the compiled step itself, and store how later calls run it."""
        captures = self._captures
        bucket, num_calls = captures.bucket(self._name, shape), self._num_calls[shape]
        if not num_calls:
            bucket.why_not = captures.why_not_recorded(bucket)
        call = self._uncaptured if bucket.why_not else self._captured
        seconds, num_graphs = compile_seconds(), self._num_graphs()
        if num_calls < CALLS_TO_RECORD:
            result = self._measure(bucket, call, *args)
        else:  # after `check_again`: no need to measure again, which would make the host wait
            result = call(*args)
            bucket.compile_seconds += compile_seconds() - seconds
        # The next call records what was compiled again.
        self._num_calls[shape] = 1 if compile_seconds() > seconds else num_calls + 1
        if bucket.why_not:
            self._checked[shape] = self._uncaptured
        elif self._num_calls[shape] >= CALLS_TO_RECORD:
            graph = last_cuda_graph(captures.device)
            # If torch refused to record, the last graph is that of another call.
            if graph is not self._graphs.get(shape) and self._num_graphs() == num_graphs:
                graph = None
            self._graphs[shape] = graph
            self._checked[shape] = self._step if graph is None else _replaying(graph, self._step, *args)
            bucket.why_not = None if bucket.num_graphs else REFUSED
        return result

    def _num_graphs(self) -> int:
        return 0 if self._captures.why_not else num_cuda_graphs(self._captures.device)

    def _measure(self, bucket: Bucket, call: Callable[..., Any], *args: Any) -> Any:
        """Call, and add its time and memory to the bucket's sums."""
        before = self._read()
        kind = f"{bucket.step}, drafts: {bucket.q_len - 1}"
        what = f"compiling the step ({kind}), a minute or two if it is new to this machine"
        with nullcontext() if self._num_calls else announce_if_slow(what):
            result = call(*args)
        seconds, compiling, graphs, pool, driver = (after - b for after, b in zip(self._read(), before))
        bucket.compile_seconds += compiling
        if bucket.why_not is None:
            bucket.capture_seconds += seconds - compiling
            bucket.num_bytes += max(0, int(pool))
            if graphs > 0:
                bucket.num_graphs += int(graphs)
                # Not for warm-ups: they load the kernels' code, which would be counted.
                bucket.num_bytes += max(0, int(driver))
        return result

    def _read(self) -> tuple[float, float, int, int, int]:
        """Clock seconds, `compile_seconds`, and the three numbers of `cuda_graph_usage`."""
        usage = 0, 0, 0
        if self._captures.why_not is None:
            torch.cuda.synchronize(self._captures.device)
            usage = cuda_graph_usage(self._captures.device)
        return time.perf_counter(), compile_seconds(), *usage


def _replaying(graph: torch.cuda.CUDAGraph, step: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Replays the graph, without any checks, for calls with these arguments; calls the step for others."""

    def run(*given: Any) -> Any:
        same = all(mine is theirs for mine, theirs in zip(args, given, strict=True))
        return graph.replay() if same else step(*given)

    return run


def _recording(step: Callable[..., Any], allowed: bool) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with recording_cuda_graphs(allowed):
            return step(*args)

    return run
