"""Formulas for `cone.Recognition`: an RMSNorm, a rotation, a choice of experts, an MLP.

Tokens are tiny, of usual size and huge, and one holds a NaN. They reveal the epsilon, a clamp, or a replaced NaN.
Graphs in half precision are tried twice. In float32 rounding cannot hide a wrong formula. In their own dtype they must
round like the op, to one unit in the last place.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from mla_compile.ops.attention.norm_rope import rms_norm, rotate
from mla_compile.ops.dispatch import HALF
from mla_compile.ops.experts.routing import choose_experts
from mla_compile.ops.linear import fp8
from mla_compile.ops.linear.fp8_linear import fp8_linear_op
from mla_compile.passes.cone import Cone, agree, draw, shape_where_symbols_are
from mla_compile.passes.nodes import is_call, op_arguments, tensor_of
from mla_compile.passes.rewrite import Refusal

_TINY = 1e-8
"""The scale of tokens whose mean square is negligible against an epsilon."""
_MAX_GROUPS = 32
_ROUTED_TOKENS = 37
"""Tokens per draw, enough to distinguish rules by the experts that they choose."""


@dataclass(frozen=True)
class Rotation:
    """The arguments of `ops.attention.norm_rope.rotate`, which rotates the last columns."""

    interleaved_in: bool
    interleaved_out: bool
    sin_first: bool
    """Whether sin is the first of the two leaves and cos the second."""
    heads_first: bool = False
    """For queries: whether they are `[..., heads, tokens, columns]`, not `[..., tokens, heads, columns]`."""

    @property
    def layout(self) -> tuple[bool, bool]:
        return self.interleaved_in, self.interleaved_out

    def angles(self, cone: Cone) -> list[fx.Node]:
        """cos and sin, or one complex tensor, among the leaves of a cone that computes this rotation."""
        return cone.tensors[::-1] if self.sin_first else cone.tensors

    def __str__(self) -> str:
        layouts = ["interleaved" if x else "halves" for x in self.layout]
        return f"rotation of {layouts[0]} to {layouts[1]}"


class ExpertChoice(NamedTuple):
    """The arguments of `choose_experts` after its tensors, in its order."""

    topk: int
    num_groups: int
    topk_groups: int
    softmax: bool
    normalize: bool = False
    scaling: float = 1.0

    def __str__(self) -> str:
        groups = f" in {self.topk_groups} of {self.num_groups} groups" if self.num_groups > 1 else ""
        return f"{self.topk} experts{groups} by {'softmax' if self.softmax else 'sigmoid'}"


# --- norms and rotations


def norm(cone: Cone) -> float:
    """The epsilon of the RMSNorm (`norm_rope.rms_norm`) that a cone computes from the first columns of its source."""
    _keeps_dtype(cone)
    if len(cone.tensors) != 1:
        raise Refusal(f"it reads {len(cone.tensors)} other tensors, not just a weight")
    rank = _last(cone.result)
    (weight,) = cone.tensors
    numel, dtype = math.prod(shape_where_symbols_are(weight, 1)), tensor_of(weight).dtype
    if numel != rank or dtype != tensor_of(cone.source).dtype:
        raise Refusal(f"its weight is {dtype} {list(tensor_of(weight).shape)}")
    eps = _epsilon(cone, rank, weight)
    for values, got, bound in _draws(cone):
        x, w = _as_matrix(values[cone.source])[:, :rank], values[weight].flatten()
        expected = rms_norm(x, w, eps)
        if not agree(got, expected, expected.abs(), bound):
            raise _something_else(x)
    return eps


def rotation(cone: Cone) -> Rotation:
    """The rotation that a cone computes from the last columns of its source."""
    rope = _last(cone.result)

    def rotates(one: Rotation, x: Tensor, *others: Any) -> bool:
        return _rotates(one, x[:, -rope:], *others)

    return _rotation(cone, rope, 3, rotates)


def query_rotation(cone: Cone, *, heads: int, rope: int) -> Rotation:
    """The rotation that a cone computes from the last `rope` columns of each head.

    The source has all columns of one head, then those of the next one. The result has a head's rotated columns, or all
    of its columns with the others unchanged.
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

    return _rotation(cone, rope, 4, rotates)


