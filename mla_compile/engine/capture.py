"""Captures buckets as CUDA graphs within a byte budget, and measures the first calls of each."""

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mla_compile.engine.buckets import Bucket, CaptureReport, row_sizes
from mla_compile.engine.config import FittedConfig
from mla_compile.ops.attention.segments import MAX_KEYS
from mla_compile.packing import padded_prompt_tokens, padded_rows
from mla_compile.ranks import Ranks
from mla_compile.speculate import DecodeState, PackedChunks
from mla_compile.torch_internals import (
    CompiledCall,
    compile_seconds,
    compiled_calls,
    cuda_graph_usage,
    end_recording,
    would_repeat,
)

_Shape = tuple[int, int, int, int]
"""Rows; tokens, chunks and keys of prompts."""

CALLS_TO_RECORD = 2
"""A bucket's first call runs as it is, which compiles the step and loads its kernels; the second is recorded."""

SPENT = "the budget is spent"
REFUSED = "torch recorded no graph"

_ONE_RECORDS = threading.Lock()
"""While a thread records, no other one of the process may record or wait for the device."""


class Captures:
    """Runs steps, and captures the bucket of each state that they are called with while the budget lasts.

    Args:
        config: of the engine. Once recordings hold `capture_budget` bytes, no further one is begun, and other buckets
            run uncaptured. Buckets with prompts, which come first, take at most half of it. None for no limit.
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
        self._q_len = 1 + config.num_speculative_tokens
        self._budget, self._ranks = config.capture_budget, ranks
        self.longest = config.captured_prompt_tokens
        self._buckets: dict[tuple[str, *_Shape], Bucket] = {}
        self._steps: list[_MeasuredStep] = []
        self.pool: Any = None

    def check_again(self) -> None:
        """Make each bucket's next call find out whether its graph still does what the step would do."""
        for step in self._steps:
            step.check_again()

    def report(self) -> CaptureReport:
        """A snapshot of the buckets so far."""
        buckets = [replace(bucket) for bucket in self._buckets.values()]
        return CaptureReport(buckets, self._budget, self.why_not)

    def measured(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a step, or part of one: capture it within the budget, and measure its first calls.

        The wrapper takes a `DecodeState` and the other arguments of `step`, a mixed step's `PackedChunks` first. A
        replay copies tensors among the arguments, and overwrites what the replay before it returned. It does not repeat
        what the step does on the host.
        """
        self._steps.append(_MeasuredStep(self, name, step))
        return self._steps[-1]

    def why_not_recorded(self, bucket: Bucket) -> str | None:
        """Why no graph of a bucket may be recorded now; None if one may be."""
        if self.why_not is not None:
            return self.why_not
        if bucket.prompt_tokens > self.longest:
            return f"more than {self.longest:,} prompt tokens"
        if bucket.prompt_keys > MAX_KEYS:
            return f"more than {MAX_KEYS:,} keys of prompts: kernels take longer than the host does"
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
        return self._buckets.setdefault((step, *shape), Bucket(step, rows, self._q_len, tokens, chunks, keys))

    def record(self, step: Callable[..., Any], args: tuple[Any, ...]) -> "Recording":
        """Record a call, which runs nothing.

        Raises:
            RuntimeError: it does what no CUDA graph can hold.
        """
        before = self._usage()
        with torch.inference_mode(False):  # inference tensors cannot be written outside that mode
            own = tuple(arg.clone() if isinstance(arg, Tensor) else arg for arg in args)
        graph = torch.cuda.CUDAGraph()
        # The outer stream is the current one again, even after an error in a recording.
        with torch.cuda.stream(torch.cuda.current_stream(self.device)), compiled_calls() as calls:
            self.pool = self.pool or torch.cuda.graph_pool_handle()
            stream = _capture_stream(self.device)
            # Each thread needs its own cuBLAS handle, which cannot be created while a graph is recorded.
            torch.cuda.current_blas_handle()
            try:
                # Other threads, a server's for example, may use the device meanwhile.
                with torch.cuda.graph(graph, self.pool, stream, capture_error_mode="thread_local"):
                    result = step(*own)
            except RuntimeError:
                refused, self.pool = self.pool, None
                end_recording(self.device, refused, stream)
                raise
        grown = (max(0, after - b) for after, b in zip(self._usage(), before))
        return Recording(graph, own, result, calls, sum(grown))

    def _usage(self) -> tuple[int, int]:
        """The bytes of `cuda_graph_usage`, once the device is idle."""
        torch.cuda.synchronize(self.device)
        return cuda_graph_usage(self.device, self.pool)


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all engines, as cuBLAS keeps memory for each stream."""
    return torch.cuda.Stream(device)


class Recording(NamedTuple):
    """A CUDA graph of one call.

    args: of the call; a replay fills the tensors among them. result: what it returned, which a replay overwrites.
    calls: of compiled code. num_bytes: by which the device's memory for graphs has grown.
    """

    graph: torch.cuda.CUDAGraph
    args: tuple[Any, ...]
    result: Any
    calls: list[CompiledCall]
    num_bytes: int

    def serves(self, args: tuple[Any, ...]) -> bool:
        return all(isinstance(mine, Tensor) or mine is its for mine, its in zip(self.args, args, strict=True))

    def replay(self, args: tuple[Any, ...]) -> Any:
        for mine, its in zip(self.args, args, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(its)
        self.graph.replay()
        return self.result


class _MeasuredStep:
    """See `Captures.measured`.

    _warm: the shapes whose next call may be recorded. _recordings: by shape.
    _checked: the shapes whose recording does what the step would do, since the last `check_again`.
    """

    def __init__(self, captures: Captures, name: str, step: Callable[..., Any]) -> None:
        self._captures, self._name, self._step = captures, name, step
        self._warm: set[_Shape] = set()
        self._num_decisions: Counter[_Shape] = Counter()
        self._recordings: dict[_Shape, Recording] = {}
        self._checked: set[_Shape] = set()

    def __call__(self, state: DecodeState, *args: Any) -> Any:
        sizes = (0, 0, 0)
        if args and isinstance(args[0], PackedChunks) and not self._captures.why_not:
            sizes = args[0].sizes
            if sizes[0] > self._captures.longest:  # no graph is recorded, so few buckets serve for many sizes
                sizes = padded_prompt_tokens(sizes[0]), sizes[1], padded_rows(sizes[2])
        shape, args = (len(state.active), *sizes), (state, *args)
        if recording := self._recordings.get(shape):
            if not recording.serves(args):
                return self._step(*args)
            if shape not in self._checked and not would_repeat(recording.calls, self._step, *args):
                del self._recordings[shape]  # the next call is recorded
                return self._step(*args)
            self._checked.add(shape)
            return recording.replay(args)
        bucket = self._captures.bucket(self._name, shape)
        if not bucket.why_not and self._num_decisions[shape] < CALLS_TO_RECORD:  # the same calls on all ranks
            self._num_decisions[shape] += 1
            bucket.why_not = self._captures.why_not_recorded(bucket)
        if shape not in self._warm:
            result = self._measure(bucket, self._step, *args)
            self._warm.add(shape)
            return result
        if bucket.why_not:
            return self._step(*args)
        seconds = compile_seconds()
        try:
            self._recordings[shape] = self._measure(bucket, self._captures.record, self._step, args)
        except RuntimeError as error:
            if compile_seconds() == seconds:  # else the next call records what is compiled now
                cause = str(error.__context__ or error)
                bucket.why_not, bucket.is_captured = f"{REFUSED}: {cause.splitlines()[0]}", False
            return self._step(*args)
        self._checked.add(shape)
        return self._recordings[shape].replay(args)

    def check_again(self) -> None:
        self._checked.clear()

    def _measure(self, bucket: Bucket, call: Callable[..., Any], *args: Any) -> Any:
        """Call, and add its time on the host to the bucket's sums."""
        with _ONE_RECORDS:
            start, compiled = time.perf_counter(), compile_seconds()
            result = call(*args)
            seconds, compiling = time.perf_counter() - start, compile_seconds() - compiled
        bucket.compile_seconds += compiling
        if bucket.why_not is None:
            bucket.capture_seconds += seconds - compiling
        if isinstance(result, Recording):
            bucket.is_captured, bucket.num_bytes = True, max(bucket.num_bytes, result.num_bytes)
        return result
