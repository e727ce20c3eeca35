"""Random graphs that end in a gather of rows: drawn, rewritten by `hoist_row_gather`, run, compared with eager.

A case is a chain of a few ops on tensors whose sizes are small and often equal by accident; half of the ops are ones
that mix rows, move them or take them away. What torch refuses is not added. The number of rows is static, or a symbol
for which the graph must be right whatever it is: such a graph is run with several.
"""

import functools
import logging
import math
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, GuardOnDataDependentSymNode, ShapeEnv

from mla_compile.passes import pipeline
from mla_compile.passes.emit import set_example_value
from mla_compile.passes.hoist_row_gather import hoist_row_gather
from mla_compile.torch_internals import size_where_symbols_are

logging.getLogger("torch._subclasses.fake_tensor").disabled = True  # it logs each call that it refuses

DIMS = (1, 2, 3, 4)
BOUND = 3
"""Integer inputs are below it, so that they may index what is as wide."""

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
Op = Callable[["Drawn", fx.Node], Call]


class Sizes:
    """Sizes of which torch knows nothing yet. Making them takes longer than a case, so cases that learn nothing of
    them hand them on."""

    def __init__(self) -> None:
        self.env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.env)
        source = ConstantSource("rows")
        symbol = self.env.create_symbol(3, source, dynamic_dim=DimDynamic.DYNAMIC)
        self.backed = self.env.create_symintnode(symbol, hint=3, source=source)
        self.unbacked, self.kept = self.env.create_unbacked_symint(), self.env.create_unbacked_symint()
        for size in (self.unbacked, self.kept):
            torch._check(size >= 0)
        self.known = self.learnt()

    def guards(self) -> set[Any]:
        """What sizes with an example must be for the graph to be right; else it is compiled anew."""
        return {guard.expr for guard in self.env.guards}

    def asserted(self) -> set[Any]:
        """What sizes without one must be; else the graph fails."""
        return {a.expr for found in self.env.deferred_runtime_asserts.values() for a in found}

    def learnt(self) -> Any:
        return self.guards(), self.asserted(), dict(self.env.replacements), dict(self.env.var_to_range)

    @classmethod
    def unknown(cls) -> "Sizes":
        if not _sizes or _sizes[0].learnt() != _sizes[0].known:
            _sizes[:] = [cls()]
        return _sizes[0]


_sizes: list[Sizes] = []


