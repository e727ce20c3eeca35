"""Let `moe_experts` compute the shared experts too.

    before                                              after

    x ─┬─> moe_experts ──────────────────┐              x ─> moe_experts(shared experts)
       └─> gate, up ─> silu, * ─> down ──┴─> +

A token passes its shared experts whatever it chose, so they are more tiles of launches that are there anyway: four
launches less, and their weights are read while the routed experts' are. The sum is rounded once.

The shared experts are found by what they compute: the operations between the input of `moe_experts` and the other
summand are cut out (`cone.py`), run on random tokens, and compared with the formula. Their weights are in FP8 where
those of the routed experts are, or stay outside.

Only where the op has a kernel. The log, `TORCH_LOGS="+mla_compile"`, says what was fused, and what was not.
"""

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from mla_compile.ops import fp8
from mla_compile.ops.fp8_linear import fp8_linear_op
from mla_compile.ops.implementations import first_serves
from mla_compile.ops.moe import MOE_EXPERTS, moe_experts_op, shared_fits
from mla_compile.passes.cone import Cone, cut, shape_where_symbols_are
from mla_compile.passes.effects import erase, live_nodes, writer_between
from mla_compile.passes.emit import fake_mode_of, set_example_value
from mla_compile.passes.nodes import (
    calls,
    is_call,
    is_tensor,
    op_arguments,
    tensor_of,
    torch_name,
    with_arguments,
)
from mla_compile.passes.provenance import where
from mla_compile.torch_internals import is_wrapper, on_real_tensors

log = logging.getLogger(__name__)

_VIEWS = ("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze")
_MOST_NODES = 16
_TOKENS = 3


@dataclass(frozen=True)
class _Match:
    """A sum of what `experts` gives, behind views `routed`, and an MLP of `weights`: gate, up and down, and in FP8
    their scales."""

    experts: fx.Node
    routed: fx.Node
    sum: fx.Node
    weights: tuple[fx.Node, ...]
    nodes: frozenset[fx.Node]


def fuse_shared_experts(
    gm: fx.GraphModule, example_inputs: Sequence[Any] = (), *, everywhere: bool = False
) -> fx.GraphModule:
    """Rewrite `gm` in place and return it; a graph without shared experts is left untouched.

    everywhere: also where the op has no kernel.
    """
    all_calls = calls(gm.graph, moe_experts_op)
    layers = [node for node in all_calls if everywhere or _has_kernel(node)]
    if not layers:
        return gm
    live = live_nodes(gm.graph)
    known: dict[str, tuple[int, ...] | str] = {}
    superseded: set[fx.Node] = set()
    for experts in layers:
        name, found = where(experts), _match(experts, known)
        if isinstance(found, str):
            log.info("not fused: %s: %s", name, found)
            continue
        _replace(found)
        superseded |= found.nodes
        log.info("fused: %s", name)
    if superseded:
        erase(gm.graph, live, superseded)
    return gm


def _has_kernel(experts: fx.Node) -> bool:
    is_fp8 = op_arguments(experts)["down_scale"] is not None
    return first_serves(MOE_EXPERTS[int(is_fp8) :], tensor_of(experts))  # the second row is for FP8


def _match(experts: fx.Node, known: dict[str, tuple[int, ...] | str]) -> _Match | str:
    """The shared experts beside a call of routed ones, or why there are none."""
    given = op_arguments(experts)
    if given["shared_gate"] is not None:
        return "it has shared experts already"
    routed = experts
    total = _only_user(routed)
    while total is not None and torch_name(total) in _VIEWS:
        routed, total = total, _only_user(total)
    if total is None or torch_name(total) != "add" or len(total.args) != 2 or total.kwargs:
        return "its result is not one of two summands"
    other: Any = total.args[total.args[0] is routed]
    if not is_tensor(other) or other.users.keys() != {total}:
        return "the other summand is no tensor of its own"
    if (tensor_of(other).shape, tensor_of(other).dtype) != (tensor_of(routed).shape, tensor_of(routed).dtype):
        return "the other summand has another shape or dtype"
    reason = "the other summand is made of something else"
    for source in _before_views(given["x"]):
        if other < source:
            continue
        cone = cut(source, other)
        if not cone.nodes:
            continue
        key = cone.signature()
        if key not in known:
            known[key] = _recognise(cone, tensor_of(given["w_down"]).shape[2])
        order = known[key]
        if isinstance(order, str):
            reason = order
            continue
        weights = tuple(cone.tensors[i] for i in order)
        nodes = frozenset(cone.nodes)
        obstacle = _misfit(experts, weights) or _late(experts, total, (source, *weights), nodes)
        if obstacle is not None:
            return obstacle
        return _Match(experts, routed, total, weights, nodes | {total})
    return reason


