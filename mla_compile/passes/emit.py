"""Writing graph nodes by calling ordinary functions: run a torch function on proxies and its calls become nodes."""

import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.fx.proxy import GraphAppendingTracer, Proxy

from mla_compile.passes.nodes import value_of, values_of, with_arguments

_SHARED = (torch.cat, torch.ops.aten.sym_size.int)
"""Emitted once per pass and argument list: every layer needs the same sizes and the same joined slots."""


class _GraphProxy(Proxy):
    """A proxy whose `shape` has a Python int for each static size and a `sym_size` node for each dynamic one."""

    @property
    def shape(self) -> tuple[Any, ...]:
        sizes = value_of(self.node).shape
        return tuple(
            size if isinstance(size, int) else torch.ops.aten.sym_size.int(self, dim)
            for dim, size in enumerate(sizes)
        )


class _Emitter(GraphAppendingTracer):
    """Gives every new node its `example_value` and the provenance of the node that it replaces."""

    def __init__(self, origin: fx.Node, shared: dict[Any, fx.Node]) -> None:
        super().__init__(origin.graph)
        self.origin, self.shared = origin, shared
        self.emitted: list[fx.Node] = []

    def proxy(self, node: fx.Node) -> Proxy:
        return _GraphProxy(node, self)

    def wrap(self, value: Any) -> Any:
        return self.proxy(value) if isinstance(value, fx.Node) else value

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any
    ) -> fx.Node:
        key = (target, repr(args), repr(kwargs)) if target in _SHARED else None
        if key in self.shared:
            return self.shared[key]
        node = super().create_node(kind, target, args, kwargs, *rest, **named)
        copy_provenance(self.origin, node)
        set_example_value(node, fake_mode_of(self.origin))
        self.emitted.append(node)
        if key is not None:
            self.shared[key] = node
        return node


def _unwrap(value: Any) -> Any:
    return value.node if isinstance(value, Proxy) else value


def fake_mode_of(node: fx.Node) -> Any:
    """The fake mode of the node's value, or of its first input's value if it has none (an append).
    `detect_fake_mode` may find a different mode."""
    value: Any = values_of(node)[0]
    return fake_mode_of(node.all_input_nodes[0]) if value is None else value.fake_mode


def fake_mode_in(graph: fx.Graph) -> Any:
    """The fake mode of the first fake tensor in a graph; None if there is no such tensor."""
    values = (value for node in graph.nodes for value in values_of(node))
    return next((value.fake_mode for value in values if hasattr(value, "fake_mode")), None)


def copy_provenance(source: fx.Node, node: fx.Node) -> None:
    """Copy the stack traces and module paths of `source`: errors and profiles then name the user's line."""
    for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
        if key in source.meta:
            node.meta[key] = source.meta[key]


def set_example_value(node: fx.Node, fake_mode: Any = None) -> None:
    """Compute `node.meta["example_value"]`; without it AOTAutograd bypasses its cache.

    fake_mode: by default that of the node.
    """
    node.meta["example_value"] = example_value(node, fake_mode or fake_mode_of(node))


def change_arguments(node: fx.Node, **changed: Any) -> None:
    """Change some arguments of an op's call, and compute its example value again."""
    node.args, node.kwargs = with_arguments(node, **changed)
    set_example_value(node)


def example_value(
    node: fx.Node, fake_mode: Any, instead: Mapping[fx.Node, Any] = MappingProxyType({})
) -> Any:
    """The result of a node for the example values of its arguments.

    instead: nodes whose values replace their example values.
    """
    args, kwargs = fx.map_arg(
        (node.args, node.kwargs), lambda n: instead[n] if n in instead else n.meta["example_value"]
    )
    with fake_mode:
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target), f"cannot run {node.format_node()}"
        return node.target(*args, **kwargs)


def replace_uses(old: fx.Node, new: fx.Node) -> None:
    """Replace `old` with `new` and keep the example value of `old`, with which its views share memory."""
    new.meta["example_value"] = value_of(old)
    old.replace_all_uses_with(new)


def replace_results(call: fx.Node, results: Sequence[fx.Node | None]) -> None:
    """Replace the results of a call that returns several; None for an unused result."""
    for user in call.users:
        result = results[user.args[1]]  # type: ignore[index]
        if result is not None:
            replace_uses(user, result)


def inline(
    origin: fx.Node, function: Callable[..., Any], args: Any, shared: dict[Any, fx.Node] | None = None
) -> Any:
    """Emit `function(*args)` before `origin`, with its provenance; the function gets proxies for nodes of `args`.

    Returns the function's result with nodes for proxies. `shared` keeps nodes that later calls may reuse.
    """
    graph = origin.graph
    emitter = _Emitter(origin, {} if shared is None else shared)
    with graph.inserting_before(origin):
        result: Any = function(*fx.node.map_aggregate(args, emitter.wrap))
    nodes = fx.node.map_aggregate(result, _unwrap)
    returned = nodes if isinstance(nodes, (tuple, list)) else (nodes,)
    for node in reversed(emitter.emitted):
        if node.target is operator.getitem and not node.users and node not in returned:
            graph.erase_node(node)  # unpacked by the function, but not used
    return nodes