@dataclass
class Drawn:
    """A graph under construction. Its values are fake, with a symbol for the rows unless their number is static."""

    rng: random.Random
    sizes: Sizes
    rows: Any
    numbers: tuple[int, ...]
    """Of rows, for which the graph is run."""
    graph: fx.Graph = field(default_factory=fx.Graph)
    pool: list[fx.Node] = field(default_factory=list)

    @classmethod
    def begin(cls, rng: random.Random) -> "Drawn":
        sizes = Sizes.unknown()
        static = rng.choice((0, 1, 2, 3, 3, 4))
        # Of the backed symbol, 0 and 1 would be graphs of their own.
        kinds = (*[(static, (static,))] * 2, (sizes.backed, (2, 3, 5)), (sizes.unbacked, (0, 1, 2, 3, 5)))
        g = cls(rng, sizes, *rng.choice(kinds))
        g.pool.append(
            g.input([g.rows, *(rng.choice(DIMS) for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 3, 3))))])
        )
        return g

    def input(self, shape: Sequence[Any], dtype: torch.dtype = torch.float64) -> fx.Node:
        placeholders = self.graph.find_nodes(op="placeholder")
        following = next((node for node in self.graph.nodes if node.op != "placeholder"), None)
        at_end = self.graph.inserting_after() if following is None else self.graph.inserting_before(following)
        with at_end:
            node = self.graph.placeholder(f"input_{len(placeholders)}")
        with self.sizes.mode:
            node.meta["example_value"] = torch.empty(tuple(shape), dtype=dtype)
        return node

    def possible_rows(self) -> list[int]:
        """Numbers of rows for which the graph is right; none where that depends on other sizes too."""
        if isinstance(self.rows, int):
            return [self.rows]
        learnt = (self.sizes.guards() | self.sizes.asserted()) - self.sizes.known[1]
        return [n for n in self.numbers if all(map(functools.partial(holds, self.rows, n), learnt))]

    def real_inputs(self, inputs: Sequence[fx.Node], rows: int) -> list[Tensor]:
        """Random values for the inputs."""
        generator = torch.Generator().manual_seed(self.rng.randrange(2**32))
        found = []
        for node in inputs:
            value = value_of(node)
            shape = [size_where_symbols_are(size, rows) for size in value.shape]
            if value.dtype == torch.int64:
                found.append(torch.randint(BOUND, shape, generator=generator))
            else:
                x = torch.randn(shape, generator=generator, dtype=torch.float64)
                found.append(x > 0 if value.dtype == torch.bool else x)
        return found

    def add(self, target: Any, args: Any, kwargs: dict[str, Any]) -> fx.Node | None:
        """The node, or None where torch refuses it."""
        make = self.graph.call_method if isinstance(target, str) else self.graph.call_function
        node = make(target, tuple(args), kwargs)
        try:
            set_example_value(node, self.sizes.mode)
        except Exception:  # whatever torch raises
            self.graph.erase_node(node)
            return None
        return node

    def num_rows(self) -> Any:
        """The number of rows as Dynamo writes it."""
        if isinstance(self.rows, int):
            return self.rows
        return self.add(torch.ops.aten.sym_size.int, (self.pool[0], 0), {})

    def dim(self, x: fx.Node, more: int = 0) -> int:
        """Mostly not the rows, from either end; sometimes none that there is."""
        rank = value_of(x).dim() + more
        inner = [self.rng.randrange(1, rank), -1] if rank > 1 else [0]
        return self.rng.choice((*inner, *inner, self.rng.randint(-rank - 1, rank)))

    def named(self, dim: int) -> tuple[tuple[int, ...], dict[str, int]]:
        """`dim` by position or by one of its names."""
        name = self.rng.choice((None, None, "dim", "axis"))
        return ((dim,), {}) if name is None else ((), {name: dim})

    def like(self, x: fx.Node, dtype: torch.dtype = torch.float64) -> fx.Node:
        """An input that broadcasts with `x`: all of its sizes or the last ones, some of them 1; or another node."""
        others = [n for n in self.pool if value_of(n).dtype == dtype]
        if others and self.rng.random() < 0.4:
            return self.rng.choice(others)
        shape = list(value_of(x).shape)
        kept = shape[self.rng.choice((0, 0, 1, self.rng.randint(0, len(shape)))) :]
        kept = [1 if self.rng.random() < 0.15 else size for size in kept]
        return self.input([self.rng.choice(DIMS), *kept] if self.rng.random() < 0.05 else kept, dtype)


def holds(size: Any, number: int, condition: Any) -> bool:
    """Whether a condition holds where `size` is a number; not where it depends on other sizes too."""
    try:
        known = condition if isinstance(size, int) else condition.subs(size.node._expr, number)
        return bool(known == True)  # noqa: E712
    except ZeroDivisionError:
        return False


def value_of(node: fx.Node) -> Tensor:
    value = node.meta["example_value"]
    assert isinstance(value, Tensor)
    return value


# --- the ops


def unary(g: Drawn, x: fx.Node) -> Call:
    methods = ("neg", "square", "sigmoid", "rsqrt", "sin", "cos", "contiguous", "abs", "exp", "clone")
    functions = (torch.sigmoid, torch.rsqrt, torch.sin, F.silu, F.gelu, F.relu, operator.neg, torch.tanh)
    return g.rng.choice((*methods, *functions)), (x,), {}


def binary(g: Drawn, x: fx.Node) -> Call:
    both = (operator.add, operator.sub, operator.mul, torch.add, torch.mul, "add", "sub", "mul", "div")
    others = (operator.truediv, operator.pow, "pow", torch.sub, torch.div, torch.maximum, operator.matmul)
    target = g.rng.choice((*both, *others))
    other = g.rng.choice((0.5, 2, g.like(x)))
    sides = (other, x) if g.rng.random() < 0.3 and isinstance(other, fx.Node) else (x, other)
    return target, sides, {"alpha": 2} if target in (torch.add, "sub") and g.rng.random() < 0.3 else {}