def _misfit(experts: fx.Node, weights: tuple[fx.Node, ...]) -> str | None:
    """Why the op does not take these weights beside those of the call."""
    w_down, is_fp8 = op_arguments(experts)["w_down"], len(weights) == 6
    if is_fp8 != (op_arguments(experts)["down_scale"] is not None):
        return "weights of routed or of shared experts are in FP8, and the others are not"
    if is_fp8 and not shared_fits(tensor_of(weights[0]), tensor_of(w_down)):
        return "a block of FP8 weights belongs to two shared experts"
    return None


def _late(
    experts: fx.Node, total: fx.Node, read: tuple[fx.Node, ...], nodes: frozenset[fx.Node]
) -> str | None:
    """Why what the shared experts read, their input first, cannot be read where the call is."""
    late = next((node for node in read[1:] if node > experts), None)
    late = late or writer_between(read[0], total, list(read), nodes)
    return None if late is None else f"`{late.name}` is written or made on the way"


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _before_views(x: fx.Node) -> Iterator[fx.Node]:
    """A node and those that it is a view of, with the same columns."""
    yield x
    while torch_name(x) in _VIEWS and is_tensor(x.args[0]):
        before: Any = x.args[0]
        if tensor_of(before).shape[-1] != tensor_of(x).shape[-1]:
            return
        yield before
        x = before


def _recognise(cone: Cone, intermediate: int) -> tuple[int, ...] | str:
    """Which tensors of a cone are the weights of gate, up and down, then their scales, or why it is no MLP of them."""
    obstacle = cone.obstacle(_MOST_NODES)
    if obstacle is not None:
        return obstacle
    scale_of = _scales(cone)
    weights = [node for node in cone.tensors if node not in scale_of.values()]
    if len(weights) != 3 or len(scale_of) not in (0, 3) or any(tensor_of(w).dim() != 2 for w in weights):
        return f"it reads {len(cone.tensors)} other tensors, not three matrices"
    if any(is_wrapper(tensor_of(node)) for node in (cone.source, *cone.tensors)):
        return "it reads a tensor subclass"
    dtype = tensor_of(cone.source).dtype
    if {tensor_of(node).dtype for node in (cone.result, *weights) if node not in scale_of} != {dtype}:
        return "it mixes dtypes"
    try:
        with on_real_tensors(), torch.random.fork_rng(devices=[]):
            values, x = _values(cone, scale_of)
            got = cone.run(values, None if dtype in (torch.float32, torch.float64) else dtype)
            for order in itertools.permutations(weights):
                gate, up, down = (_read(values, node, scale_of).to(x.dtype) for node in order)
                if not gate.shape == up.shape == down.shape[::-1] or len(gate) % intermediate:
                    continue
                expected = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
                if torch.allclose(
                    got.flatten(0, -2), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max())
                ):
                    scales = [scale_of[node] for node in order if node in scale_of]
                    return tuple(cone.tensors.index(node) for node in (*order, *scales))
    except Exception as failure:  # whatever the user's operations raise
        return f"it cannot be tried: {failure}"
    return "it computes something else"


def _scales(cone: Cone) -> dict[fx.Node, fx.Node]:
    """The FP8 weights that a cone multiplies by, and their scales."""
    products = [op_arguments(node) for node in cone.nodes if is_call(node, fp8_linear_op)]
    return {given["first"]: given["first_scale"] for given in products if given["second"] is None}


def _read(values: dict[fx.Node, Any], weight: fx.Node, scale_of: dict[fx.Node, fx.Node]) -> Tensor:
    value: Tensor = values[weight]
    return fp8.dequantize(value, values[scale_of[weight]]) if weight in scale_of else value


def _values(cone: Cone, scale_of: dict[fx.Node, fx.Node]) -> tuple[dict[fx.Node, Any], Tensor]:
    """Random weights and tokens; those also as rows."""
    generator = torch.Generator("cpu").manual_seed(0)
    dtype = torch.float64 if tensor_of(cone.source).dtype == torch.float64 else torch.float32
    values: dict[fx.Node, Any] = {}
    for node in (cone.source, *cone.leaves):
        if not is_tensor(node):
            raise ValueError(f"it reads the size {node.name}")
        shape = shape_where_symbols_are(node, _TOKENS)
        drawn = torch.randn(shape, generator=generator, dtype=dtype, device="cpu")
        if node in scale_of:
            values[node] = drawn.to(fp8.DTYPE)
        elif node in scale_of.values():
            values[node] = (
                drawn.abs() + 0.5
            ).float()  # blocks are fewer than columns: the results are larger
        else:
            values[node] = drawn * (shape[-1] ** -0.5)
    values[cone.source] *= tensor_of(cone.source).shape[-1] ** 0.5
    return values, values[cone.source].flatten(0, -2)


def _replace(match: _Match) -> None:
    names = (
        "shared_gate",
        "shared_up",
        "shared_down",
        "shared_gate_scale",
        "shared_up_scale",
        "shared_down_scale",
    )
    experts = match.experts
    experts.args, experts.kwargs = with_arguments(experts, **dict(zip(names, match.weights, strict=False)))
    set_example_value(experts, fake_mode_of(experts))
    match.sum.replace_all_uses_with(match.routed)
