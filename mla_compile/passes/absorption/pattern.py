"""Find attention over keys and values that a matrix product expands from latents.

    keys[b, h, t, :]   = cat(sum_r kv_c[b, t, r] * w_uk[h, :, r],  k_pe[b, t, :])
    values[b, h, t, :] =     sum_r kv_c[b, t, r] * w_uv[h, :, r]

Three properties define MLA: the latents do not depend on the head, the weights depend on neither row nor key, and
each head's keys are joined with a rotary part that all heads share. Attention is `scaled_dot_product_attention`, or two
products of `[rows, heads, tokens, width]` with any nodes between them. The pass only reassociates the products,
`q . (kv_c w_uk) = (q w_uk) . kv_c`, so scale, mask, softmax and dropout do not change.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from mla_compile.passes.absorption.layout import Nodes, View, parts_of, same, view_of
from mla_compile.passes.nodes import argument, is_tensor, tensor_of, torch_name
from mla_compile.passes.rewrite import Refusal

_BETWEEN = 64
"""The most nodes that may lie between scores and weights."""
_FUSED = "scaled_dot_product_attention"


@dataclass(frozen=True)
class Expansion:
    """The sum over r of latents `[rows, keys, r]` and a weight `[heads, r, width]`, computed by `node`.

    dims: the latents' dimensions for rows and keys, then those of size 1, then that of r.
    first, step, within: head h owns the columns from `first + h * step` to `first + (h + 1) * step` of the weight; the
        expansion uses `width` of them, from `within` on.
    passed: the nodes from `node` to the attention.
    """

    node: fx.Node
    latents: fx.Node
    dims: tuple[int, ...]
    weight: fx.Node
    heads: int
    width: int
    first: int
    step: int
    within: int
    passed: Nodes

    def read_latents(self, x: Any) -> Any:
        return x.permute(self.dims).flatten(1, -2)

    def read_weight(self, w: Any) -> Any:
        w = w if torch_name(self.node) == "linear" else w.mT
        w = w.narrow(0, self.first, self.heads * self.step).unflatten(0, (self.heads, self.step))
        return w.narrow(1, self.within, self.width).mT


@dataclass(frozen=True)
class Attention:
    """MLA: its two products, `scores` and `node`, which are one node for a fused attention.

    nope, rope: begin and width of the query columns for each head's own part of the keys, and for the shared part.
    """

    node: fx.Node
    scores: fx.Node
    query: fx.Node
    nope: tuple[int, int]
    rope: tuple[int, int]
    keys: Expansion
    shared: View
    values: Expansion

    @property
    def fused(self) -> bool:
        return self.scores is self.node

    @property
    def passed(self) -> set[fx.Node]:
        """The nodes between the inputs of the absorbed form and the attention."""
        return {*self.keys.passed, *self.values.passed, *self.shared.passed}

    def read_shared(self, x: Any) -> Any:
        """The part of the keys that all heads share, `[rows, keys, width]`."""
        return x.permute(self.shared.dims).select(1, 0)


def may_be_attention(node: fx.Node) -> bool:
    """Whether a node is a fused attention, or a product that may be the second one of an attention."""
    return torch_name(node) in (_FUSED, "matmul") and _is_by_head(node)


def attention_of(node: fx.Node) -> Attention | None:
    """The MLA attention that a node computes; None if the node does not resemble one.

    Raises:
        Refusal: the node resembles MLA, but its products cannot be reassociated.
    """
    fused = torch_name(node) == _FUSED
    scores = node if fused else _scores_behind(argument(node, 0, "input"))
    if scores is None:
        return None
    names = ("query", "key") if fused else ("input", "other")
    query, key = (argument(scores, i, name) for i, name in enumerate(names))
    value = argument(node, 2, "value") if fused else argument(node, 1, "other")
    if not all(map(_is_by_head, (query, key, value))):
        return None
    parts = parts_of(view_of(key, (0, 1, 2, 3) if fused else (0, 1, 3, 2)))
    by_head = [not same(part.strides[1], 0) for part in parts]
    if sorted(by_head) != [False, True]:
        return None
    if fused and argument(node, 4, "dropout_p", 0.0) != 0.0:
        raise Refusal("dropout is on: call model.eval(), or pass dropout_p=0.0")
    if fused and not isinstance(argument(node, 6, "scale"), (int, float, type(None))):
        raise Refusal("scale is not a number")
    for x in map(tensor_of, (key, value)):
        if x.dtype != tensor_of(query).dtype:
            raise Refusal("queries, keys and values differ in dtype")
        if not all(map(same, x.shape[:2], tensor_of(query).shape[:2])):
            raise Refusal("keys have fewer heads or rows than queries: expand them to all heads")
    first, second = (part.sizes[3] for part in parts)
    places = [(0, first), (first, second)]
    nope, rope = parts if by_head[0] else parts[::-1]
    nope_place, rope_place = places if by_head[0] else places[::-1]
    keys = _expansion(nope, "keys of each head: ")
    values = _expansion(view_of(value), "its values are not up-projected from latents: ")
    if (values.latents, values.dims) != (keys.latents, keys.dims):
        raise Refusal("its values are made of other latents than its keys")
    return Attention(node, scores, query, nope_place, rope_place, keys, rope, values)


def _is_by_head(node: Any) -> bool:
    return is_tensor(node) and tensor_of(node).dim() == 4


def _scores_behind(weights: fx.Node) -> fx.Node | None:
    """The product from which attention weights are computed."""
    pending, seen = [weights], set[fx.Node]()
    while pending and len(seen) < _BETWEEN:
        source = pending.pop(0)
        if torch_name(source) == "matmul" and _is_by_head(source):
            return source
        if source not in seen:
            seen.add(source)
            pending += source.all_input_nodes
    return None


def _expansion(part: View, what: str) -> Expansion:
    """The latents and the weight whose product is a part of the keys or values.

    Raises:
        Refusal: the part is not a product of latents with a weight.
    """
    product = part.base
    name = torch_name(product) or product.name
    if name not in ("linear", "matmul"):
        reason = "is not a matrix product of latents with a weight, so it cannot be moved to the queries"
        raise Refusal(f"{what}`{name}` {reason}")
    if name == "linear" and argument(product, 2, "bias") is not None:
        reason = "has a bias, which the absorbed form leaves out: use bias=False"
        raise Refusal(f"{what}the up-projection `{name}` {reason}")
    latents = argument(product, 0, "input")
    weight = argument(product, 1, "weight" if name == "linear" else "other")
    dims = _dims_of_latents(part, tensor_of(product))
    if dims is None or tensor_of(weight).dim() != 2:
        reason = "does not multiply latents that all heads share with a weight that all keys share"
        raise Refusal(f"{what}`{name}` {reason}")
    columns = _columns(part, tensor_of(product))
    if columns is None:
        raise Refusal(f"{what}the weight is laid out in a way that slices and `unflatten` cannot undo")
    passed = (*part.passed, *part.path)
    return Expansion(product, latents, dims, weight, part.sizes[1], part.sizes[3], *columns, passed)


def _dims_of_latents(part: View, product: Tensor) -> tuple[int, ...] | None:
    """The dimensions of a product for a part's rows and keys, then those of size 1, then the last one."""
    rows, _, keys, _ = zip(part.sizes, part.strides)
    found: list[int] = []
    for size, stride in (rows, keys):
        for dim in range(product.dim() - 1):
            n, step = product.shape[dim], product.stride(dim)
            if dim not in found and (same(n, 1) if same(stride, 0) else same(n, size) and same(step, stride)):
                found.append(dim)
                break
    others = [dim for dim in range(product.dim() - 1) if dim not in found]
    alone = len(found) == 2 and all(same(product.shape[dim], 1) for dim in others)
    return (*found, *others, product.dim() - 1) if alone else None


def _columns(part: View, product: Tensor) -> tuple[int, int, int] | None:
    """`first`, `step` and `within` of an `Expansion` whose result is this part of a product."""
    (_, heads, _, width), (_, step, _, unit) = part.sizes, part.strides
    begin, columns = part.begin, product.shape[-1]
    if not all(isinstance(n, int) for n in (heads, width, step, begin, columns)) or not same(unit, 1):
        return None
    within = begin % step if step and begin % step + width <= step else 0
    first = begin - within
    return (first, step, within) if width <= step and 0 <= first <= columns - heads * step else None