def _rotation(cone: Cone, rope: int, flags: int, rotates: Callable[..., bool]) -> Rotation:
    """The first rotation for which `rotates` is true: it computes the result from the source.

    flags: the number of fields of a `Rotation` for which both values are tried.
    """
    _keeps_dtype(cone)
    angles = cone.tensors
    is_complex = [tensor_of(leaf).is_complex() for leaf in angles]
    if is_complex not in ([True], [False, False]):
        raise Refusal(f"it reads {len(angles)} other tensors, not just cos and sin")
    widths = {_last(leaf) for leaf in angles}
    if rope % 2 or widths not in ([{rope // 2}] if is_complex[0] else [{rope // 2}, {rope}]):
        raise Refusal(f"{rope} columns with cos and sin of {sorted(widths)} columns")
    left = [Rotation(*choice) for choice in itertools.product((False, True), repeat=flags)]
    left = [one for one in left if not (is_complex[0] and one.sin_first)]
    for values, got, bound in _draws(cone):
        x = _as_matrix(values[cone.source])
        parts = [_as_matrix(part) for leaf in angles for part in _parts(values[leaf])]
        if any(len(part) != len(x) for part in parts):
            raise Refusal("cos and sin are not those of each token")
        left = [one for one in left if rotates(one, x, parts, got, bound)]
        if not left:
            raise _something_else(x)
    return left[0]


def _rotates(one: Rotation, x: Tensor, parts: list[Tensor], got: Tensor, bound: float) -> bool:
    cos, sin = reversed(parts) if one.sin_first else parts
    none = torch.zeros_like(cos)
    terms = (
        rotate(x.abs(), cos.abs(), none, *one.layout) + rotate(x.abs(), none, sin.abs(), *one.layout).abs()
    )
    return agree(got, rotate(x, cos, sin, *one.layout), terms, bound)


def _keeps_dtype(cone: Cone) -> None:
    dtype = tensor_of(cone.source).dtype
    if dtype != tensor_of(cone.result).dtype:
        raise Refusal(f"the projection is {dtype}")


def _something_else(x: Tensor) -> Refusal:
    return Refusal(f"it computes something else in {str(x.dtype).removeprefix('torch.')}")


def _epsilon(cone: Cone, rank: int, weight: fx.Node) -> float:
    """The epsilon, computed from tiny tokens: all other terms of `y = x w / sqrt(mean(x^2) + eps)` are known."""
    values = draw([cone], 3, 0, _source_times(cone, _TINY), cone.half)
    x = _as_matrix(values[cone.source])[:, :rank].double()
    y = cone.run(values, cone.half).double()
    square = x.square().mean(-1, keepdim=True)
    eps = float(((x * values[weight].flatten().double() / y).square() - square).median())
    if not math.isfinite(eps) or eps < 1e-3 * float(square.max()):
        return 0.0
    near = [number for number in cone.numbers if abs(number - eps) < 1e-3 * eps]
    return min(near, key=lambda number: abs(number - eps)) if near else eps


def _draws(cone: Cone) -> Iterator[tuple[dict[fx.Node, Any], Tensor, float]]:
    """Values for a cone's source and leaves, the cone's result, and the allowed error relative to the terms."""
    dtype = tensor_of(cone.source).dtype
    for half in (cone.half, None) if cone.half else (None,):
        computed = torch.float32 if half is not None else dtype
        eps = torch.finfo(computed).eps
        bound = eps if computed in HALF else 64 * eps
        huge = 1e3 if computed == torch.float16 else 1e8
        for seed, (number, scale) in enumerate(((2, 1.0), (5, 1e-3), (3, huge), (2, 1.0))):
            values = draw([cone], number, seed, _source_times(cone, scale), half)
            if seed == 3:
                _as_matrix(values[cone.source])[0, [0, -1]] = torch.nan
            yield values, cone.run(values, half), bound


def _source_times(cone: Cone, scale: float) -> Callable[[fx.Node], float]:
    return lambda node: scale if node is cone.source else 1.0


def _parts(angles: Tensor) -> tuple[Tensor, ...]:
    return torch.view_as_real(angles).unbind(-1) if angles.is_complex() else (angles,)


def _as_matrix(x: Tensor) -> Tensor:
    return x.flatten(0, -2) if x.dim() > 2 else x


def _last(node: fx.Node) -> int:
    return int(tensor_of(node).shape[-1])


# --- the choice of experts


@dataclass(frozen=True)
class _Routed:
    """Logits, a bias, and the results of the cones; experts are in the order of their ids."""

    logits: Tensor
    bias: Tensor | None
    weights: Tensor
    ids: Tensor


def routing(weights: Cone, ids: Cone) -> ExpertChoice:
    """The rule by which two cones choose and weigh experts; the source of both is the logits."""
    logits = tensor_of(weights.source)
    for cone, dtype in ((weights, torch.float32), (ids, torch.int64)):
        if tensor_of(cone.result).dtype != dtype:
            raise Refusal(f"the result is {tensor_of(cone.result).dtype}")
    biases = list(dict.fromkeys([*weights.tensors, *ids.tensors]))
    if len(biases) > 1 or any(tensor_of(bias).numel() != logits.shape[-1] for bias in biases):
        raise Refusal(f"it reads {len(biases)} other tensors, not just a bias")
    draws = [_routed(weights, ids, biases, seed, scale) for seed, scale in enumerate((1.0, 0.1, 4.0))]
    left = list(_rules(logits.shape[-1], draws[0].ids.shape[-1]))
    for drawn in draws:
        left = [rule for rule in left if torch.equal(_chosen(rule, drawn)[1], drawn.ids)]
    if not left:
        raise Refusal("it chooses experts by another rule")
    # Without a bias and groups sigmoid and softmax choose the same experts; their weights differ.
    for rule, normalize, scaling in itertools.product(left, (False, True), (1.0, *weights.numbers)):
        found = rule._replace(normalize=normalize, scaling=scaling)
        pairs = [(_chosen(found, drawn)[0], drawn.weights) for drawn in draws]
        if all(agree(got, expected, expected.abs(), 1e-5) for got, expected in pairs):
            return found
    raise Refusal("it weighs experts by another rule")


def _rules(experts: int, topk: int) -> Iterator[ExpertChoice]:
    """All candidate rules, those with the fewest groups first."""
    for groups, softmax in itertools.product(range(1, min(experts, _MAX_GROUPS) + 1), (False, True)):
        size = experts // groups
        if experts % groups or (groups > 1 and size < 2 and not softmax):
            continue
        for kept in range(1, groups) if groups > 1 else (1,):
            if topk <= kept * size:
                yield ExpertChoice(topk, groups, kept, softmax)


def _chosen(rule: ExpertChoice, drawn: _Routed) -> tuple[Tensor, Tensor]:
    return _in_order(*choose_experts(drawn.logits, drawn.bias, *rule))


def _in_order(weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    order = ids.argsort(-1)
    return weights.gather(-1, order), ids.gather(-1, order)


def _routed(weights: Cone, ids: Cone, biases: Sequence[fx.Node], seed: int, scale: float) -> _Routed:
    source = weights.source
    values = draw((weights, ids), _ROUTED_TOKENS, seed, lambda node: scale if node is source else 0.2)
    results = [cone.run({node: values[node] for node in (source, *cone.leaves)}) for cone in (weights, ids)]
    bias = values[biases[0]].flatten() if biases else None
    return _Routed(values[source], bias, *_in_order(*results))


# --- gated MLPs


def mlp(cone: Cone, *, intermediate: int) -> tuple[int, ...]:
    """The indices in a cone's tensors of an MLP's weights gate, up and down, then of their scales for FP8.

    intermediate: the MLP's width must be a multiple of it.
    """
    products = [op_arguments(node) for node in cone.nodes if is_call(node, fp8_linear_op)]
    scale_of = {given["first"]: given["first_scale"] for given in products if given["second"] is None}
    weights = [node for node in cone.tensors if node not in scale_of.values()]
    if len(weights) != 3 or len(scale_of) not in (0, 3) or any(tensor_of(w).dim() != 2 for w in weights):
        raise Refusal(f"it reads {len(cone.tensors)} other tensors, not three matrices")
    dtype = tensor_of(cone.source).dtype
    if {tensor_of(node).dtype for node in (cone.result, *weights) if node not in scale_of} != {dtype}:
        raise Refusal("it mixes dtypes")

    def scale(node: fx.Node) -> float:
        return _last(node) ** -0.5 if node in weights and node not in scale_of else 1.0

    values = draw([cone], 3, 0, scale, cone.half)
    matrices = {weight: values[weight] for weight in weights}
    for weight, scales in scale_of.items():
        values[scales] = (
            values[scales].abs() + 0.5
        )  # there are fewer blocks than columns, so the results are larger
        matrices[weight] = fp8.dequantize(values[weight], values[scales])
    x, got = _as_matrix(values[cone.source]), _as_matrix(cone.run(values, cone.half))
    for order in itertools.permutations(weights):
        gate, up, down = (matrices[node].to(x.dtype) for node in order)
        if not gate.shape == up.shape == down.shape[::-1] or len(gate) % intermediate:
            continue
        expected = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
        if agree(got, expected, expected.abs() + 0.1 * expected.abs().max(), 1e-4):
            scales = [scale_of[node] for node in order if node in scale_of]
            return tuple(cone.tensors.index(node) for node in (*order, *scales))
    raise Refusal("it does not compute a gated MLP")
