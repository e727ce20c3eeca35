"""Fuse an RMSNorm, and the addition before it, into one launch.

    before                                              after

    x ─┬─> + ─┬─> RMSNorm ─> linear                     x ─> fused_add_rms_norm ─┬─> linear
    y ─┘      └──────────────────────>                  y ─┘                     └──────────>

Norms are calls of torch's function, or written out as in transformers: cast, square, mean, epsilon, root, product,
cast. A weight that multiplies next is part of the norm. Inductor compiles a norm to two launches and computes the
addition in both. The op also has a fixed order of the sum, independent of the nodes around it.

The op must have a kernel: on the CPU, Inductor fuses norms with the nodes around them. And the replaced results must be
contiguous, as the op's are: others would need a copy.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from mla_compile.ops.dispatch import first_serves
from mla_compile.ops.norm.rms_norm import RMS_NORM, add_rms_norm_op, rms_norm_op
from mla_compile.passes.effects import at_once, mutates
from mla_compile.passes.emit import inline, replace_uses
from mla_compile.passes.nodes import (
    arguments,
    function_name,
    is_tensor,
    only_user,
    tensor_of,
    torch_name,
    value_of,
)
from mla_compile.passes.rewrite import rewrite
from mla_compile.passes.strides import is_in_order, laid_out_as, same_sizes
from mla_compile.torch_internals import is_wrapper, statically_known_true


@dataclass(frozen=True)
class _Norm:
    """The norm of `source`, with a weight or None. Of the `nodes` that compute it, the first reads `source` and the
    last is the result."""

    source: fx.Node
    weight: fx.Node | None
    eps: float
    nodes: tuple[fx.Node, ...]


def fuse_rms_norm(
    gm: fx.GraphModule, example_inputs: Sequence[Any] = (), *, require_kernel: bool = True
) -> fx.GraphModule:
    """Rewrite `gm` in place and return it; a graph without norms that can be fused is left untouched.

    require_kernel: fuse only if the op has a kernel and the results are contiguous.

    Raises:
        MLAError: `require_kernel` is False and a norm needs a gradient, which the op does not have.
    """

    def fuse(node: fx.Node) -> str | None:
        norm = _match(node)
        if norm is None or not (not require_kernel or _pays(norm)):
            return None
        add = _addition_before(norm)
        _replace(norm, add)
        return f"RMSNorm with eps {norm.eps:g}{'' if add is None else ', and +'}"

    # Each norm is matched at its own `mean` or call, so no node is replaced twice.
    rewrite(gm.graph, lambda node: function_name(node) in ("rms_norm", "mean"), fuse)
    return gm


def _pays(norm: _Norm) -> bool:
    """Whether the op has a kernel, and the replaced result is contiguous and needs no gradient, as the op's result."""
    x, normed = tensor_of(norm.source), tensor_of(norm.nodes[-1])
    plain = not normed.requires_grad and is_in_order(normed)
    return plain and first_serves(RMS_NORM, x, columns=x.shape[-1])


def _match(node: fx.Node) -> _Norm | None:
    """The norm whose mean of squares, or whose call of torch's function, is `node`."""
    norm = _called(node) if function_name(node) == "rms_norm" else _written_out(node)
    if norm is None:
        return None
    x = tensor_of(norm.source)
    if is_wrapper(x) or not x.is_floating_point() or statically_known_true(x.shape[-1] == 0):
        return None
    return _weighted(norm)


def _called(node: fx.Node) -> _Norm | None:
    """The norm of a call of `rms_norm` over the last dimension."""
    given = arguments(node, ("input", "normalized_shape", "weight", "eps"))
    if given is None or not is_tensor(given["input"]) or len(given["normalized_shape"]) != 1:
        return None
    source, weight, eps = given["input"], given.get("weight"), given.get("eps")
    x = tensor_of(source)
    if not _fits(weight, x) or tensor_of(node).dtype != x.dtype:  # autocast
        return None
    if eps is None:  # as in torch: the epsilon of the dtype of the computation
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    elif isinstance(eps, fx.Node):  # not a constant
        return None
    return _Norm(source, weight, eps, (node,))


