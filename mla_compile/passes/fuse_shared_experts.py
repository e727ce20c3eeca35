"""Fuse the shared experts into `moe_experts`.

    before                                              after

    x ─┬─> moe_experts ──────────────────┐              x ─> moe_experts(shared experts)
       └─> gate, up ─> silu, * ─> down ──┴─> +

Every token uses all shared experts, so they become additional tiles of the existing launches. That saves four launches,
and their weights are read while the routed experts' are. The sum is rounded once.

The pass recognises the shared experts by what they compute. It cuts out the operations between the input of
`moe_experts` and the other summand (`cone.py`), runs them on random tokens, and compares the results with the formula.

The op must have a kernel, and either all weights or none must be FP8. `TORCH_LOGS="+mla_compile"` logs each fusion, and
the reason for each layer that was left.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import fx

from mla_compile.ops.dispatch import first_serves
from mla_compile.ops.experts.moe import MOE_EXPERTS, moe_experts_op, shared_fits
from mla_compile.passes.cone import Recognition, cut
from mla_compile.passes.effects import writer_between
from mla_compile.passes.emit import change_arguments
from mla_compile.passes.nodes import is_call, is_tensor, only_user, op_arguments, tensor_of, torch_name
from mla_compile.passes.recognise import mlp
from mla_compile.passes.rewrite import Refusal, first_match, rewrite

_VIEWS = ("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze")


def fuse_shared_experts(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> fx.GraphModule:
    """Rewrite `gm` in place and return it; a graph without shared experts is left untouched."""
    known = Recognition()
    rewrite(
        gm.graph,
        lambda node: is_call(node, moe_experts_op) and _pays(node),
        lambda experts: _fuse(experts, known),
    )
    return gm


def _pays(experts: fx.Node) -> bool:
    """Whether the op has a kernel."""
    is_fp8 = op_arguments(experts)["down_scale"] is not None
    return first_serves(MOE_EXPERTS[int(is_fp8) :], tensor_of(experts))  # the second candidate is for FP8


def _fuse(experts: fx.Node, known: Recognition) -> str:
    """Pass the weights of the shared experts to the call of routed experts that their result is added to."""
    given = op_arguments(experts)
    if given["shared_gate"] is not None:
        raise Refusal("it has shared experts already")
    routed, total = experts, only_user(experts)
    while total is not None and torch_name(total) in _VIEWS:
        routed, total = total, only_user(total)
    if total is None or torch_name(total) != "add" or len(total.args) != 2 or total.kwargs:
        raise Refusal("its result is not one of two summands")
    other: Any = total.args[total.args[0] is routed]
    if not is_tensor(other) or other.users.keys() != {total}:
        raise Refusal("the other summand is not a tensor, or has other users")
    value = tensor_of(routed)
    if (tensor_of(other).shape, tensor_of(other).dtype) != (value.shape, value.dtype):
        raise Refusal("the other summand has another shape or dtype")
    formula = partial(mlp, intermediate=tensor_of(given["w_down"]).shape[2])

    def weights_of(source: fx.Node) -> list[fx.Node]:
        cone = cut(source, other)
        weights = [cone.tensors[i] for i in known.of(formula, cone)]
        _check(experts, total, weights, [source, *weights], {*cone.nodes})
        return weights

    sources = (source for source in _before_views(given["x"]) if source < other)
    weights = first_match(sources, weights_of, "the other summand is computed from something else")
    names = [f"shared_{name}{suffix}" for suffix in ("", "_scale") for name in ("gate", "up", "down")]
    change_arguments(experts, **dict(zip(names, weights, strict=False)))
    total.replace_all_uses_with(routed)
    return f"{tensor_of(weights[0]).shape[0]} columns of shared experts"


def _check(
    experts: fx.Node, total: fx.Node, weights: list[fx.Node], read: list[fx.Node], nodes: set[fx.Node]
) -> None:
    """Raises `Refusal` if the op does not support these weights, or if a node of `read` is computed or written too
    late. The input is the first of these; `nodes` compute the shared experts."""
    w_down, is_fp8 = op_arguments(experts)["w_down"], len(weights) == 6
    if is_fp8 != (op_arguments(experts)["down_scale"] is not None):
        raise Refusal("only one of routed and shared experts has FP8 weights")
    if is_fp8 and not shared_fits(tensor_of(weights[0]), tensor_of(w_down)):
        raise Refusal("a block of FP8 weights belongs to two shared experts")
    late = next((node for node in weights if node > experts), None)
    late = late or writer_between(read[0], total, read, nodes)
    if late is not None:
        raise Refusal(f"`{late.name}` makes or writes to a tensor of the shared experts in between")


def _before_views(x: fx.Node) -> Iterator[fx.Node]:
    """A node and the nodes that it is a view of, as long as their last dimension is the same."""
    yield x
    while torch_name(x) in _VIEWS and is_tensor(x.args[0]):
        before: Any = x.args[0]
        if tensor_of(before).shape[-1] != tensor_of(x).shape[-1]:
            return
        yield before
        x = before
