"""Is what a cone computes an RMSNorm, a rotation? Tried on random tokens, so that any way to write it is found.

Tokens are tiny, of usual size and huge, and one holds a NaN: the epsilon, a clamp, or a replaced NaN would show. Graphs
in half precision are tried twice: in float32, where a wrong formula cannot hide in the rounding, and as they are, where
they must round like the op, to one unit in the last place.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from mla_compile.ops.norm_rope import rms_norm, rotate
from mla_compile.passes.cone import Cone, shape_where_symbols_are
from mla_compile.passes.nodes import tensor_of, value_of
from mla_compile.torch_internals import is_wrapper, on_real_tensors, size_where_symbols_are

_MOST_NODES = 64
_HALF = (torch.float16, torch.bfloat16)
_TINY = 1e-8
"""The mean square of tokens of this size is nothing beside an epsilon."""


@dataclass(frozen=True)
class Norm:
    """`ops.norm_rope_append.rms_norm` of the first columns."""

    eps: float


@dataclass(frozen=True)
class Rotation:
    """`ops.norm_rope_append.rotate` of the last columns."""

    interleaved_in: bool
    interleaved_out: bool
    sin_first: bool
    """Whether sin is the first of the two leaves, and cos the second."""
    heads_first: bool = False
    """Of queries: whether they are `[..., heads, tokens, columns]`, not `[..., tokens, heads, columns]`."""

    def __str__(self) -> str:
        layouts = ["interleaved" if x else "halves" for x in (self.interleaved_in, self.interleaved_out)]
        return f"rotation of {layouts[0]} to {layouts[1]}"


@dataclass(frozen=True)
class _Draw:
    """Values for a cone's source and leaves."""

    half: torch.dtype | None
    """The dtype for which float32 stands."""
    values: dict[fx.Node, Any]
    bound: float
    """The error allowed, relative to the terms that are summed."""


def remembered(known: dict[str, Any], cone: Cone, recognise: Callable[[Cone], Any]) -> Any:
    """What `recognise` says of a cone. Layers are alike: each kind of cone is run once."""
    key = cone.signature()
    if key not in known:
        known[key] = recognise(cone)
    return known[key]


def recognise_norm(cone: Cone) -> Norm | str:
    """The norm that a cone computes of the first columns of its source, or why it is none."""
    obstacle = _obstacle(cone)
    if obstacle is not None:
        return obstacle
    if len(cone.tensors) != 1:
        return f"it reads {len(cone.tensors)} other tensors, not just a weight"
    rank = _last(cone.result)
    (weight,) = cone.tensors
    if _numel(weight) != rank or tensor_of(weight).dtype != tensor_of(cone.source).dtype:
        return f"its weight is {tensor_of(weight).dtype} {list(tensor_of(weight).shape)}"
    try:
        with on_real_tensors(), torch.random.fork_rng(devices=[]):
            eps = _epsilon(cone, rank, weight)
            for draw in _draws(cone):
                x, w = _rows(draw.values[cone.source])[:, :rank], draw.values[weight].flatten()
                expected = rms_norm(x, w, eps)
                if not _agree(cone.run(draw.values, draw.half), expected, expected.abs(), draw.bound):
                    return f"it computes something else in {str(x.dtype).removeprefix('torch.')}"
    except Exception as failure:  # whatever the user's operations raise
        return f"it cannot be tried: {failure}"
    return Norm(eps)


def recognise_rotation(cone: Cone) -> Rotation | str:
    """The rotation that a cone computes of the last columns of its source, or why it is none."""
    rope = _last(cone.result)

    def rotates(one: Rotation, x: Tensor, *others: Any) -> bool:
        return _rotates(one, x[:, -rope:], *others)

    return _recognise(cone, rope, 3, rotates)


def recognise_query_rotation(cone: Cone, heads: int, rope: int) -> Rotation | str:
    """The rotation that a cone computes of the last `rope` columns of each head, or why it is none.

    The source has all columns of one head, then those of the next one. The result has a head's rotated columns, or all
    of its columns with the others left as they are.
    """

    def rotates(one: Rotation, x: Tensor, angles: list[Tensor], got: Tensor, bound: float) -> bool:
        x, shape = x.unflatten(-1, (heads, -1)), (heads, len(x)) if one.heads_first else (len(x), heads)
        if got.shape[-3:-1] != shape or got.numel() != len(x) * heads * _last(cone.result):
            return False
        got = got.flatten(0, -3)
        got = got.transpose(0, 1) if one.heads_first else got
        kept = got[..., :-rope]
        same = torch.equal(kept.nan_to_num(), x[..., : kept.shape[-1]].nan_to_num())
        return same and _rotates(one, x[..., -rope:], [a[:, None] for a in angles], got[..., -rope:], bound)

    return _recognise(cone, rope, 4, rotates)


