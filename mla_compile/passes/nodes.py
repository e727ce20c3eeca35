"""Accessors of a node of a Dynamo graph: what it calls, with which arguments, and its example value.

Passes read arguments by name, so positional, keyword and default arguments are the same to them. An op's schema has the
names of its arguments; torch functions have no schema, so the caller passes their names.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from mla_compile.torch_internals import overload_of, schema_arguments

_NUMPYS = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input", "x2": "other"}
"""NumPy's names that torch accepts for its own arguments; Dynamo leaves them in the graph."""
_PROPERTIES: dict[Any, str] = {
    torch.ops.aten.numpy_T: "T",
    torch.ops.aten.mT: "mT",
    torch.ops.aten.matrix_H: "H",
    torch.ops.aten.mH: "mH",
}
"""The ops that Dynamo of torch 2.14 emits for a tensor's properties; older versions emit calls of `getattr`."""


# --- what a node calls


def is_call(node: fx.Node, *ops: Any) -> bool:
    """Whether a node calls one of these ops, with the overload chosen or left open."""
    return node.op == "call_function" and overload_of(node.target) in ops


def calls(graph: fx.Graph, *ops: Any) -> list[fx.Node]:
    """Every call of one of these ops, in order."""
    return [node for node in graph.nodes if is_call(node, *ops)]


def call_of_result(node: fx.Node, index: int, op: Any) -> fx.Node | None:
    """The call of `op` whose result number `index` is this node; None for any other node."""
    if node.target is not operator.getitem or node.args[1] != index:
        return None
    call: Any = node.args[0]
    return call if is_call(call, op) else None


def only_user(node: fx.Node) -> fx.Node | None:
    """The only user of a node; None if there are several or none."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def op_name(node: fx.Node) -> str:
    """The name of what a node calls, for messages: `mla_decode`, `linear`, `view`."""
    if isinstance(node.target, str):
        return node.target
    return str(getattr(node.target, "__name__", node.target)).removesuffix(".default")


def torch_name(node: fx.Node) -> str:
    """`transpose` for `x.transpose(0, 1)` and `torch.transpose(x, 0, 1)`, `mT` for `x.mT`; empty for other functions
    than torch's."""
    if node.op == "call_method":
        return str(node.target)
    if node.target is getattr:
        return str(node.args[1])
    if (name := _PROPERTIES.get(node.target)) is not None:
        return name
    module = getattr(node.target, "__module__", None) or "torch"
    ours = module.split(".")[0] in ("torch", "_operator", "builtins") and not module.startswith("torch._ops")
    return getattr(node.target, "__name__", "") if node.op == "call_function" and ours else ""


def namespace_of(target: Any) -> str | None:
    """The library of an op: `aten`, `mla_compile`; None for any other target."""
    if hasattr(target, "overloads"):  # with the overload left open
        return str(target).partition(".")[0]
    return getattr(target, "namespace", None)


def function_name(node: fx.Node) -> str:
    """The function or method of torch, or the op of aten, that a node calls: `linear`, `matmul`, `sum`."""
    if node.op == "call_function" and namespace_of(overload_of(node.target)) is not None:
        return str(getattr(node.target, "__name__", "")).partition(".")[0]
    name = torch_name(node).strip("_").removeprefix("special_")
    return "matmul" if name == "linalg_matmul" else name


# --- with which arguments


def op_arguments(node: fx.Node) -> dict[str, Any]:
    """All arguments of an op's call by the names of its schema, in its order; defaults for those left out."""
    schema = schema_arguments(node.target)
    given = dict(zip((argument.name for argument in schema), node.args)) | node.kwargs
    return {argument.name: given.get(argument.name, argument.default_value) for argument in schema}


def with_arguments(node: fx.Node, **changed: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`args` and `kwargs` of an op's call with some arguments changed."""
    values = op_arguments(node)
    assert changed.keys() <= values.keys(), f"{node.target} has no {changed.keys() - values.keys()}"
    values |= changed
    by_name = {argument.name for argument in schema_arguments(node.target) if argument.kwarg_only}
    args = tuple(value for name, value in values.items() if name not in by_name)
    return args, {name: value for name, value in values.items() if name in by_name}


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """The argument of a torch function at this position or with this name."""
    if len(node.args) > position:
        return node.args[position]
    return _named(node).get(name, default)


def arguments(node: fx.Node, names: Sequence[str]) -> dict[str, Any] | None:
    """The arguments of a torch function by name; `names` are those of its positions. None if `names` lacks one."""
    named = _named(node)
    if len(node.args) > len(names) or not set(names) >= set(named):
        return None
    return dict(zip(names, node.args)) | named


def _named(node: fx.Node) -> dict[str, Any]:
    return {_NUMPYS.get(name, name): value for name, value in node.kwargs.items()}


# --- its example value


def has_value(node: fx.Node) -> bool:
    """Whether the value is known at compile time. The value of a call for its effect only is None."""
    return "example_value" in node.meta


def value_of(node: fx.Node) -> Any:
    """The example value: a fake tensor, a tuple of them, a number; None if there is none."""
    return node.meta.get("example_value")


def values_of(node: fx.Node) -> list[Any]:
    """The example value, or every element of a tuple."""
    return flat(value_of(node))


def flat(value: Any) -> list[Any]:
    """The value as a list, or the elements of a tuple and of the tuples in it."""
    return [v for part in value for v in flat(part)] if isinstance(value, (tuple, list)) else [value]


def is_tensor(node: Any) -> bool:
    """Whether an argument is a node whose value is one tensor."""
    return isinstance(node, fx.Node) and isinstance(value_of(node), Tensor)


def tensor_of(node: fx.Node) -> Tensor:
    """The node's example tensor, or the first one of a tuple."""
    value = next((value for value in values_of(node) if isinstance(value, Tensor)), None)
    assert value is not None, f"{node.name} is not a tensor"
    return value
