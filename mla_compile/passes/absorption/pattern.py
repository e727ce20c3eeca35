"""Find attention over keys and values that a matrix product expands from latents.

    keys[b, h, t, :]   = cat(sum_r kv_c[b, t, r] * w_uk[h, :, r],  k_pe[b, t, :])
    values[b, h, t, :] =     sum_r kv_c[b, t, r] * w_uv[h, :, r]

What makes it MLA: the latents do not depend on the head, the weights on neither row nor key, and keys of each head
are joined with a rotary part that all heads share. Attention is `scaled_dot_product_attention`, or two products
of `[rows, heads, tokens, width]` with anything between them: the pass only moves brackets,
`q . (kv_c w_uk) = (q w_uk) . kv_c`, so scale, mask, softmax and dropout stay as they are written.
"""

from dataclasses import dataclass
from typing import Any

from torch import fx

from mla_compile.passes.absorption.index_map import Sizes, same
from mla_compile.passes.absorption.products import KEY, RANK, SUMMED, Product, as_product
from mla_compile.passes.absorption.trace import Nodes, Part, Reader, parts_of, reader, trace
from mla_compile.passes.nodes import argument, is_tensor, tensor_of, torch_name
from mla_compile.passes.rewrite import Refusal

_BETWEEN = 64
"""How many nodes may lie between scores and weights."""
_FUSED = "scaled_dot_product_attention"


@dataclass(frozen=True)
class Expansion:
    """`sum over r of latent * weight`, computed by `node`; `[rows, keys, rank]` and `[heads, rank, feature]`."""

    node: fx.Node
    latent: Reader
    weight: Reader
    sizes: dict[str, Any]

    @property
    def passed(self) -> Nodes:
        return (*self.latent.passed, *self.weight.passed)


@dataclass(frozen=True)
class Attention:
    """MLA: its two products, which are one node for a fused attention, with keys and values as they come from latents.

    nope, rope: the parts of the keys, of each head and shared by all; `shared` reads the latter, `[rows, keys, width]`.
    """

    scores: Product
    output: Product
    nope: Part
    rope: Part
    keys: Expansion
    shared: Reader
    values: Expansion

    @property
    def node(self) -> fx.Node:
        return self.output.node

    @property
    def fused(self) -> bool:
        return self.scores.node is self.node

    @property
    def readers(self) -> list[Reader]:
        """What is read in place of keys and values."""
        return [self.keys.latent, self.keys.weight, self.values.weight, self.shared]

    @property
    def passed(self) -> set[fx.Node]:
        """The nodes between that and the attention."""
        return {*self.keys.passed, *self.values.passed, *self.shared.passed}


def may_be_attention(node: fx.Node) -> bool:
    """Whether a node is a fused attention, or a product that may be the second one of an attention."""
    return torch_name(node) in (_FUSED, "matmul") and is_tensor(node) and tensor_of(node).dim() == 4


def attention_of(node: fx.Node) -> Attention | None:
    """The attention that a node computes, if that is MLA; None where it does not even look like it.

    Raises:
        Refusal: it looks like it, but cannot be moved to the latents.
    """
    fused = torch_name(node) == _FUSED
    found = _of_fused(node) if fused else _of_products(node)
    parts = None if found is None else _parts_of_keys(found[0])
    if found is None or parts is None:
        return None
    (scores, output), (nope, rope) = found, parts
    if fused:
        _check_arguments(node)
    query, *others = (tensor_of(x) for x in (*scores.operands, output.operands[1]))
    if any(x.dtype != query.dtype for x in others):
        raise Refusal("queries, keys and values differ in dtype")
    if not all(same(*pair) for x in others for pair in zip(x.shape[:-2], query.shape[:-2])):
        raise Refusal("keys have fewer heads or rows than queries: expand them to all heads")
    keys = _expansion(nope, scores.sizes, KEY, SUMMED, "keys of each head: ")
    shared = reader(rope.view, {**scores.sizes, SUMMED: rope.size}, "a" + KEY + SUMMED)
    if shared is None:
        raise Refusal("the keys that all heads share cannot be read as they lie")
    whole = Part(0, output.sizes["d"], output.right)
    values = _expansion(whole, output.sizes, SUMMED, "d", "its values are not up-projected from latents: ")
    if values.latent != keys.latent:
        raise Refusal("its values are made of other latents than its keys")
    return Attention(scores, output, nope, rope, keys, shared, values)