def _recognise(cone: Cone, rope: int, flags: int, rotates: Callable[..., bool]) -> Rotation | str:
    """The first rotation of which `rotates` says that it makes the result of the source; or why it is none.

    flags: how many of the fields of a rotation are tried both ways.
    """
    obstacle = _obstacle(cone)
    if obstacle is not None:
        return obstacle
    angles = cone.tensors
    is_complex = [tensor_of(leaf).is_complex() for leaf in angles]
    if is_complex not in ([True], [False, False]):
        return f"it reads {len(angles)} other tensors, not just cos and sin"
    widths = [_last(leaf) for leaf in angles]
    if (
        rope % 2
        or len(set(widths)) > 1
        or widths[0] not in ((rope // 2,) if is_complex[0] else (rope // 2, rope))
    ):
        return f"{rope} columns with cos and sin of {widths} columns"
    left = [Rotation(*choice) for choice in itertools.product((False, True), repeat=flags)]
    left = [one for one in left if not (is_complex[0] and one.sin_first)]
    try:
        with on_real_tensors(), torch.random.fork_rng(devices=[]):
            for draw in _draws(cone):
                x = _rows(draw.values[cone.source])
                parts = [_rows(part) for leaf in angles for part in _parts(draw.values[leaf])]
                if any(len(part) != len(x) for part in parts):
                    return "cos and sin are not those of each token"
                got = cone.run(draw.values, draw.half)
                left = [one for one in left if rotates(one, x, parts, got, draw.bound)]
                if not left:
                    return f"it computes something else in {str(x.dtype).removeprefix('torch.')}"
    except Exception as failure:  # whatever the user's operations raise
        return f"it cannot be tried: {failure}"
    return left[0]


def _obstacle(cone: Cone) -> str | None:
    dtype = tensor_of(cone.source).dtype
    if not cone.nodes:
        return "it does not depend on the projection"
    if dtype != tensor_of(cone.result).dtype:
        return f"the projection is {dtype}"
    if any(is_wrapper(tensor_of(node)) for node in (cone.source, *cone.tensors)):
        return "it reads a tensor subclass"
    return cone.obstacle(_MOST_NODES)


def _epsilon(cone: Cone, rank: int, weight: fx.Node) -> float:
    """The epsilon that tiny tokens show: all else in `y = x w / sqrt(mean(x^2) + eps)` is known."""
    dtype = tensor_of(cone.source).dtype
    half = dtype if dtype in _HALF else None
    values = _values(cone, 3, half, _TINY, torch.Generator("cpu").manual_seed(0))
    x = _rows(values[cone.source])[:, :rank].double()
    y = cone.run(values, half).double()
    square = x.square().mean(-1, keepdim=True)
    eps = float(((x * values[weight].flatten().double() / y).square() - square).median())
    if not math.isfinite(eps) or eps < 1e-3 * float(square.max()):
        return 0.0
    near = [c for c in _constants(cone) if abs(c - eps) < 1e-3 * eps]
    return min(near, key=lambda c: abs(c - eps)) if near else eps


def _constants(cone: Cone) -> list[float]:
    found: list[float] = []

    def look(value: Any) -> Any:
        if isinstance(value, float):
            found.append(value)
        return value

    for node in cone.nodes:
        fx.node.map_aggregate((node.args, node.kwargs), look)
    return found


def _draws(cone: Cone) -> Iterator[_Draw]:
    dtype = tensor_of(cone.source).dtype
    generator = torch.Generator("cpu").manual_seed(1)
    for half in (dtype, None) if dtype in _HALF else (None,):
        computed = torch.float32 if half is not None else dtype
        eps = torch.finfo(computed).eps
        bound = eps if computed in _HALF else 64 * eps
        for number, scale in ((2, 1.0), (5, 1e-3), (3, 1e3 if computed == torch.float16 else 1e8)):
            yield _Draw(half, _values(cone, number, half, scale, generator), bound)
        last = _values(cone, 2, half, 1.0, generator)
        _rows(last[cone.source])[0, [0, -1]] = torch.nan
        yield _Draw(half, last, bound)


def _values(
    cone: Cone, number: int, half: torch.dtype | None, scale: float, generator: torch.Generator
) -> dict[fx.Node, Any]:
    """Random tensors for the source and the leaves; `number` for every symbol in their sizes."""
    values: dict[fx.Node, Any] = {}
    for leaf in cone.leaves:
        size = value_of(leaf)
        if isinstance(size, Tensor):
            values[leaf] = _random(leaf, number, half, generator)
        else:
            values[leaf] = size if isinstance(size, (int, float)) else size_where_symbols_are(size, number)
    values[cone.source] = scale * _random(cone.source, number, half, generator)
    return values


def _random(node: fx.Node, number: int, half: torch.dtype | None, generator: torch.Generator) -> Tensor:
    dtype = torch.float32 if tensor_of(node).dtype == half else tensor_of(node).dtype
    shape = shape_where_symbols_are(node, number)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, generator=generator, dtype=wide, device="cpu").to(dtype)


def _rotates(rotation: Rotation, x: Tensor, parts: list[Tensor], got: Tensor, bound: float) -> bool:
    cos, sin = reversed(parts) if rotation.sin_first else parts
    layout = rotation.interleaved_in, rotation.interleaved_out
    none = torch.zeros_like(cos)
    terms = rotate(x.abs(), cos.abs(), none, *layout) + rotate(x.abs(), none, sin.abs(), *layout).abs()
    return _agree(got, rotate(x, cos, sin, *layout), terms, bound)


def _agree(got: Tensor, expected: Tensor, terms: Tensor, bound: float) -> bool:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    near = (got.double() - expected.double()).abs() <= bound * terms.double()
    return bool((near | (got.isnan() & expected.isnan())).all())


def _parts(angles: Tensor) -> tuple[Tensor, ...]:
    return torch.view_as_real(angles).unbind(-1) if angles.is_complex() else (angles,)


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2) if x.dim() > 2 else x


def _last(node: fx.Node) -> int:
    return int(tensor_of(node).shape[-1])


def _numel(node: fx.Node) -> int:
    return math.prod(shape_where_symbols_are(node, 1))
