"""Checks the batches of a compiled graph before it runs, with the errors of eager mode.

While Dynamo traces, a batch has no values, and the number of tokens of a mixed batch is a sum of two unknown sizes,
which no guard compares: `torch_internals.run_check` misses both.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from mla_compile.ops.attention.mla_attention import DECODE, PREFILL, attention_op, check_batch
from mla_compile.torch_internals import size_in_call

Check = Callable[[Sequence[Any]], None]

_SEGMENTS = {"decode": DECODE, "prefill": PREFILL}
_NAMES = tuple(argument.name for argument in attention_op._schema.arguments)


def checks_of(gm: fx.GraphModule) -> list[Check]:
    """A check for each batch of a Dynamo graph whose tensors are graph inputs; it is called with a call's inputs.

    On GPUs no values are read, so only mixed batches are checked there.
    """
    position = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    checks: dict[str, Check] = {}
    for node in gm.graph.find_nodes(op="call_function", target=attention_op):
        args: dict[str, Any] = dict.fromkeys(_NAMES) | dict(zip(_NAMES, node.args))
        segments = [segment for segment in _SEGMENTS if args[f"{segment}_slot_mapping"] is not None]
        given = {"kv_cache": args["kv_cache"]}
        for segment in segments:
            given |= {
                f"{segment}_{f}": args[f if f in args else f"{segment}_{f}"] for f in _SEGMENTS[segment]
            }
        inputs = {name: position.get(x, -1) for name, x in given.items() if isinstance(x, fx.Node)}
        cache, tokens = (args[name].meta["example_value"] for name in ("kv_cache", "q_nope"))
        if -1 in inputs.values() or not (cache.is_cpu or len(segments) == 2):
            continue
        constants = {name: x for name, x in given.items() if name not in inputs}
        # Layers with caches of one size share a check.
        key = f"{inputs | {'kv_cache': cache.shape}} {constants} {tokens.shape[0]}"
        if key not in checks:
            checks[key] = _check(segments, inputs, constants, size_in_call(tokens.shape[0], gm), cache.is_cpu)
    return list(checks.values())


def _check(
    segments: list[str],
    positions: dict[str, int],
    constants: dict[str, Any],
    num_tokens: Callable[[Sequence[Any]], int] | None,
    has_values: bool,
) -> Check:
    """positions, constants: the cache and the segments' fields, as indices of inputs or as constants."""

    def check(inputs: Sequence[Any]) -> None:
        given = {name: inputs[i] for name, i in positions.items()} | constants
        expected = sum(given[f"{segment}_slot_mapping"].shape[0] for segment in segments)
        num = expected if num_tokens is None else num_tokens(inputs)
        if has_values or num != expected:
            cache = given["kv_cache"]
            decode, prefill = (
                tuple(given[f"{segment}_{field}"] for field in fields) if segment in segments else None
                for segment, fields in _SEGMENTS.items()
            )
            floats = cache.dtype if cache.is_floating_point() else torch.float32  # FP8 latents are bytes
            check_batch(cache.new_empty(1, dtype=floats).expand(num, 1, 1), cache, decode, prefill)

    return check


def checked(run: Callable[..., Any], checks: list[Check]) -> Callable[..., Any]:
    """`run`, with the checks before it."""
    if not checks:
        return run

    def call(*inputs: Any) -> Any:
        for check in checks:
            check(inputs)
        return run(*inputs)

    return call
