"""Regional compilation of a graph that Dynamo traced whole: layers that repeat are compiled once.

    graph     before | layer | layer | layer | ... | after
    Inductor  before | layer |                     | after
    result    calls the compiled layer once for each repetition, with its own weights and caches

Nodes repeat if they do the same with values of the same sizes, strides and dtypes. Of the 4,160 nodes of
GLM-4.7-Flash's decode step, 86 repeat 46 times, and Inductor takes as long for one time as for the other 204.
"""

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn

from mla_compile.passes.effects import may_write, memory, mutates
from mla_compile.passes.nodes import namespace_of, op_name, value_of
from mla_compile.torch_internals import is_plain, storage_key, symbols_of, symbols_read_from

LEAST_TIMES = 4
"""Fewest repetitions that are compiled once. Each one costs a call, some 50 us on the host."""
MOST_CALLS = 4
"""Calls of a step for repeated layers, where no CUDA graph has them: a part has several layers then."""
MOST_TRIES = 16
"""Places where a repetition may begin: where these do not serve, others hardly do, and a search would take seconds."""
_RESIZES = {
    *("as_strided_", "resize_", "resize_as_", "set_", "squeeze_", "swapaxes_", "swapdims_"),
    *("t_", "transpose_", "unsqueeze_"),
}
"""Methods that change the sizes of a tensor: its example value has those after the last one."""
_KNOWN_CALLS = {torch._C._set_grad_enabled, torch._C._log_api_usage_once}
"""Calls without tensors that parts leave out. Parts need no gradients, and would leave them enabled if another part
disables them. The second call counts uses of torch's features; a slice of an `nn.ModuleList` has it."""


@dataclass(frozen=True)
class Repetition:
    """Nodes that repeat: `length` of them `times` times, from number `start` on. Placeholders have no number.

    outputs: the places, within `length`, of nodes with users outside of their repetition.
    """

    start: int
    length: int
    times: int
    outputs: list[int]

    @property
    def end(self) -> int:
        return self.start + self.times * self.length


Lower = Callable[[fx.GraphModule, Sequence[Any], dict[str, Any]], Callable[..., Any]]
"""`lower_with_inductor`."""


def lower_layers_once(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: dict[str, Any], lower: Lower, captured: bool
) -> Callable[..., Any]:
    """`lower(gm, example_inputs, options)`, with one call of `lower` for all repetitions of a layer.

    gm: all of its nodes that compute something have example values, and its results need no gradients.
    captured: whether a CUDA graph has the calls of all layers. Else several layers are one part, for fewer calls.
    """
    nodes = _numbered(gm.graph)
    found = find_repetition(nodes, captured)
    if found is None:
        return lower(gm, example_inputs, options)
    result = _Assembly(gm, lambda part, examples: lower(part, examples, options))
    result.add("before", nodes[: found.start])
    for first in range(found.start, found.end, found.length):
        layer = nodes[first : first + found.length]
        result.add("layer", layer, [layer[place] for place in found.outputs])
    result.add("after", nodes[found.end :])
    return result.assembled()


class _Assembly:
    """Compiles parts of a graph, and joins their calls in its order."""

    def __init__(
        self, gm: fx.GraphModule, lower: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
    ) -> None:
        self._gm, self._lower = gm, lower
        self._parts, self._graph = nn.Module(), fx.Graph()
        self._values: dict[fx.Node, fx.Node] = {}
        """The node of the result for each node of the graph that a part has computed."""
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                self._values[node] = self._graph.placeholder(node.name)

    def add(self, name: str, nodes: list[fx.Node], outputs: list[fx.Node] | None = None) -> None:
        """Add the next nodes. A name is compiled once. outputs: by default the nodes that others use."""
        if not nodes:
            return
        if outputs is None:
            outputs = [nodes[place] for place in _used_outside(nodes)]
        inputs = _inputs(nodes)
        if not hasattr(self._parts, name):
            examples = [value_of(node) for node in inputs]
            with torch.no_grad():  # as in the whole graph, where a node may have switched to it
                compiled = self._lower(self._part(nodes, inputs, outputs), examples)
            self._parts.add_module(name, _Part(compiled))
        call = self._graph.call_module(name, tuple(map(self._values.__getitem__, inputs)))
        for i, node in enumerate(outputs):
            self._values[node] = self._graph.call_function(operator.getitem, (call, i))

    def _part(self, nodes: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]) -> fx.GraphModule:
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in inputs:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        for node in nodes:
            if node.target not in _KNOWN_CALLS:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(map(copies.__getitem__, outputs)))
        return fx.GraphModule(self._gm, graph)

    def assembled(self) -> Callable[..., Any]:
        (output,) = self._gm.graph.find_nodes(op="output")
        self._graph.output(fx.node.map_arg(output.args[0], self._values.__getitem__))
        # It lets go of each value after its last use.
        call: Callable[..., Any] = fx.GraphModule(self._parts, self._graph).forward
        return call


