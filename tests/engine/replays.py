"""A stand-in for CUDA graphs that runs their steps, so engines record and replay on a CPU."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mla_compile.engine import capture, steps
from mla_compile.engine.capture import Captures, Recording
from mla_compile.models import MLAForCausalLM
from mla_compile.torch_internals import compiled_calls
from tests.models_for_tests import caches_of


class Replay:
    """Runs the step on the graph's own arguments, and overwrites the graph's result."""

    def __init__(self, step: Callable[..., Any], args: tuple[Any, ...], result: Any) -> None:
        self.step, self.args, self.result = step, args, result

    def replay(self) -> None:
        for mine, its in zip(_tensors(self.result), _tensors(self.step(*self.args)), strict=True):
            mine.copy_(its)


def _tensors(result: Any) -> list[Tensor]:
    if result is None or isinstance(result, Tensor):
        return [] if result is None else [result]
    return [tensor for each in result for tensor in _tensors(each)]


@contextmanager
def recording(
    model: MLAForCausalLM,
    *,
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext,
    eagerly: bool = False,
) -> Iterator[list[Replay]]:
    """Inside, engines of a model record and replay; yields what they have recorded.

    inside: a context of each recording. eagerly: there is no compiled code that a check could compare.
    """
    replays: list[Replay] = []

    def record(captures: Captures, step: Callable[..., Any], args: tuple[Any, ...]) -> Recording:
        written = [*args[0].named().values(), *caches_of(model)]
        before = [tensor.clone() for tensor in written]
        try:
            with compiled_calls() as calls, inside():
                own = tuple(arg.clone() if isinstance(arg, Tensor) else arg for arg in args)
                result = step(*own)
        finally:  # a recording runs nothing, so no mode of `stress.faults` must fail this
            with _disable_current_modes():
                for tensor, value in zip(written, before, strict=True):
                    tensor.copy_(value)
        replays.append(Replay(step, own, result))
        return Recording(cast("torch.cuda.CUDAGraph", replays[-1]), own, result, calls, 0)

    with (
        patch.object(Captures, "record", record),
        patch.object(steps, "_why_not_captured", lambda *_: None),
        patch.object(capture, "would_repeat", lambda *_: True) if eagerly else nullcontext(),
    ):
        yield replays
