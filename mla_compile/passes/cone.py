"""The part of a graph that computes one tensor from another, cut out and run on random tensors.

A pass recognises a computation in any spelling by comparing it with a formula. It `cut`s a cone, and `Recognition`
tries a formula on it: the formula draws values (`draw`), runs the cone on them (`Cone.run`) and checks whether the
results `agree`. The user's tensors are never read: shapes and dtypes are those of the example values, and symbolic
sizes get a number.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from mla_compile.ops.dispatch import HALF
from mla_compile.passes.effects import between, may_write, memory
from mla_compile.passes.nodes import has_value, is_tensor, op_name, tensor_of, value_of, values_of
from mla_compile.passes.rewrite import Refusal
from mla_compile.torch_internals import (
    is_mutable,
    is_wrapper,
    on_real_tensors,
    size_where_symbols_are,
    symbols_of,
)

_MAX_NODES = 64
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Cone:
    """The nodes on the paths from `source` to `result`, in order; `leaves` are the other nodes that they read."""

    source: fx.Node
    result: fx.Node
    nodes: tuple[fx.Node, ...]
    leaves: tuple[fx.Node, ...]
    fills: bool = False
    """Whether nodes may write to tensors that other nodes of the cone made."""

    @property
    def tensors(self) -> list[fx.Node]:
        """The leaves that are tensors; others are sizes."""
        return [leaf for leaf in self.leaves if is_tensor(leaf)]

    @property
    def half(self) -> torch.dtype | None:
        """The dtype of the source if it has 16 bits, whose rounding could hide a wrong formula; else None."""
        dtype = tensor_of(self.source).dtype
        return dtype if dtype in HALF else None

    @property
    def numbers(self) -> list[float]:
        """The numeric literals in the arguments of the calls."""
        found: list[float] = []

        def look(value: Any) -> Any:
            if isinstance(value, int | float) and not isinstance(value, bool):
                found.append(float(value))
            return value

        for node in self.nodes:
            fx.node.map_aggregate((node.args, node.kwargs), look)
        return list(dict.fromkeys(found))

    def check(self) -> None:
        """Raises `Refusal` if the cone cannot run on random values: writes in place, or sizes that depend on values."""
        if len(self.nodes) > _MAX_NODES:
            raise Refusal(f"there are {len(self.nodes)} operations on the way")
        inputs = (self.source, *self.leaves)
        if not all(has_value(node) for node in (*inputs, *self.nodes)):
            raise Refusal("a value on the way is unknown at compile time")
        if any(is_wrapper(tensor_of(node)) for node in (self.source, *self.tensors)):
            raise Refusal("it reads a tensor subclass")
        known = set().union(*(_symbols(node) for node in inputs))
        for node in self.nodes:
            if node.op not in ("call_function", "call_method") or is_mutable(node.target):
                raise Refusal(f"`{op_name(node)}` on the way may write in place")
            if not _symbols(node) <= known:
                raise Refusal(f"the size of `{op_name(node)}` depends on values")

    def signature(self) -> str:
        """A text that is equal for cones of the same computation."""
        named = {node: f"%{i}" for i, node in enumerate((self.source, *self.leaves, *self.nodes))}
        inputs = [_described(value_of(node)) for node in (self.source, *self.leaves)]
        calls = []
        for node in self.nodes:
            arguments = repr(fx.map_arg((node.args, node.kwargs), named.__getitem__))
            dtype = getattr(value_of(node), "dtype", None)  # autocast changes it
            calls.append((node.op, str(node.target), arguments, dtype))
        return repr((inputs, calls, named[self.result]))

    def run(self, values: Mapping[fx.Node, Any], half: torch.dtype | None = None) -> Tensor:
        """The result for values of `source` and `leaves` on the CPU.

        half: a dtype that float32 replaces in the computation.

        Raises:
            ValueError: a node writes in place without permission, or its dtype is not that of its example value (for
                example under autocast).
            Exception: any error of a node's function.
        """
        known = dict(values)

        def argument(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return known[value]
            if isinstance(value, torch.SymInt):
                raise ValueError(f"the size {value} is not a node")
            return _on_cpu(torch.float32 if half is not None and value == half else value)

        for node in self.nodes:
            kept = values if self.fills else node.all_input_nodes
            tensors = [known[n] for n in kept if isinstance(known[n], Tensor)]
            versions = [tensor._version for tensor in tensors]
            args: Any = fx.node.map_aggregate(node.args, argument)
            kwargs: Any = fx.node.map_aggregate(node.kwargs, argument)
            out = _function(node, half)(*args, **kwargs)
            if [tensor._version for tensor in tensors] != versions:
                raise ValueError(f"`{op_name(node)}` writes in place")
            example = value_of(node)
            if isinstance(example, Tensor):
                expected = torch.float32 if example.dtype == half else example.dtype
                if out.dtype != expected:
                    raise ValueError(f"`{op_name(node)}` returns {out.dtype} instead of {expected}")
            known[node] = out
        result: Tensor = known[self.result]
        return result


def cut(source: fx.Node, result: fx.Node, *, fills: bool = False) -> Cone:
    """The cone from `source` to a later `result`; it has no nodes if `result` does not depend on `source`.

    fills: include the nodes that write to tensors of the cone, even if their return values are unused.
    """
    reached = {source}
    for node in (*between(source, result), result):
        if not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
    needed: set[fx.Node] = set()
    pending = [result]
    while pending:
        node = pending.pop()
        if node in reached and node is not source and node not in needed:
            needed.add(node)
            pending += node.all_input_nodes
            if fills:
                pending += _writers(node, source, result)
    nodes = sorted(needed)
    leaves = dict.fromkeys(
        leaf for node in nodes for leaf in node.all_input_nodes if leaf is not source and leaf not in needed
    )
    return Cone(source, result, tuple(nodes), tuple(leaves), fills)


def _writers(made: fx.Node, first: fx.Node, last: fx.Node) -> list[fx.Node]:
    """The nodes between `first` and `last` that may write to the result of `made`."""
    touched = memory([made])
    return [node for node in between(first, last) if not touched.isdisjoint(memory(may_write(node)))]


def made_of_both(results: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """The nodes on which all of these depend, the nearest first."""
    above = [set(result.all_input_nodes) for result in results]
    node = max(results).prev
    while node.op != "root":
        having = [nodes for nodes in above if node in nodes]
        if len(having) == len(above):
            yield node
        for nodes in having:
            nodes.update(node.all_input_nodes)
        node = node.prev


class Recognition:
    """The formulas found for the cones of one graph. Layers repeat, so each distinct cone runs once."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def of(self, formula: Callable[..., _Found], *cones: Cone) -> _Found:
        """The result of `formula(*cones)`, which may run the cones.

        Raises:
            Refusal: the cones compute something else, or one of the user's operations raises an error.
        """
        if not all(cone.nodes for cone in cones):
            raise Refusal("it does not depend on the projection")
        key = str(formula), *(cone.signature() for cone in cones)
        if key not in self._known:
            try:
                for cone in cones:
                    cone.check()
                with on_real_tensors(), torch.random.fork_rng(devices=[]):
                    self._known[key] = formula(*cones)
            except Refusal as refusal:
                self._known[key] = refusal
            except Exception as failure:  # any error of the user's operations
                self._known[key] = Refusal(f"it cannot be run on random values: {failure}")
        found: Any = self._known[key]
        if isinstance(found, Refusal):
            raise found
        return found  # type: ignore[no-any-return]