class _Part(nn.Module):
    """A compiled part, as a module that a graph can call."""

    def __init__(self, compiled: Callable[..., Any]) -> None:
        super().__init__()
        self._compiled = compiled

    def __call__(self, *inputs: Any) -> Any:
        return self._compiled(*inputs)


def find_repetition(nodes: list[fx.Node], captured: bool) -> Repetition | None:
    """The repetition that holds most of the nodes: at least half of them, `LEAST_TIMES` times.

    It begins where the fewest values are alive: between two layers that is the hidden state. A layer has an op of this
    package: repetitions without one may be so short that their calls would cost more than they do.
    """
    modes = {node.target for node in nodes if mutates(node) and not node.all_input_nodes}
    if modes - _KNOWN_CALLS:
        return None  # autocast, for example, which a part would not know of
    if any(op_name(node).partition(".")[0] in _RESIZES for node in nodes):
        return None
    last_use = _last_uses(nodes)
    stretches = [
        (start, end, length)
        for start, end, length in _stretches(list(map(_described, nodes)))
        if 2 * (end - start) >= len(nodes)
        and any(namespace_of(node.target) == "mla_compile" for node in nodes[start : start + length])
    ]
    for start, end, length in sorted(stretches, key=lambda found: (found[0] - found[1], found[2])):

        def num_alive(border: int) -> int:
            return sum(last >= border for last in last_use[:border])

        borders = sorted(range(start, start + length), key=lambda at: (num_alive(at + length), at))
        for first in borders[:MOST_TRIES]:
            times = (end - first) // length
            for skipped in (0, 1):  # the first layer may get a value of another kind
                at, fewer = first + skipped * length, times - skipped
                if fewer < LEAST_TIMES or 2 * fewer * length < len(nodes):
                    continue
                calls = fewer if captured else _fewest_layers(fewer)
                of_call = fewer // calls * length
                if (outputs := _outputs(nodes, at, of_call, calls)) is not None:
                    return Repetition(at, of_call, calls, outputs)
    return None


