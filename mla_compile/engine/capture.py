"""Which buckets are captured, within a byte budget, and what the first calls of each one cost."""

import functools
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mla_compile.engine.buckets import Bucket, CaptureReport, choose_rows, row_sizes
from mla_compile.ops.segments import MAX_KEYS
from mla_compile.speculate import DecodeState, PackedChunks
from mla_compile.torch_internals import (
    compile_seconds,
    cuda_graph_usage,
    last_cuda_graph,
    num_cuda_graphs,
    recording_cuda_graphs,
)
from mla_compile.waits import told

_Shape = tuple[int, int, int, int, int]
"""Rows, places for stop ids; tokens, chunks and keys of prompts."""

CALLS_TO_RECORD = 2
"""Torch runs a graph's first call as a warm-up, in the graphs' memory pool, and records the second."""

SPENT = "the budget is spent"
FAILED = "its last call failed"
LONG = f"prompts of more than {MAX_KEYS:,} keys, whose kernels take longer than the host does"
REFUSED = "torch recorded no graph; TORCH_LOGS=cudagraphs tells why"


class Captures:
    """Runs compiled steps; the bucket of each state that they are called with is captured while the budget lasts.

    Args:
        max_rows: of the largest bucket.
        q_len: query tokens of a row.
        device: of the states.
        budget: once recordings hold so many bytes no further one is begun, and other buckets run the same compiled
            code uncaptured. Those with prompts, which come first, take no more than half of it. None for no limit.
        why_not: why nothing can be captured here; None where it can.
        agree: gives what rank 0 gave of processes that share the model, as each has a memory of its own.
    """

    def __init__(
        self,
        max_rows: int,
        *,
        q_len: int,
        device: torch.device,
        budget: int | None,
        why_not: str | None,
        agree: Callable[[int], int],
    ) -> None:
        self.sizes = row_sizes(max_rows)
        self._q_len, self._device = q_len, device
        self._budget = budget
        self._why_not = why_not
        self._agree = agree
        self._buckets: dict[tuple[str, *_Shape], Bucket] = {}
        self._known: list[_Known] = []

    def check_again(self) -> None:
        """Let each step's next call pass Dynamo's guards and torch's checks of addresses, which notice changes."""
        for known in self._known:
            known.checked.clear()
            known.all_checked = False

    def report(self) -> CaptureReport:
        """What is known by now; it does not change later."""
        buckets = [replace(bucket) for bucket in self._buckets.values()]
        return CaptureReport(buckets, self._budget, self._why_not)

    def rows_for(self, step: str, count: int, num_stop_ids: int) -> int:
        """The rows of the bucket that serves a batch of `count` rows."""
        recorded = {
            bucket.rows
            for bucket in self._buckets.values()
            if bucket.why_not is None and (bucket.step, bucket.num_stop_ids) == (step, num_stop_ids)
        }  # or about to be: most of the memory is taken by the warm-up
        own = choose_rows(count, self.sizes, recorded, spent=False)
        rows = choose_rows(count, self.sizes, recorded, spent=self._is_spent(of_prompts=False))
        if rows != own:
            padded = self._bucket(step, (own, num_stop_ids, 0, 0, 0))
            padded.padded_to, padded.why_not = rows, SPENT
        return rows

    def measured(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        """A compiled step, or half of one, with its captures within the budget and its first calls measured.

        It is called with a `DecodeState` and what else `step` takes, a mixed step's `PackedChunks` first. Once a
        bucket's graph is recorded, and it is the whole of a call, a call with the same arguments replays it without the
        compiled step: Dynamo's guards and torch's checks take longer than the launch. After `check_again` one call
        passes them for all buckets of its step. What the model does on the host is not repeated in a replay.
        """
        uncaptured = step if self._why_not else _recording(step, False)
        captured = _recording(step, True)
        known = _Known()
        self._known.append(known)
        calls: Counter[_Shape] = Counter()

        # With the compiled step's attributes, by which `shadow_check` finds the eager one.
        @functools.wraps(step)
        def run(state: DecodeState, *args: Any) -> Any:
            rows, num_stop_ids = state.stop_ids.shape
            sizes = (0, 0, 0)
            if args and isinstance(args[0], PackedChunks) and not self._why_not:
                sizes = args[0].sizes
            shape = rows, num_stop_ids, *sizes  # all that tells one bucket of this step from another
            if known.all_checked or shape in known.checked:
                call = known.calls.get(shape)
                if call is not None:
                    return call(state, *args)
            bucket = self._bucket(name, shape)
            if not calls[shape] or bucket.why_not == FAILED:
                bucket.why_not = self._why_not or (LONG if sizes[2] > MAX_KEYS else None)
                bucket.why_not = bucket.why_not or (SPENT if self._is_spent(of_prompts=any(sizes)) else None)
            call = uncaptured if bucket.why_not else captured
            before, num_graphs = compile_seconds(), self._num_graphs()
            if calls[shape] < CALLS_TO_RECORD:
                result = self._measure(bucket, call, state, *args, is_first=not calls)
            else:  # after `check_again`: it has been measured, which makes the host wait
                result = call(state, *args)
                bucket.compile_seconds += compile_seconds() - before
            is_new = compile_seconds() > before
            # What was compiled anew is recorded anew, by the next call.
            calls[shape] = 1 if is_new else calls[shape] + 1
            if bucket.why_not:
                known.learn(shape, uncaptured, None)
            elif calls[shape] >= CALLS_TO_RECORD:
                graph = last_cuda_graph(self._device)
                # What torch refused to record leaves the graph of another call behind.
                if graph is not known.graphs.get(shape) and self._num_graphs() == num_graphs:
                    graph = None
                known.learn(shape, step if graph is None else _replaying(graph, step, state, *args), graph)
                bucket.why_not = None if bucket.num_graphs else REFUSED
            return result

        return run

    def _num_graphs(self) -> int:
        return 0 if self._why_not else num_cuda_graphs(self._device)

    def _is_spent(self, *, of_prompts: bool) -> bool:
        """Whether no further bucket is recorded, of steps with prompts or of others."""
        if self._budget is None or self._why_not is not None:
            return False
        prompts = sum(bucket.num_bytes for bucket in self._buckets.values() if bucket.prompt_tokens)
        others = sum(bucket.num_bytes for bucket in self._buckets.values() if not bucket.prompt_tokens)
        is_spent = others + min(prompts, self._budget / 2) >= self._budget
        return bool(self._agree(is_spent or (of_prompts and 2 * prompts >= self._budget)))

    def _bucket(self, step: str, shape: _Shape) -> Bucket:
        rows, num_stop_ids, tokens, chunks, keys = shape
        bucket = Bucket(step, rows, self._q_len, num_stop_ids, tokens, chunks, keys)
        return self._buckets.setdefault((step, *shape), bucket)

    def _measure(self, bucket: Bucket, call: Callable[..., Any], *args: Any, is_first: bool) -> Any:
        """Call, and add what it cost to the bucket's sums. is_first: of the step, which compiles it."""
        before = self._read()
        kind = f"{bucket.step}, drafts: {bucket.q_len - 1}"
        what = f"compiling the step ({kind}), a minute or two if it is new to this machine"
        try:
            with told(what) if is_first else nullcontext():
                result = call(*args)
        except BaseException:
            # Until it is called again: others must not be padded to it.
            bucket.why_not = bucket.why_not or FAILED
            raise
        after = self._read()
        compiling = after.compile_seconds - before.compile_seconds
        bucket.compile_seconds += compiling
        if bucket.why_not is None:
            bucket.capture_seconds += after.seconds - before.seconds - compiling
            bucket.num_bytes += max(0, after.pool_bytes - before.pool_bytes)
            if after.num_graphs > before.num_graphs:
                bucket.num_graphs += after.num_graphs - before.num_graphs
                # A warm-up's growth would be the code of kernels, which it is the first to load.
                bucket.num_bytes += max(0, after.driver_bytes - before.driver_bytes)
        return result

    def _read(self) -> "_Reading":
        usage = 0, 0, 0
        if self._why_not is None:
            torch.cuda.synchronize(self._device)
            usage = cuda_graph_usage(self._device)
        return _Reading(time.perf_counter(), compile_seconds(), *usage)


@dataclass(frozen=True)
class _Reading:
    """seconds: of a clock. The others: see `compile_seconds` and `cuda_graph_usage`."""

    seconds: float
    compile_seconds: float
    num_graphs: int
    pool_bytes: int
    driver_bytes: int


@dataclass
class _Known:
    """How to call a step without measuring it, by shape.

    graphs: what a call replays, where that is all that it does.
    checked: shapes that have passed Dynamo's guards and torch's checks since these were last asked for.
    all_checked: whether all have: one code serves all shapes, with the same weights, so one of them speaks for all.
    """

    calls: dict[_Shape, Callable[..., Any]] = field(default_factory=dict)
    graphs: dict[_Shape, torch.cuda.CUDAGraph] = field(default_factory=dict)
    checked: set[_Shape] = field(default_factory=set)
    all_checked: bool = False

    def learn(self, shape: _Shape, call: Callable[..., Any], graph: torch.cuda.CUDAGraph | None) -> None:
        """Take in a shape that has just passed all checks, with the graph that it replayed or recorded."""
        before = self.graphs.get(shape)
        if before is not None and before is not graph:
            # Something has moved: the others must see for themselves.
            self.calls.clear()
            self.graphs.clear()
            self.checked.clear()
        elif before is not None:
            self.all_checked = True
        self.calls[shape] = call
        self.checked.add(shape)
        if graph is not None:
            self.graphs[shape] = graph


def _replaying(graph: torch.cuda.CUDAGraph, step: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """The step, past all checks where it is called with these arguments."""

    def run(*given: Any) -> Any:
        same = all(mine is theirs for mine, theirs in zip(args, given, strict=True))
        return graph.replay() if same else step(*given)

    return run


def _recording(step: Callable[..., Any], allowed: bool) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with recording_cuda_graphs(allowed):
            return step(*args)

    return run
