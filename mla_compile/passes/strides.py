"""Which nodes depend on a tensor's strides: whether a part of a wider tensor may replace it."""

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
    """Whether `x` is known to be contiguous; `x.is_contiguous()` would test whether an unbacked size is 0."""
    step: Any = 1
    for size, stride in zip(reversed(x.shape), reversed(x.stride())):
        if not statically_known_true(size == 1) and not statically_known_true(stride == step):
            return False
        step = step * size
    return True


def same_sizes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are known to have the same sizes."""
    pairs = zip(one.shape, other.shape)
    return one.dim() == other.dim() and all(statically_known_true(a == b) for a, b in pairs)


def is_in_order(x: Tensor) -> bool:
    """Whether `x`, a dense result, is contiguous for all values of its sizes."""
    return _order(x) == list(range(x.dim()))


def laid_out_as(replaced: Tensor, x: Any) -> Any:
    """`x` made dense, in the dimension order of the tensor that it replaces: a later `view` may depend on it."""
    order = _order(replaced)
    return x.permute(order).contiguous().permute([order.index(dim) for dim in range(len(order))])


def _order(x: Tensor) -> list[int]:
    """The dimensions of `x`, the outermost in memory first; asking adds no guard."""
    return sorted(range(x.dim()), key=lambda dim: -size_where_symbols_are(x.stride(dim), 2**10))


def views_of(node: fx.Node, part: Tensor) -> list[fx.Node] | fx.Node:
    """The views of a node's tensor, each after its base, if they would also be views of `part`.

    Otherwise a node that reads the tensor and may return another result for `part`.

    part: a tensor of the same shape, part of a wider one.
    """
    values: dict[fx.Node, Any] = {node: part}
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if not _takes_any_strides(user):
                return user
            if memory([user]).isdisjoint(memory([node])):
                continue  # not a view
            try:
                value = example_value(user, fake_mode_of(user), values)
            except Exception:  # any error of torch about strides
                return user
            if {storage_key(x) for x in flat(value) if isinstance(x, Tensor)} != {storage_key(part)}:
                return user
            values[user] = value
            pending.append(user)
    return list(values)[1:]


def _takes_any_strides(node: fx.Node) -> bool:
    """Whether a node has the same result for tensors of any strides, or fails: our ops, and torch functions that do
    not write in place."""
    namespace = namespace_of(overload_of(node.target))
    if namespace == "mla_compile":
        return True
    name = function_name(node)
    of_torch = bool(name) and namespace in (None, "aten", "prims")
    return of_torch and not mutates(node) and not name.startswith("as_strided")