def _fewest_layers(times: int) -> int:
    """The number of calls with the fewest layers to compile: those of a call, and those that remain."""
    return min(range(MOST_CALLS, 1, -1), key=lambda calls: times // calls + times % calls)


def _stretches(kinds: list[str]) -> Iterator[tuple[int, int, int]]:
    """Where kinds repeat: the start and end of each stretch, and its period."""
    places: dict[str, list[int]] = {}
    for place, kind in enumerate(kinds):
        places.setdefault(kind, []).append(place)
    gaps = Counter(b - a for found in places.values() for a, b in pairwise(found))
    for period in [gap for gap, count in gaps.items() if count >= LEAST_TIMES - 1]:
        start = 0
        for place in range(len(kinds) - period + 1):
            if place == len(kinds) - period or kinds[place] != kinds[place + period]:
                if place + period - start >= LEAST_TIMES * period:
                    yield start, place + period, period
                start = place + 1


def _outputs(nodes: list[fx.Node], start: int, length: int, times: int) -> list[int] | None:
    """`Repetition.outputs` of nodes whose `_described` repeats; None if they do not do the same with each other's
    values and with their inputs, or parts of the graph cannot be compiled apart."""
    end, wiring, outputs = start + times * length, None, set[int]()
    if not _is_apart(nodes[:start]) or not _is_apart(nodes[end:]):
        return None
    for first in range(start, end, length):
        layer = nodes[first : first + length]
        wiring = wiring or _wiring(layer)
        if wiring != _wiring(layer) or not _is_apart(layer):
            return None
        outputs.update(_used_outside(layer))
    return sorted(outputs)


def _is_apart(nodes: list[fx.Node]) -> bool:
    """Whether Inductor can compile nodes apart: what is passed is plain tensors and sizes, inputs have all symbols, and
    none shares memory that is written or gets a gradient by a write."""
    inputs = list(map(value_of, _inputs(nodes)))
    passed = [*inputs, *(value_of(nodes[place]) for place in _used_outside(nodes))]
    if not all(isinstance(value, Tensor | int | float | torch.SymInt) for value in passed):
        return False
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    memory_of_inputs = list(map(storage_key, tensors))
    written = memory(target for node in nodes for target in may_write(node))
    return not (
        any(isinstance(value, Tensor) and not is_plain(value) for value in passed)
        or any(value.requires_grad and key in written for value, key in zip(tensors, memory_of_inputs))
        or any(memory_of_inputs.count(key) > 1 for key in written)
        or set[Any]().union(*map(_symbols, inputs)) - set[Any]().union(*map(symbols_read_from, inputs))
    )


def _wiring(nodes: list[fx.Node]) -> tuple[list[int], list[Any], list[int]]:
    """Which of each other's values and of their inputs nodes use, and what inputs are; one code serves two layers of
    the same nodes if these are equal."""
    inputs, used = _inputs(nodes), list[int]()
    numbers = {node: number for number, node in enumerate([*nodes, *inputs])}
    for node in nodes:
        fx.node.map_arg((node.args, node.kwargs), lambda each: used.append(numbers[each]))
    keys = [storage_key(value) for value in map(value_of, inputs) if isinstance(value, Tensor)]
    shared = list(map(keys.index, keys))  # inputs that share memory share it in all repetitions
    return used, [_kind(value_of(node)) for node in inputs], shared


def _described(node: fx.Node) -> str:
    """What a node does, with any values: equal for two nodes if they do the same."""

    def described(value: Any) -> Any:
        return "a value" if isinstance(value, fx.Node) else str((type(value), value))

    args = fx.node.map_aggregate((node.args, node.kwargs), described)
    return str((node.op, node.target, args, _kind(value_of(node))))


def _kind(value: Any) -> Any:
    """What compiled code assumes of a value."""
    if isinstance(value, Tensor):
        layout = tuple(value.shape), value.stride(), value.storage_offset()
        return str(layout), value.dtype, value.device, value.requires_grad
    if isinstance(value, tuple | list):
        return tuple(map(_kind, value))
    return type(value), str(value)


def _numbered(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op not in ("placeholder", "output")]


def _inputs(nodes: list[fx.Node]) -> list[fx.Node]:
    """The other nodes that these use, in the order of their first use; with symbols in a size, then all of the graph's
    inputs that are numbers, since Inductor's checks of one symbol may use any other."""
    inside = set(nodes)
    used = dict.fromkeys(each for node in nodes for each in node.all_input_nodes if each not in inside)
    if any(_symbols(value_of(node)) for node in used):
        placeholders = nodes[0].graph.find_nodes(op="placeholder")
        used |= dict.fromkeys(node for node in placeholders if isinstance(value_of(node), torch.SymInt))
    return list(used)


def _symbols(value: Any) -> set[Any]:
    """The symbols in a number, or in a tensor's layout."""
    numbers = [value]
    if isinstance(value, Tensor):
        numbers = [*value.shape, *value.stride(), value.storage_offset()]
    return set[Any]().union(*map(symbols_of, numbers))


def _used_outside(nodes: list[fx.Node]) -> list[int]:
    """The places of those that other nodes use."""
    inside = set(nodes)
    return [place for place, node in enumerate(nodes) if not node.users.keys() <= inside]


def _last_uses(nodes: list[fx.Node]) -> list[int]:
    """The number of the last node that uses each one; the graph's output comes after all."""
    numbers = {node: number for number, node in enumerate(nodes)}
    return [max((numbers.get(user, len(nodes)) for user in node.users), default=-1) for node in nodes]