def compared(g: Drawn, x: fx.Node) -> Call:
    """A mask of comparisons, as numbers, so that other ops take it."""
    compare = (operator.eq, operator.ne, operator.ge, operator.gt, operator.le, operator.lt)
    masks = [g.add(g.rng.choice(compare), (x, g.rng.choice((0.0, g.like(x)))), {}) for _ in range(2)]
    mask = g.add(operator.invert, (masks[0],), {}) if g.rng.random() < 0.3 and masks[0] else masks[0]
    if mask and masks[1] and g.rng.random() < 0.6:
        mask = g.add(g.rng.choice((operator.and_, operator.or_)), (mask, masks[1]), {})
    return "double", (mask or x,), {}


def masked(g: Drawn, x: fx.Node) -> Call:
    mask = g.like(x, torch.bool)
    if g.rng.random() < 0.2:
        made = g.add(g.rng.choice((operator.ge, operator.lt, operator.ne)), (x, g.like(x)), {})
        mask = made or mask
    return g.rng.choice(
        (
            ("masked_fill", (x, mask, 7.0), {}),
            (torch.where, (mask, x, g.like(x)), {}),
            (torch.where, (mask, g.like(x), 1.0), {}),
            (torch.where, (mask,), {}),
            ("clamp", (x, -0.5, 0.5), {}),
            ("clamp", (x, g.like(x)), {}),
        )
    )


def cast(g: Drawn, x: fx.Node) -> Call:
    to = (torch.float64, torch.float32, g.like(x))
    calls = [("to", (x, dtype), {}) for dtype in to] + [("type_as", (x, g.like(x)), {})]
    by_name = [(name, (x,), {}) for name in ("float", "double", "half", "bfloat16", "bool")]
    return g.rng.choice((*calls, *by_name, ("type", (x, torch.float64), {})))


def reduction(g: Drawn, x: fx.Node) -> Call:
    target = g.rng.choice(("sum", "mean", torch.sum, torch.mean, "amax", "cumsum", torch.logsumexp))
    dims = g.rng.choice((g.dim(x), (g.dim(x),), (g.dim(x), g.dim(x)), ()))
    args, kwargs = g.named(dims)
    if g.rng.random() < 0.1:
        args, kwargs = (), {}
    if g.rng.random() < 0.3:
        kwargs[g.rng.choice(("keepdim", "keepdims"))] = True
    return target, (x, *args), kwargs


def along(g: Drawn, x: fx.Node) -> Call:
    args, kwargs = g.named(g.dim(x))
    target = g.rng.choice(("softmax", torch.softmax, F.softmax, "flip", "roll", torch.log_softmax, "sort"))
    return target, (x, *((1,) if target == "roll" else ()), *args), kwargs


def gathered(g: Drawn, x: fx.Node) -> Call:
    shape = [g.rng.choice((size, size, size, 2)) for size in value_of(x).shape]
    index = g.input(shape, torch.int64)
    args, kwargs = g.named(g.dim(x))
    ways = [("gather", (index,)), (torch.gather, (index,)), ("scatter", (index, 9.0))]
    target, rest = g.rng.choice((*ways, (torch.scatter, (index, g.like(x))), ("index_select", (index,))))
    return (target, (x, *args, *rest), {}) if args else (target, (x,), {**kwargs, "index": index})


def topk(g: Drawn, x: fx.Node) -> Call:
    args, kwargs = g.named(g.dim(x))
    dim = (args, kwargs) if g.rng.random() < 0.8 else ((), {})
    return g.rng.choice(("topk", torch.topk)), (x, g.rng.randint(1, 2), *dim[0]), dim[1]


def split(g: Drawn, x: fx.Node) -> Call:
    args, kwargs = g.named(g.dim(x)) if g.rng.random() < 0.9 else ((), {})
    target = g.rng.choice(("split", torch.split, "chunk", torch.chunk))
    return target, (x, g.rng.randint(1, 2), *args), kwargs


def joined(g: Drawn, x: fx.Node) -> Call:
    args, kwargs = g.named(g.dim(x)) if g.rng.random() < 0.9 else ((), {})
    parts = [x, *(g.like(x) for _ in range(g.rng.randint(0, 2)))]
    g.rng.shuffle(parts)
    return g.rng.choice((torch.cat, torch.cat, torch.cat, torch.stack)), (parts, *args), kwargs


def unsqueeze(g: Drawn, x: fx.Node) -> Call:
    args, kwargs = g.named(g.dim(x, more=1))
    return g.rng.choice(("unsqueeze", torch.unsqueeze, "squeeze")), (x, *args), kwargs


