"""Find attention over keys and values that a matrix product expands from latents.

    keys[b, h, t, :]   = cat(sum_r kv_c[b, t, r] * w_uk[h, :, r],  k_pe[b, t, :])
    values[b, h, t, :] =     sum_r kv_c[b, t, r] * w_uv[h, :, r]

What makes it MLA: the latents do not depend on the head, the weights on neither row nor key, and keys of each head
are joined with a rotary part that all heads share, in one tensor or as a second product added to the scores.
Attention is `scaled_dot_product_attention`, or two products with anything between them: the pass only moves brackets,
`q . (kv_c w_uk) = (q w_uk) . kv_c`, so scale, mask, soft cap, softmax and dropout stay as they are written.
"""

import string
from collections.abc import Iterator
from typing import Any

from torch import fx

from mla_compile.passes.absorption.index_map import same
from mla_compile.passes.absorption.joins import Piece, trace_pieces
from mla_compile.passes.absorption.match import RANK, Expansion, Keys, Match, NearMiss, Part, Values
from mla_compile.passes.absorption.products import SUMMED, Product, as_product, source_product
from mla_compile.passes.absorption.trace import View, is_layout, read, trace
from mla_compile.passes.nodes import argument, is_tensor, tensor_of, torch_name


def find(graph: fx.Graph) -> Iterator[Match | NearMiss]:
    """Every attention of a graph that is MLA or nearly so, in order."""
    scores: dict[fx.Node, Keys | NearMiss] = {}
    for node in list(graph.nodes):
        name = torch_name(node)
        if name == "scaled_dot_product_attention" or str(node.target) == "flex_attention":
            yield from _fused(node)
        elif name in ("matmul", "bmm", "einsum"):
            product, matched = as_product(node), False
            for position in (0, 1) if product is not None else ():
                assert product is not None
                keys = _keys(product, position)
                if keys is not None:
                    scores[node] = keys
                values = _values(product, position)
                if isinstance(values, Values) and (origin := _scores_behind(values.weights.node, scores)):
                    found, matched = scores.pop(origin), True
                    yield Match(found, values) if isinstance(found, Keys) else found
            if matched:
                scores.pop(
                    node, None
                )  # weights beside which a sink was cut off look like keys that were joined
    for node, left in scores.items():
        unmatched = "its values are not up-projected from latents by a matrix product with a weight"
        yield left if isinstance(left, NearMiss) else NearMiss(node, unmatched)


def _fused(node: fx.Node) -> Iterator[Match | NearMiss]:
    """`scaled_dot_product_attention`, taken for its two products."""
    query, key, value = (argument(node, i, name) for i, name in enumerate(("query", "key", "value")))
    if not all(is_tensor(n) for n in (query, key, value)):
        return
    rank = tensor_of(query).dim()
    if rank not in (3, 4) or tensor_of(key).dim() != rank or tensor_of(value).dim() != rank:
        return
    lead = "ab"[: rank - 2]
    query_term, out_term = lead + "c" + SUMMED, lead + "cd"
    keys = _keys(_product(node, (query, query_term), (key, lead + "d" + SUMMED), out_term), 1)
    if keys is None:
        return
    # The weights have no node of their own: the query stands for them, and is not read.
    values = _values(_product(node, (query, query_term), (value, lead + SUMMED + "d"), out_term), 1)
    if isinstance(keys, NearMiss) or not isinstance(values, Values):
        reason = f"its values are not up-projected from latents: {values}"
        yield keys if isinstance(keys, NearMiss) else NearMiss(node, reason)
        return
    unsupported = _unsupported_arguments(node, query, key, value)
    yield NearMiss(node, unsupported) if unsupported else Match(keys, values)


def _product(node: fx.Node, left: tuple[fx.Node, str], right: tuple[fx.Node, str], out: str) -> Product:
    views, sizes = zip(*(read(*side) for side in (left, right)))
    return Product(node, views, (left[1], right[1]), {**sizes[0], **sizes[1]}, out)


def _unsupported_arguments(node: fx.Node, query: fx.Node, key: fx.Node, value: fx.Node) -> str | None:
    if str(node.target) == "flex_attention":
        return (
            "`flex_attention` stays as it is: use scaled_dot_product_attention, or the products spelled out"
        )
    if argument(node, 4, "dropout_p", 0.0) != 0.0:
        return "dropout is on: call model.eval(), or pass dropout_p=0.0"
    others = [tensor_of(n) for n in (key, value)]
    if any(other.dtype != tensor_of(query).dtype for other in others):
        return "queries, keys and values differ in dtype"
    leading = tensor_of(query).shape[:-2]
    if not all(same(size, mine) for other in others for size, mine in zip(other.shape[:-2], leading)):
        return "keys have fewer heads or rows than queries: expand them to all heads"
    scale = argument(node, 6, "scale")
    return None if scale is None or isinstance(scale, (int, float)) else "scale is not a number"


