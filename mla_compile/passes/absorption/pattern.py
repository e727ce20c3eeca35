"""Find attention over keys and values that a matrix product expands from latents.

    keys[b, h, t, :]   = cat(sum_r kv_c[b, t, r] * w_uk[h, :, r],  k_pe[b, t, :])
    values[b, h, t, :] =     sum_r kv_c[b, t, r] * w_uv[h, :, r]

What makes it MLA: the latents do not depend on the head, the weights on neither row nor key, and keys of each head
are joined with a rotary part that all heads share, in one tensor or as a second product added to the scores.
Attention is `scaled_dot_product_attention`, or two products with anything between them: the pass only moves brackets,
`q . (kv_c w_uk) = (q w_uk) . kv_c`, so scale, mask, softmax and dropout stay as they are written.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from mla_compile.passes.absorption.index_map import Sizes, same
from mla_compile.passes.absorption.products import RANK, SUMMED, Product, as_product
from mla_compile.passes.absorption.trace import Nodes, Part, Reader, parts_of, reader, trace
from mla_compile.passes.nodes import argument, is_tensor, tensor_of, torch_name

_BETWEEN = 64
"""How many nodes may lie between scores and weights."""


@dataclass(frozen=True)
class Expansion:
    """`sum over r of latent * weight`, computed by `node`."""

    node: fx.Node
    latent: Reader
    weight: Reader
    sizes: dict[str, Any]
    rows: str
    heads: str

    @property
    def passed(self) -> Nodes:
        return (*self.latent.passed, *self.weight.passed)


@dataclass(frozen=True)
class Keys:
    """The keys that `scores` reads: of each head, and shared by all heads where these are in the same tensor."""

    scores: Product
    nope: Part
    rope: Part | None
    expansion: Expansion
    shared: Reader | None


@dataclass(frozen=True)
class Attention:
    """MLA: its two products, which are one node for a fused attention, with keys and values as they come from latents.

    `values` is read with the letters of `output`, `keys` with those of its scores.
    """

    keys: Keys
    output: Product
    values: Expansion

    @property
    def node(self) -> fx.Node:
        return self.output.node

    @property
    def fused(self) -> bool:
        return self.keys.scores.node is self.node

    @property
    def readers(self) -> list[Reader]:
        """What is read in place of keys and values."""
        keys = self.keys
        shared = [keys.shared] if keys.shared else []
        return [keys.expansion.latent, keys.expansion.weight, self.values.weight, *shared]

    @property
    def passed(self) -> set[fx.Node]:
        """The nodes between that and the attention."""
        shared = self.keys.shared.passed if self.keys.shared else ()
        return {*self.keys.expansion.passed, *self.values.passed, *shared}


def find(graph: fx.Graph) -> Iterator[tuple[fx.Node, Attention | str]]:
    """Every attention that is MLA, or looks like it, and why it stays as it is."""
    scores: dict[fx.Node, Keys | str] = {}
    for node in list(graph.nodes):
        name = torch_name(node)
        if name == "scaled_dot_product_attention":
            found = _fused(node)
            if found is not None:
                yield node, found
        elif name in ("matmul", "bmm", "einsum") and (product := as_product(node)) is not None:
            origin = _scores_behind(product.operands[0], scores)
            if origin is not None:
                yield node, _attention(scores.pop(origin), product)
            elif (keys := _keys(product)) is not None:
                scores[node] = keys


def _fused(node: fx.Node) -> Attention | str | None:
    """`scaled_dot_product_attention`, taken for its two products."""
    query, key, value = (argument(node, i, name) for i, name in enumerate(("query", "key", "value")))
    if not all(is_tensor(x) and tensor_of(x).dim() == 4 for x in (query, key, value)):
        return None
    keys = _keys(Product(node, (query, key), ("abcz", "abdz"), "abcd"), "ab")
    if keys is None:
        return None
    if argument(node, 4, "dropout_p", 0.0) != 0.0:
        return "dropout is on: call model.eval(), or pass dropout_p=0.0"
    if any(tensor_of(x).dtype != tensor_of(query).dtype for x in (key, value)):
        return "queries, keys and values differ in dtype"
    leading = tensor_of(query).shape[:-2]
    if not all(same(*pair) for x in (key, value) for pair in zip(tensor_of(x).shape, leading)):
        return "keys have fewer heads or rows than queries: expand them to all heads"
    if not isinstance(argument(node, 6, "scale"), (int, float, type(None))):
        return "scale is not a number"
    # The weights have no node of their own: the query stands for their first dimensions, and is not read.
    return _attention(keys, Product(node, (query, value), ("abc", "abzd"), "abcd"), "ab")


def _keys(scores: Product, lead: str = "") -> Keys | str | None:
    """The keys of MLA; None where they do not even look like them.

    lead: the labels of rows and heads, where it must be these.
    """
    new = set(scores.out) - set(scores.terms[0])
    if len(new) != 1 or not (lead or _whole(scores)):
        return None
    (key,), sizes = new, scores.sizes
    parts = parts_of(scores.right, sizes, SUMMED)
    both = [*parts, *(_added(scores) if len(parts) == 1 and not lead else [])]
    if len(both) != 2:
        return None
    labels = [trace(part.view, sizes).labels for part in both]
    (heads, *more) = (labels[0] ^ labels[1]) - {SUMMED, key} or {""}
    if not heads or more:
        return None
    nope, rope = both if heads in labels[0] else both[::-1]
    expansion = _expansion(nope, sizes, key, SUMMED, lead)
    if isinstance(expansion, str):
        return f"keys of each head: {expansion}"
    if len(parts) == 1:
        return Keys(scores, nope, None, expansion, None) if nope is parts[0] else None
    met = reader(rope.view, {**sizes, SUMMED: rope.size}, expansion.rows + key + SUMMED)
    if met is None:
        return "the keys that all heads share cannot be read as they lie"
    return Keys(scores, nope, rope, expansion, met)


def _whole(product: Product) -> bool:
    """Whether the left operand is not broadcast: it has all of the result's dimensions but the right one's own."""
    shape = dict(zip(product.out, tensor_of(product.node).shape))
    left = zip(product.terms[0], tensor_of(product.operands[0]).shape)
    return all(label == SUMMED or same(size, shape[label]) for label, size in left)


def _added(scores: Product) -> list[Part]:
    """The keys of a product that is added to the scores."""
    users = [user for user in scores.node.users if torch_name(user) in ("add", "iadd")]
    addends = [node for user in users for node in user.all_input_nodes if node is not scores.node]
    products = [product for node in addends if (product := as_product(node)) is not None]
    return [Part(0, product.sizes[SUMMED], product.right) for product in products[:1]]


def _expansion(part: Part, sizes: Sizes, key: str, feature: str, lead: str) -> Expansion | str:
    """The latents and the weight that make up a part, or why it is no such product."""
    sizes = {**sizes, feature: part.size}
    leaf = trace(part.view, sizes)
    product, name = as_product(leaf.node), torch_name(leaf.node) or leaf.node.name
    if product is None:
        return f"`{name}` is no matrix product of latents with a weight, so it cannot be moved to the queries"
    if product.biased:
        return f"the up-projection `{name}` has a bias, which the absorbed form leaves out: use bias=False"
    latent, weight = product.behind(leaf)
    rows, heads = latent.labels - {key, RANK}, weight.labels - {feature, RANK}
    complete = {key, RANK} <= latent.labels and {feature, RANK} <= weight.labels
    led = not lead or (rows <= {lead[0]} and heads == {lead[1]})
    if not complete or not led or len(rows) > 1 or len(heads) != 1 or rows == heads:
        return f"`{name}` multiplies no latents that all heads share with a weight that all keys share"
    row, head = (lead[0], lead[1]) if lead else ("".join(rows), "".join(heads))
    sizes = {**sizes, RANK: product.sizes[SUMMED]}
    readers = reader(latent, sizes, row + key + RANK), reader(weight, sizes, head + RANK + feature)
    if readers[0] is None or readers[1] is None:
        return "the weight or the latents are laid out in a way that slices and `unflatten` cannot undo"
    return Expansion(leaf.node, readers[0], readers[1], sizes, row, head)


def _attention(keys: Keys | str, output: Product, lead: str = "") -> Attention | str:
    if isinstance(keys, str):
        return keys
    new = set(output.out) - set(output.terms[0])
    if len(new) != 1 or not (lead or _whole(output)):
        return "its values are broadcast"
    (feature,) = new
    values = _expansion(Part(0, output.sizes[feature], output.right), output.sizes, SUMMED, feature, lead)
    if isinstance(values, str):
        return f"its values are not up-projected from latents: {values}"
    if values.latent != keys.expansion.latent:
        return "its values are made of other latents than its keys"
    return Attention(keys, output, values)


def _scores_behind(weights: fx.Node, scores: dict[fx.Node, Keys | str]) -> fx.Node | None:
    """The product that attention weights were made of."""
    pending, seen = [weights], set[fx.Node]()
    while pending and scores and len(seen) < _BETWEEN:
        source = pending.pop(0)
        if source in scores:
            return source
        if source not in seen and as_product(source) is None:
            seen.add(source)
            pending += source.all_input_nodes
    return None