def flatten(g: Drawn, x: fx.Node) -> Call:
    shape = value_of(x).shape
    dim = g.dim(x)
    if g.rng.random() < 0.5:
        ends = g.rng.choice(((), (dim,), (dim, g.dim(x)), (dim, -1)))
        by_name = g.rng.random() < 0.2 and len(ends) == 1
        rest = ((), {"start_dim": dim}) if by_name else (ends, {})
        return g.rng.choice(("flatten", torch.flatten)), (x, *rest[0]), rest[1]
    size = shape[dim] if -len(shape) <= dim < len(shape) else 4
    size = size if isinstance(size, int) else 4
    parts = g.rng.choice([(2, -1), (1, size), (-1, 1), (size, 1), (2, 2)])
    return g.rng.choice(("unflatten", torch.unflatten)), (x, dim, parts), {}


def reshape(g: Drawn, x: fx.Node) -> Call:
    """To a number of rows, which may be right, and sizes that may have as many elements as there are."""
    shape = value_of(x).shape
    inner = math.prod(size for size in shape[1:] if isinstance(size, int))
    a = g.rng.choice([d for d in range(1, inner + 1) if inner % d == 0] or [1])
    first = g.rng.choice((-1, g.num_rows(), g.num_rows(), shape[0] if isinstance(shape[0], int) else 2, 1))
    rest = g.rng.choice(
        ((inner,), (a, inner // max(a, 1)), (a, -1), (inner, 1), (-1,), (g.rng.choice(DIMS), -1))
    )
    sizes = (first, *rest)
    if g.rng.random() < 0.15:
        sizes = g.rng.choice(((inner, -1), (-1,), (a, -1, inner // max(a, 1)), (*rest, first)))
    target = g.rng.choice(("view", "reshape", torch.reshape))
    spread = isinstance(target, str) and g.rng.random() < 0.5
    return target, (x, *sizes) if spread else (x, tuple(sizes)), {}


def moved(g: Drawn, x: fx.Node) -> Call:
    rank = value_of(x).dim()
    order = g.rng.sample(range(rank), rank)
    sizes = [g.rng.choice((-1, 2, g.num_rows(), 3)) for _ in range(rank)]
    return g.rng.choice(
        (
            ("permute", (x, *order), {}),
            ("transpose", (x, g.dim(x), g.dim(x)), {}),
            (torch.movedim, (x, g.dim(x), g.dim(x)), {}),
            ("t", (x,), {}),
            ("expand", (x, *sizes), {}),
            ("repeat", (x, *(g.rng.choice((1, 1, 2)) for _ in range(rank))), {}),
            ("repeat_interleave", (x, 2, g.dim(x)), {}),
            ("narrow", (x, g.dim(x), 0, 1), {}),
            ("select", (x, g.dim(x), 0), {}),
        )
    )


def linear(g: Drawn, x: fx.Node) -> Call:
    shape = value_of(x).shape
    width, out = shape[-1], g.rng.choice((*DIMS, shape[0]))
    weight = g.rng.choice((g.input([out, width]), x, g.input([out, width]), g.input([width])))
    bias = g.rng.choice((None, None, g.input([out]), g.input([*shape[:-1], out]), g.input([1, out])))
    named = g.rng.random() < 0.2
    return F.linear, (x, weight) if named else (x, weight, bias), {"bias": bias} if named else {}


def norm(g: Drawn, x: fx.Node) -> Call:
    shape = tuple(value_of(x).shape)
    # Half of them over the last dimension, the others perhaps over all.
    over = shape[g.rng.choice((-1, -1, -g.rng.randint(1, len(shape)))) :]
    weight = g.rng.choice((None, g.input(over)))
    target = g.rng.choice((F.layer_norm, F.rms_norm, torch.rms_norm))
    sizes = tuple(size if isinstance(size, int) else g.num_rows() for size in over)
    if g.rng.random() < 0.2:
        return target, (x,), {"normalized_shape": sizes, "weight": weight}
    return target, (x, sizes, weight), {}


def embedding(g: Drawn, x: fx.Node) -> Call:
    ids = g.input(value_of(x).shape[: g.rng.randint(0, 2)], torch.int64)
    table = g.rng.choice((g.input((BOUND, g.rng.choice(DIMS))), x))
    return F.embedding, (ids, table), {}


def index(g: Drawn, x: fx.Node) -> Call:
    """Ints, slices, None, ellipsis, lists, tensors and masks, in every order and number."""
    shape = list(value_of(x).shape)
    sizes = (*DIMS, *[g.rows] * len(DIMS))
    length = g.rng.choice([size for size in sizes if isinstance(size, int)])
    plain: list[Callable[[], Any]] = [
        *(
            lambda: slice(None),
            lambda: slice(None),
            lambda: None,
            lambda: Ellipsis,
            lambda: g.rng.randint(-2, 1),
        ),
        *(lambda: slice(1, None), lambda: slice(None, -1), lambda: slice(0, 2), lambda: slice(None, None, 2)),
    ]
    several: list[Callable[[], Any]] = [
        *(lambda: [g.rng.randint(-1, 0) for _ in range(length)], lambda: g.input([length], torch.int64)),
        *(lambda: [g.rng.random() < 0.5 for _ in range(length)], lambda: g.input([length], torch.bool)),
        *(lambda: g.input([g.rng.choice(sizes)], torch.int64), lambda: g.input([], torch.int64)),
        *(lambda: g.input(shape[-1:], torch.bool), lambda: g.input(shape[:2], torch.bool), lambda: True),
    ]
    key: list[Any] = [g.rng.choice((slice(None), slice(None), Ellipsis))] if g.rng.random() < 0.7 else []
    if g.rng.random() < 0.4:  # of one kind, which go together, with slices before, between and behind them
        entry = g.rng.choice(several[:2])
        key += [g.rng.choice((entry, plain[0]))() for _ in range(len(shape) - len(key))] or [Ellipsis]
    else:
        share = g.rng.choice((0.0, 0.0, 0.2, 0.5))
        for _ in range(g.rng.randint(0 if key else 1, len(shape))):
            key.append(g.rng.choice(several if g.rng.random() < share else plain)())
    whole = key[0] if len(key) == 1 and g.rng.random() < 0.5 else tuple(key)
    return operator.getitem, (x, whole), {}


OPS: tuple[Op, ...] = (
    *(
        unary,
        compared,
        binary,
        masked,
        cast,
        reduction,
        along,
        gathered,
        topk,
        split,
        joined,
        unsqueeze,
        flatten,
        reshape,
    ),
    *(moved, linear, norm, embedding, index, index),
)


# --- a case


@dataclass(frozen=True)
class Result:
    """The ops that the gather climbed over, none where it was refused, and how often the graph was run."""

    climbed: tuple[str, ...]
    runs: int


NAMES: dict[Any, tuple[str, ...]] = {
    F.linear: ("input", "weight", "bias"),
    **dict.fromkeys((F.layer_norm, F.rms_norm, torch.rms_norm), ("input", "normalized_shape", "weight")),
    F.embedding: ("input", "weight"),
    torch.cat: ("tensors", "dim"),
    torch.chunk: ("input", "chunks", "dim"),
    torch.gather: ("input", "dim", "index"),
    torch.topk: ("input", "k", "dim"),
    torch.flatten: ("input", "start_dim", "end_dim"),
    torch.unflatten: ("input", "dim", "sizes"),
    **dict.fromkeys((torch.add, torch.sub, torch.mul, torch.div), ("input", "other")),
    **dict.fromkeys((torch.mean, torch.sum, torch.softmax, F.softmax, torch.unsqueeze), ("input", "dim")),
}


def by_name(rng: random.Random, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Call:
    """The same call, of which some or all arguments are given by name now and then."""
    names = NAMES.get(target, ())
    if len(args) > len(names) or rng.random() > 0.2:
        return target, args, kwargs
    first = rng.randint(0, len(args))
    return target, args[:first], dict(zip(names[first:], args[first:])) | kwargs


def draw(rng: random.Random, ops: Sequence[Op]) -> tuple[Drawn, fx.Node]:
    """A graph of up to four ops, and the node whose rows are to be gathered."""
    g = Drawn.begin(rng)
    x = g.pool[0]
    for _ in range(rng.choice((1, 1, 2, 2, 3, 4))):
        call = rng.choice(ops)(g, x if rng.random() < 0.85 else rng.choice(g.pool))
        node = g.add(*by_name(rng, *call))
        while node is not None and isinstance(node.meta["example_value"], (tuple, list)):
            count = len(node.meta["example_value"])
            node = g.add(operator.getitem, (node, rng.choice((-1, 0, count - 1))), {})
        if node is not None and isinstance(node.meta["example_value"], Tensor) and value_of(node).dim():
            x = node
            g.pool.append(node)
    return g, x


def check(seed: int | str, ops: Sequence[Op] = OPS) -> Result:
    """Draw a case, run the pass on it and compare.

    Raises:
        AssertionError: the rewritten graph does not give what eager gives, wants more of its sizes than the drawn
            one, or is not rewritten and yet not what it was.
    """
    rng = random.Random(seed)
    g, source = draw(rng, ops)
    reference = fx.Graph()
    reference.output(reference.graph_copy(g.graph, copies := {}) or copies[source])
    eager = Eager(nn.Module(), graph=reference)
    placeholders = g.graph.find_nodes(op="placeholder")
    kept = rng.choice((0, 1, 2, 2, 3, None, None))
    ids = g.input([g.sizes.kept if kept is None else kept], torch.int64)
    named = [((source, 0, ids), {}), ((source, 0), {"index": ids}), ((source,), {"axis": 0, "index": ids})]
    g.graph.output(g.add(rng.choice((torch.index_select, "index_select")), *rng.choice(named)))
    gm = fx.GraphModule({}, g.graph)
    before, code, asserted = str(gm.graph), gm.code, g.sizes.asserted()
    right_for = g.possible_rows()
    is_only_gather = str(g.graph).count("index_select](") == 1
    said = f"seed {seed!r}, rows {g.rows}\n{before}"
    try:
        pipeline.run(gm, (), [hoist_row_gather])
    except Exception as failure:
        if isinstance(failure.__cause__, GuardOnDataDependentSymNode):
            return Result((), 0)  # in this mode, not in Dynamo's: of a norm of width 1, say
        raise AssertionError(f"the pass fails: {said}") from failure
    climbed = climbed_over(gm.graph, ids) if str(gm.graph) != before else ()
    if climbed:
        said += f"\n{gm.graph}"
        wanted = g.sizes.asserted() - asserted
        assert all(holds(g.rows, n, one) for one in wanted for n in right_for), f"more of the sizes: {said}"
    elif is_only_gather:
        assert (str(gm.graph), gm.code) == (before, code), f"a refusal changes the graph: {said}"
    runs = 0
    for rows in g.possible_rows():
        inputs = g.real_inputs(placeholders, rows)
        try:
            value = eager.run(*inputs)
        except Exception:  # an index that is out of range for these values
            continue
        if eager.has_other_sizes:
            continue
        for number in (0, 1, 2, len(value) + 1) if kept is None else (kept,):
            if len(value) or not number:
                chosen = torch.tensor([rng.randrange(len(value)) for _ in range(number)], dtype=torch.int64)
                where = f"inputs {[tuple(x.shape) for x in inputs]}, ids {chosen.tolist()}, {said}"
                same(gm, [*inputs, chosen], value.index_select(0, chosen), where)
                runs += 1
    return Result(climbed, runs)


class Eager(fx.Interpreter):
    """Runs a graph, and notices where its sizes are others than torch took for granted.

    A size that depends on data, how many elements a mask has say, is taken not to be 1; compiled code asserts that.
    """

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.has_other_sizes = False
        self._sizes: dict[Any, int] = {}
        return super().run(*args, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        example = n.meta.get("example_value")
        if isinstance(result, Tensor) and isinstance(example, Tensor):
            self.has_other_sizes |= result.dim() != example.dim()
            for size, expected in zip(result.shape, example.shape):
                expected = expected if isinstance(expected, int) else expected.node.expr
                known = (
                    self._sizes.setdefault(expected, size)
                    if getattr(expected, "free_symbols", ())
                    else expected
                )
                self.has_other_sizes |= size != int(known)
        return result


def same(gm: fx.GraphModule, inputs: Sequence[Tensor], expected: Tensor, where: str) -> None:
    try:
        got = gm(*inputs)
    except Exception as failure:
        raise AssertionError(f"the rewritten graph fails: {where}") from failure
    torch.testing.assert_close(got, expected, equal_nan=True, msg=lambda message: f"{message}\n{where}")


def climbed_over(graph: fx.Graph, ids: fx.Node) -> tuple[str, ...]:
    """The ops that depend on the ids, but for the gathers."""
    reached = {ids}
    found = []
    for node in graph.nodes:
        if not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
            found.append(
                node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
            )
    return tuple(name for name in found if name not in ("index_select", "output", "sym_size.int"))