def draw(
    cones: Sequence[Cone],
    number: int,
    seed: int,
    scale: Callable[[fx.Node], float],
    half: torch.dtype | None = None,
) -> dict[fx.Node, Any]:
    """Random values for the source and the leaves of cones of one source.

    number: replaces every symbolic size; scale: each tensor's standard deviation; half: a dtype that float32 replaces.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    values: dict[fx.Node, Any] = {}
    for node in dict.fromkeys([cones[0].source, *(leaf for cone in cones for leaf in cone.leaves)]):
        value = value_of(node)
        if isinstance(value, Tensor):
            dtype = torch.float32 if value.dtype == half else value.dtype
            wide = torch.complex128 if dtype.is_complex else torch.float64
            shape = shape_where_symbols_are(node, number)
            drawn = torch.randn(shape, generator=generator, dtype=wide, device="cpu")
            values[node] = (scale(node) * drawn).to(dtype)
        else:
            values[node] = value if isinstance(value, int | float) else size_where_symbols_are(value, number)
    return values


def agree(got: Tensor, expected: Tensor, terms: Tensor, bound: float) -> bool:
    """Whether two tensors differ by at most `bound` times the summed terms, and have NaN in the same places."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    near = (got.double() - expected.double()).abs() <= bound * terms.double()
    return bool((near | (got.isnan() & expected.isnan())).all())


def shape_where_symbols_are(node: fx.Node, number: int) -> list[int]:
    """The sizes of a node's tensor, with a number for every symbol."""
    return [size_where_symbols_are(size, number) for size in tensor_of(node).shape]


def _function(node: fx.Node, half: torch.dtype | None) -> Callable[..., Any]:
    if node.op == "call_function":
        assert callable(node.target)
        return node.target
    name = str(node.target)
    if name == {torch.float16: "half", torch.bfloat16: "bfloat16"}.get(half):  # type: ignore[arg-type]
        name = "float"
    if name == "cuda":
        name = "cpu"
    return lambda tensor, *args, **kwargs: getattr(tensor, name)(*args, **kwargs)


def _on_cpu(value: Any) -> Any:
    named = isinstance(value, str) and re.fullmatch(r"(cuda|meta)(:\d+)?", value)
    return torch.device("cpu") if named or isinstance(value, torch.device) else value


def _symbols(node: fx.Node) -> set[Any]:
    sizes: list[Any] = []
    for value in values_of(node):
        sizes += value.shape if isinstance(value, Tensor) else [value]
    return set().union(*map(symbols_of, sizes))


def _described(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else str(value)
