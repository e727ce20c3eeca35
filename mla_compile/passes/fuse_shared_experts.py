"""Let `moe_experts` compute the shared experts too.

    before                                              after

    x ─┬─> moe_experts ──────────────────┐              x ─> moe_experts(shared experts)
       └─> gate, up ─> silu, * ─> down ──┴─> +

A token passes its shared experts whatever it chose, so they are more tiles of launches that are there anyway: four
launches less, and their weights are read while the routed experts' are. The sum is rounded once.

The shared experts are found by what they compute: the operations between the input of `moe_experts` and the other
summand are cut out (`cone.py`), run on random tokens, and compared with the formula.

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

from mla_compile.ops.implementations import first_serves
from mla_compile.ops.moe import MOE_EXPERTS, moe_experts_op
from mla_compile.passes.cone import Cone, cut, shape_where_symbols_are
from mla_compile.passes.effects import erase, live_nodes, writer_between
from mla_compile.passes.emit import fake_mode_of, set_example_value
from mla_compile.passes.nodes import calls, is_tensor, op_arguments, tensor_of, torch_name, with_arguments
from mla_compile.passes.provenance import where
from mla_compile.torch_internals import is_wrapper, on_real_tensors

log = logging.getLogger(__name__)

_VIEWS = ("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze")
_MOST_NODES = 16
_TOKENS = 3


@dataclass(frozen=True)
class _Match:
    """A sum of what `experts` gives, behind views `routed`, and an MLP of `weights`: gate, up and down."""

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
    layers = [node for node in all_calls if everywhere or first_serves(MOE_EXPERTS, tensor_of(node))]
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
        late = next((w for w in weights if w > experts), None)
        nodes = frozenset(cone.nodes)
        late = late or writer_between(source, total, [source, *weights], nodes)
        if late is not None:
            return f"`{late.name}` is written or made on the way"
        return _Match(experts, routed, total, weights, nodes | {total})
    return reason


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
    """Which tensors of a cone are the weights of gate, up and down, or why it is no MLP of them."""
    obstacle = cone.obstacle(_MOST_NODES)
    if obstacle is not None:
        return obstacle
    if len(cone.tensors) != 3 or any(len(tensor_of(w).shape) != 2 for w in cone.tensors):
        return f"it reads {len(cone.tensors)} other tensors, not three matrices"
    if any(is_wrapper(tensor_of(node)) for node in (cone.source, *cone.tensors)):
        return "it reads a tensor subclass"
    dtype = tensor_of(cone.source).dtype
    if {tensor_of(node).dtype for node in (cone.result, *cone.tensors)} != {dtype}:
        return "it mixes dtypes"
    shapes = [tuple(tensor_of(w).shape) for w in cone.tensors]
    try:
        with on_real_tensors(), torch.random.fork_rng(devices=[]):
            values, x = _values(cone)
            got = cone.run(values, None if dtype in (torch.float32, torch.float64) else dtype)
            for order in itertools.permutations(range(3)):
                gate, up, down = (values[cone.tensors[i]] for i in order)
                if [shapes[i] for i in order[:2]] != [tuple(down.shape[::-1])] * 2 or len(
                    gate
                ) % intermediate:
                    continue
                expected = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
                if torch.allclose(
                    got.flatten(0, -2), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max())
                ):
                    return order
    except Exception as failure:  # whatever the user's operations raise
        return f"it cannot be tried: {failure}"
    return "it computes something else"


def _values(cone: Cone) -> tuple[dict[fx.Node, Any], Tensor]:
    """Random weights and tokens; those also as rows."""
    generator = torch.Generator("cpu").manual_seed(0)
    dtype = torch.float64 if tensor_of(cone.source).dtype == torch.float64 else torch.float32
    values: dict[fx.Node, Any] = {}
    for node in (cone.source, *cone.leaves):
        if not is_tensor(node):
            raise ValueError(f"it reads the size {node.name}")
        shape = shape_where_symbols_are(node, _TOKENS)
        drawn = torch.randn(shape, generator=generator, dtype=dtype, device="cpu")
        values[node] = drawn * (shape[-1] ** -0.5)
    values[cone.source] *= tensor_of(cone.source).shape[-1] ** 0.5
    return values, values[cone.source].flatten(0, -2)


def _replace(match: _Match) -> None:
    names = ("shared_gate", "shared_up", "shared_down")
    experts = match.experts
    experts.args, experts.kwargs = with_arguments(experts, **dict(zip(names, match.weights)))
    set_example_value(experts, fake_mode_of(experts))
    match.sum.replace_all_uses_with(match.routed)
