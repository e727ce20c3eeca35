"""Where the elements of keys and values come from.

The strides of a view locate it in the memory of its base, however it was created. So this module does not match views
one by one. It matches only copies (`contiguous`, `repeat`) and joins (`cat`, slices that `copy_` fills).
"""

from dataclasses import dataclass
from typing import Any

from torch import fx

from mla_compile.passes.effects import made_of
from mla_compile.passes.nodes import argument, is_tensor, tensor_of, torch_name
from mla_compile.torch_internals import statically_known_true

Nodes = tuple[fx.Node, ...]
_COPIES = ("contiguous", "clone", "repeat")


def same(size: Any, other: Any) -> bool:
    return statically_known_true(size == other)


@dataclass(frozen=True)
class View:
    """The elements of a node as `[rows, heads, keys, features]`; a broadcast dimension may have size 1.

    dims: the node's dimensions in that order.
    passed: the nodes between this one and the readers of the elements.
    """

    node: fx.Node
    dims: tuple[int, ...]
    passed: Nodes = ()

    @property
    def sizes(self) -> list[Any]:
        return [tensor_of(self.node).shape[dim] for dim in self.dims]

    @property
    def strides(self) -> list[Any]:
        strides = tensor_of(self.node).stride()
        return [0 if same(size, 1) else strides[dim] for dim, size in zip(self.dims, self.sizes)]

    @property
    def path(self) -> Nodes:
        """The node and the nodes that it is a view of, ending with the base, which is not a view."""
        path: list[Any] = [self.node]
        while path[-1] is not made_of(self.node):
            path.append(path[-1].args[0])
        return tuple(path)

    @property
    def base(self) -> fx.Node:
        return self.path[-1]

    @property
    def begin(self) -> Any:
        """The node's offset in the memory of the base, in elements."""
        return tensor_of(self.node).storage_offset() - tensor_of(self.base).storage_offset()

    def dims_of_base(self) -> tuple[int, ...] | None:
        """The same dimensions of the base; None if the view does not cover all of its elements."""
        base, dims = tensor_of(self.base), list[int]()
        for size, stride in zip(self.sizes, self.strides):
            alike = (
                dim
                for dim, (n, step) in enumerate(zip(base.shape, base.stride()))
                if dim not in dims and same(n, size) and (same(n, 1) or same(step, stride))
            )
            dims += [next(alike, -1)]
        whole = base.dim() == 4 and -1 not in dims
        return tuple(dims) if whole and same(self.begin, 0) else None


def view_of(node: fx.Node, dims: tuple[int, ...] = (0, 1, 2, 3), passed: Nodes = ()) -> View:
    """The view of a node, or of the source if the node is a copy."""
    view = View(node, dims, passed)
    while torch_name(view.base) in _COPIES:
        source: Any = view.base.args[0]
        copied = view.dims_of_base()
        if copied is None or not is_tensor(source) or tensor_of(source).dim() != 4:
            break
        sizes = enumerate(zip(tensor_of(source).shape, tensor_of(view.base).shape))
        if not all(same(*pair) or (same(pair[0], 1) and dim in copied[:2]) for dim, pair in sizes):
            break  # it repeats more than rows or heads
        view = View(source, copied, (*view.passed, *view.path))
    return view


def parts_of(view: View) -> list[View]:
    """The parts that are joined to a view's features, in order; empty if there is no join."""
    dims = view.dims_of_base()
    if dims is None:
        return []
    joined = _joined(view.base, dims[3])
    return [view_of(part, dims, (*view.passed, *view.path, *between)) for part, between in joined]


def _joined(node: fx.Node, dim: int) -> list[tuple[fx.Node, Nodes]]:
    """The parts that a `cat`, or a buffer filled by slices, joins along a dimension, with the nodes that fill it."""
    found: list[tuple[fx.Node, Nodes]] = []
    if torch_name(node) in ("new_empty", "empty"):
        found = _filled(node, dim)
    elif torch_name(node) in ("cat", "concat") and argument(node, 1, "dim", 0) in (dim, dim - 4):
        found = [(part, ()) for part in argument(node, 0, "tensors")]
    return found if all(_is_part(part, node, dim) for part, _ in found) else []


def _is_part(part: Any, whole: fx.Node, along: int = -1) -> bool:
    """Whether two tensors have the same sizes, except along one dimension, where the part's size is static."""
    if not is_tensor(part) or tensor_of(part).dtype != tensor_of(whole).dtype or tensor_of(part).dim() != 4:
        return False
    sizes = enumerate(zip(tensor_of(part).shape, tensor_of(whole).shape))
    return all(same(*pair) if i != along else isinstance(pair[0], int) for i, pair in sizes)


def _filled(buffer: fx.Node, dim: int) -> list[tuple[fx.Node, Nodes]]:
    """The sources of `buffer[..., a:b].copy_(source)`, if they fill each element once before any node reads it."""
    found: list[tuple[int, fx.Node, Nodes]] = []
    for piece in buffer.users:
        write = next(iter(piece.users), piece)
        if torch_name(write) != "copy_" or len(piece.users) != 1:
            continue
        source: Any = write.args[1]
        begin = View(piece, ()).begin
        is_slice = _is_part(piece, buffer, dim) and all(
            map(same, tensor_of(piece).stride(), tensor_of(buffer).stride())
        )
        if not is_slice or not _is_part(source, piece) or not isinstance(begin, int):
            return []
        found.append((begin, source, (write, piece)))
    found.sort(key=lambda part: part[0])
    low = 0
    for begin, source, _ in found:
        if not same(begin, low * tensor_of(buffer).stride(dim)):
            return []
        low += tensor_of(source).shape[dim]
    writes = {node for _, _, path in found for node in path}
    in_time = all(write < user for write in writes for user in buffer.users if user not in writes)
    whole = same(low, tensor_of(buffer).shape[dim])
    return [(source, path) for _, source, path in found] if in_time and whole else []