def _keys(product: Product, position: int) -> Keys | NearMiss | None:
    """The operand at `position` as the keys of MLA; None where it does not even look like them."""
    node, view, sizes = product.node, product.operands[position], product.sizes
    free = set(product.terms[position]) - set(product.terms[1 - position])
    if len(free) != 1:
        return None
    key = free.pop()
    pieces = trace_pieces(view, sizes, SUMMED)
    found = [_expansion(p.view, {**sizes, SUMMED: p.size}, key, SUMMED) for p in pieces]
    expansions = [source for source in found if isinstance(source, Expansion)]
    heads = _head_labels(expansions, pieces, key)
    if heads is None:
        behind = _joined_before(trace(view, sizes).node)
        return NearMiss(node, behind) if behind else None
    per_head = [bool(piece.view.labels & heads) for piece in pieces]
    if all(per_head) and not _shared_addend(node, heads, key):
        return None
    for source, by_itself in zip(found, per_head):
        if by_itself and isinstance(source, str):
            return NearMiss(node, f"keys of each head: {source}")
    parts = [
        Part(p.start, p.size, source if isinstance(source, Expansion) else p.view)
        for p, source in zip(pieces, found)
    ]
    query, term = product.operands[1 - position], product.terms[1 - position]
    return Keys(node, query, term, product.out, tuple(parts), sizes) if expansions else None


def _head_labels(expansions: list[Expansion], pieces: list[Piece], key: str) -> set[str] | None:
    """The labels that some keys depend on and shared ones do not; None where all keys are of one kind."""
    if expansions:
        return expansions[0].weight.labels - {SUMMED, RANK} or None
    every = set().union(*(piece.view.labels for piece in pieces))
    lacking = set().union(*(every - piece.view.labels for piece in pieces)) - {SUMMED, key}
    return lacking or None


def _expansion(view: View, sizes: dict[str, Any], key: str, feature: str) -> Expansion | str:
    """The latents and the weight that make up `view`, or why it is no such product."""
    leaf = trace(view, sizes)
    found = source_product(leaf, sizes, RANK)
    name = torch_name(leaf.node) or leaf.node.name
    if found is None:
        return f"`{name}` is no matrix product of latents with a weight, so it cannot be moved to the queries"
    product, left, right = found
    if product.biased:
        return f"the up-projection `{name}` has a bias, which the absorbed form leaves out: use bias=False"
    for latent, weight in ((left, right), (right, left)):
        apart = latent.labels & weight.labels == {RANK}
        if apart and key in latent.labels and feature in weight.labels:
            return Expansion(leaf.node, latent, weight, product.sizes[SUMMED])
    return f"`{name}` multiplies no latents that all heads share with a weight that all keys share"


def _values(product: Product, position: int) -> Values | str:
    """The operand at `position` as the values of MLA, or why it is none."""
    free = set(product.terms[position]) - set(product.terms[1 - position])
    if len(free) != 1:
        return "they are multiplied with no attention weights"
    found = _expansion(product.operands[position], product.sizes, SUMMED, free.pop())
    if isinstance(found, str):
        return found
    weights, term = product.operands[1 - position], product.terms[1 - position]
    return Values(product.node, weights, term, product.out, found, product.sizes)


def _shared_addend(node: fx.Node, heads: set[str], key: str) -> bool:
    """Whether the scores are the sum of this product and one with keys that all heads share."""
    for user in _through_scaling(node):
        if torch_name(user) not in ("add", "iadd", "add_"):
            continue
        for addend in user.all_input_nodes:
            product = as_product(_unscaled(addend))
            if product is not None and product.node is not node:
                views = [trace(view, product.sizes) for view in product.operands]
                if any(key in view.labels and not view.labels & heads for view in views):
                    return True
    return False


_SCALINGS = ("mul", "truediv", "div", "imul", "mul_", "div_", "itruediv")


def _is_scaling(node: fx.Node) -> bool:
    return torch_name(node) in _SCALINGS and len(node.all_input_nodes) == 1


def _through_scaling(node: fx.Node) -> list[fx.Node]:
    """Users of a product, or of a multiple of it."""
    users = list(node.users)
    return users + [later for user in users if _is_scaling(user) for later in user.users]


def _unscaled(node: fx.Node) -> fx.Node:
    while _is_scaling(node):
        node = node.all_input_nodes[0]
    return node


_BETWEEN = 64
"""How many nodes may lie between scores and weights."""


def _scores_behind(weights: fx.Node, scores: dict[fx.Node, Keys | NearMiss]) -> fx.Node | None:
    """The product that attention weights were made of."""
    pending, seen = [weights], set[fx.Node]()
    while pending and len(seen) < _BETWEEN:
        source = pending.pop(0)
        if source in scores:
            return source
        if source not in seen and as_product(source) is None:
            seen.add(source)
            pending += source.all_input_nodes
    return None


def _same_shape(a: fx.Node, b: fx.Node) -> bool:
    shapes = tensor_of(a).shape, tensor_of(b).shape
    return len(shapes[0]) == len(shapes[1]) and all(map(same, *shapes))


def _joined_before(node: fx.Node) -> str | None:
    """For keys that something else makes: whether they were joined of per-head and shared ones before it."""
    name, layout = torch_name(node) or node.name, is_layout(node)
    for _ in range(_BETWEEN):
        sources = [source for source in node.all_input_nodes if is_tensor(source)]
        if not layout or not is_layout(node):
            sources = [source for source in sources if _same_shape(source, node)]
        if not sources or as_product(node) is not None:
            return None
        node = sources[0]
        if _is_joined(node):
            why = (
                "mixes the heads of the joined keys with something else, or repeats them"
                if layout
                else "changes the keys after they were expanded and joined, a norm perhaps"
            )
            return f"`{name}` {why}"
    return None


def _is_joined(node: fx.Node) -> bool:
    """Whether some parts of a tensor depend on a dimension, heads that is, that the others do not."""
    labels = string.ascii_lowercase[: tensor_of(node).dim()]
    view, sizes = read(node, labels)
    for label in labels:
        pieces = trace_pieces(view, sizes, label)
        if len(pieces) > 1 and _head_labels([], pieces, label):
            return True
    return False