def _written_out(mean: fx.Node) -> _Norm | None:
    """The norm as transformers writes it: `x.float()`, `pow(2)`, `mean(-1)`, `+ eps`, `rsqrt`, the product, a cast.

    From the mean on, each step is the only user of the one before.
    """
    given = arguments(mean, ("input", "dim", "keepdim", "dtype"))
    if given is None or given.get("dim") not in (-1, [-1], (-1,)) or given.get("dtype") is not None:
        return None
    square: Any = given["input"]
    if torch_name(square) != "pow" or square.args[1:] != (2,):
        return None
    wide, add = square.args[0], _only_user(mean, "add")
    rsqrt = None if add is None else _only_user(add, "rsqrt")
    product = None if rsqrt is None else _only_user(rsqrt, "mul")
    if add is None or product is None or not isinstance(wide, fx.Node) or wide not in product.args:
        return None
    if add.kwargs:  # alpha
        return None
    eps = [number for number in add.args if isinstance(number, float)]
    source: Any = wide.args[0] if torch_name(wide) in ("to", "float") else wide
    normed = product if source is wide else _only_user(product, "to")
    if not is_tensor(source) or normed is None or len(eps) != 1:
        return None
    x = tensor_of(source)
    accumulated = torch.promote_types(x.dtype, torch.float32)
    if [tensor_of(node).dtype for node in (wide, mean, normed)] != [accumulated, accumulated, x.dtype]:
        return None
    if not x.device == tensor_of(wide).device == tensor_of(normed).device:
        return None
    kept = tensor_of(mean).shape
    if not kept or len(kept) != x.dim() or not statically_known_true(kept[-1] == 1):
        return None
    steps = [wide, square, mean, add, rsqrt, product, normed]
    nodes = tuple(dict.fromkeys(step for step in steps if step is not source))
    # Other nodes may use the cast and the square, and write to them. A step with an `out` argument writes to that.
    if any(map(mutates, nodes)) or not at_once(nodes[0], nodes[-1], [wide, square]):
        return None
    return _Norm(source, None, eps[0], nodes)


def _only_user(node: fx.Node, name: str) -> fx.Node | None:
    """The only user, if it calls torch's function or a method of this name."""
    user = only_user(node)
    return user if user is not None and torch_name(user) == name else None


def _weighted(norm: _Norm) -> _Norm:
    """The norm with the weight of the product that follows, if that is its only user and the weight exists before the
    norm begins; otherwise the norm unchanged."""
    begin, end = norm.nodes[0], norm.nodes[-1]
    user = only_user(end)
    if norm.weight is not None or user is None or user.target not in (operator.mul, torch.mul):
        return norm
    others: list[Any] = [other for other in user.args if other is not end]
    if len(user.args) != 2 or user.kwargs or len(others) != 1 or not is_tensor(others[0]):
        return norm
    (weight,) = others
    if not weight < begin or not _fits(weight, tensor_of(end)) or not at_once(begin, user, [weight]):
        return norm
    return _Norm(norm.source, weight, norm.eps, (*norm.nodes, user))


def _fits(weight: Any, x: Tensor) -> bool:
    """Whether the op accepts a weight for `x`; torch's product must have the dtype of `x`."""
    if weight is None:
        return True
    value = value_of(weight)
    if not isinstance(value, Tensor) or is_wrapper(value) or value.dim() != 1:
        return False
    keeps_dtype = torch.promote_types(value.dtype, x.dtype) == x.dtype
    return keeps_dtype and statically_known_true(value.shape[0] == x.shape[-1])


def _addition_before(norm: _Norm) -> fx.Node | None:
    """The addition of two tensors of equal shape and dtype before a norm, if the norm can be computed at its place."""
    add: Any = norm.source
    if torch_name(add) != "add" or len(add.args) != 2 or add.kwargs or not all(map(is_tensor, add.args)):
        return None
    total, *parts = (tensor_of(node) for node in (add, *add.args))
    if not is_in_order(total):
        return None
    for part in parts:
        if part.dtype != total.dtype or part.device != total.device or not same_sizes(part, total):
            return None
    read = [add]
    if norm.weight is not None:
        read.append(norm.weight)
        if not norm.weight < add:
            return None
    return add if at_once(add, norm.nodes[0], read) else None


def _replace(norm: _Norm, add: fx.Node | None) -> None:
    replaced = tensor_of(norm.nodes[-1])

    def emit(x: Any, residual: Any, weight: Any) -> Any:
        if norm.weight is not None and tensor_of(norm.weight).dtype != replaced.dtype:
            weight = weight.to(replaced.dtype)
        if residual is None:
            normed, total = rms_norm_op(_as_matrix(x), weight, norm.eps), None
        else:
            normed, total = add_rms_norm_op(_as_matrix(x), _as_matrix(residual), weight, norm.eps)
            total = total.reshape(x.shape)
        normed = normed.reshape(x.shape)
        return normed if is_in_order(replaced) else laid_out_as(replaced, normed), total

    # The grad mode of the replaced node, not the current one: the op raises an error if it would drop a gradient.
    with torch.set_grad_enabled(replaced.requires_grad):
        if add is None:
            normed, _ = inline(norm.nodes[0], emit, (norm.source, None, norm.weight))
        else:
            normed, total = inline(add, emit, (*add.args, norm.weight))
            replace_uses(add, total)
    replace_uses(norm.nodes[-1], normed)


def _as_matrix(x: Any) -> Any:
    return x if len(x.shape) == 2 else x.reshape(-1, x.shape[-1])