def _of_fused(node: fx.Node) -> tuple[Product, Product] | None:
    """`scaled_dot_product_attention`, taken for its two products.

    The weights have no node of their own: the query stands for their first dimensions, and is not read.
    """
    query, key, value = (argument(node, i, name) for i, name in enumerate(("query", "key", "value")))
    if not all(is_tensor(x) and tensor_of(x).dim() == 4 for x in (query, key, value)):
        return None
    scores = Product(node, (query, key), ("abcz", "abdz"), "abcd")
    return scores, Product(node, (query, value), ("abc", "abzd"), "abcd")


def _of_products(node: fx.Node) -> tuple[Product, Product] | None:
    """The product of weights and values, and the one before it that the weights are made of."""
    output = as_product(node)
    scores = None if output is None else _scores_behind(output.operands[0])
    if output is None or scores is None:
        return None
    four = all(tensor_of(x).dim() == 4 for x in (*scores.operands, *output.operands))
    return (scores, output) if four else None


def _scores_behind(weights: fx.Node) -> Product | None:
    """The product that attention weights were made of."""
    pending, seen = [weights], set[fx.Node]()
    while pending and len(seen) < _BETWEEN:
        source = pending.pop(0)
        product = as_product(source)
        if product is not None and may_be_attention(source):
            return product
        if source not in seen and product is None:
            seen.add(source)
            pending += source.all_input_nodes
    return None


def _check_arguments(node: fx.Node) -> None:
    if argument(node, 4, "dropout_p", 0.0) != 0.0:
        raise Refusal("dropout is on: call model.eval(), or pass dropout_p=0.0")
    if not isinstance(argument(node, 6, "scale"), (int, float, type(None))):
        raise Refusal("scale is not a number")


def _parts_of_keys(scores: Product) -> tuple[Part, Part] | None:
    """The part of each head and the one that all heads share; None where keys have no such parts."""
    parts = parts_of(scores.right, scores.sizes, SUMMED)
    if len(parts) != 2:
        return None
    first, second = (trace(part.view, scores.sizes).labels for part in parts)
    if (first ^ second) - {SUMMED, KEY} != {"b"}:
        return None
    return (parts[0], parts[1]) if "b" in first else (parts[1], parts[0])


def _expansion(part: Part, sizes: Sizes, key: str, feature: str, what: str) -> Expansion:
    """The latents and the weight that make up a part.

    Raises:
        Refusal: it is no such product of them.
    """
    sizes = {**sizes, feature: part.size}
    leaf = trace(part.view, sizes)
    product, name = as_product(leaf.node), torch_name(leaf.node) or leaf.node.name
    if product is None:
        reason = "is no matrix product of latents with a weight, so it cannot be moved to the queries"
        raise Refusal(f"{what}`{name}` {reason}")
    if product.biased:
        reason = "has a bias, which the absorbed form leaves out: use bias=False"
        raise Refusal(f"{what}the up-projection `{name}` {reason}")
    latent, weight = product.behind(leaf)
    complete = {key, RANK} <= latent.labels <= {"a", key, RANK}
    if not complete or weight.labels != {"b", RANK, feature}:
        reason = "multiplies no latents that all heads share with a weight that all keys share"
        raise Refusal(f"{what}`{name}` {reason}")
    sizes = {**sizes, RANK: product.sizes[SUMMED]}
    readers = reader(latent, sizes, "a" + key + RANK), reader(weight, sizes, "b" + RANK + feature)
    if readers[0] is None or readers[1] is None:
        reason = "the weight or the latents are laid out in a way that slices and `unflatten` cannot undo"
        raise Refusal(what + reason)
    return Expansion(leaf.node, readers[0], readers[1], sizes)
