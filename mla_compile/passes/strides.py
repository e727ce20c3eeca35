"""Who counts on how a tensor lies in memory: whether part of a wider tensor may stand in its place."""

from typing import Any

from torch import Tensor, fx

from mla_compile.passes.effects import memory, mutates
from mla_compile.passes.emit import example_value, fake_mode_of
from mla_compile.passes.nodes import flat, function_name, namespace_of
from mla_compile.torch_internals import (
    overload_of,
    size_where_symbols_are,
    statically_known_true,
    storage_key,
)


def is_contiguous(x: Tensor) -> bool:
    """Whether it is known to be; `x.is_contiguous()` asks whether an unknown size is 0."""
    step: Any = 1
    for size, stride in zip(reversed(x.shape), reversed(x.stride())):
        if not statically_known_true(size == 1) and not statically_known_true(stride == step):
            return False
        step = step * size
    return True


def is_in_order(x: Tensor) -> bool:
    """Whether `x`, a result and so dense, is contiguous whatever its sizes are."""
    return _order(x) == list(range(x.dim()))


def laid_out_as(replaced: Tensor, x: Any) -> Any:
    """`x` without gaps and with the order of dimensions in memory of what it replaces: a later `view` counts on it."""
    order = _order(replaced)
    return x.permute(order).contiguous().permute([order.index(dim) for dim in range(len(order))])


def _order(x: Tensor) -> list[int]:
    """The dimensions of `x`, the outermost in memory first; asking adds no guard."""
    return sorted(range(x.dim()), key=lambda dim: -size_where_symbols_are(x.stride(dim), 2**10))


def views_of(node: fx.Node, part: Tensor) -> list[fx.Node] | fx.Node:
    """The views of a node's tensor, each behind what it is a view of, if they would be views of `part` too.

    Else a node that takes the tensor and may give something else for `part`.

    part: a tensor of the same shape, part of a wider one.
    """
    values: dict[fx.Node, Any] = {node: part}
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if not _takes_any_strides(user):
                return user
            if memory([user]).isdisjoint(memory([node])):
                continue  # a result of its own
            try:
                value = example_value(user, fake_mode_of(user), values)
            except Exception:  # whatever torch says of strides
                return user
            if {storage_key(x) for x in flat(value) if isinstance(x, Tensor)} != {storage_key(part)}:
                return user
            values[user] = value
            pending.append(user)
    return list(values)[1:]


def _takes_any_strides(node: fx.Node) -> bool:
    """Whether a node computes the same of tensors with any strides, or fails: ops of ours do, and functions of torch
    that write nothing."""
    namespace = namespace_of(overload_of(node.target))
    if namespace == "mla_compile":
        return True
    name = function_name(node)
    of_torch = bool(name) and namespace in (None, "aten", "prims")
    return of_torch and not mutates(node) and not name.startswith("as_strided")
