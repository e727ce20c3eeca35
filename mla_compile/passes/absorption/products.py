"""Matrix products of a graph, however they are spelled, as sums over labelled dimensions (an einsum)."""

import string
from dataclasses import dataclass
from typing import Any

from torch import fx

from mla_compile.passes.absorption.index_map import Index, index_of, same
from mla_compile.passes.absorption.trace import View
from mla_compile.passes.nodes import argument, is_tensor, tensor_of, torch_name

SUMMED = "z"
"""The label of the dimension that a product sums over; dimension i of its result has the i-th letter."""


@dataclass(frozen=True)
class Product:
    """`node[a, b, ...] = sum over z of left * right`; `sizes` has every label's size.

    `terms` and `out` are those of an einsum. In the views, dimensions of size 1 are read at 0 and have no label.
    """

    node: fx.Node
    operands: tuple[View, View]
    terms: tuple[str, str]
    sizes: dict[str, Any]
    out: str
    biased: bool = False


def as_product(node: fx.Node) -> Product | None:
    """`linear`, `matmul`, `@`, `bmm`, `mm` and two-operand `einsum` with one summed label; None for anything else."""
    found = _terms(node)
    if found is None:
        return None
    nodes, terms, biased = found
    if not all(is_tensor(n) and tensor_of(n).dtype == tensor_of(node).dtype for n in nodes):
        return None
    views, sizes = [], dict(zip(string.ascii_lowercase, tensor_of(node).shape))
    for operand, term in zip(nodes, terms):
        shape = tensor_of(operand).shape
        views.append(View(operand, tuple(index_of(label, size) for label, size in zip(term, shape))))
        sizes |= {label: size for label, size in zip(term, shape) if label == SUMMED}
    return Product(
        node, (views[0], views[1]), terms, sizes, string.ascii_lowercase[: tensor_of(node).dim()], biased
    )


def _terms(node: fx.Node) -> tuple[list[fx.Node], tuple[str, str], bool] | None:
    name = torch_name(node)
    if name not in ("linear", "matmul", "bmm", "mm", "einsum") or not is_tensor(node):
        return None
    out = string.ascii_lowercase[: tensor_of(node).dim()]
    if name == "einsum":
        return _einsum_terms(node, out)
    left = node.args[0] if node.args else None
    right = argument(node, 1, "weight" if name == "linear" else "other")
    if not (is_tensor(left) and is_tensor(right)):
        return None
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    ranks = tensor_of(left).dim(), tensor_of(right).dim()
    if name == "linear":
        terms = out[:-1] + SUMMED, out[-1] + SUMMED
        return ([left, right], terms, argument(node, 2, "bias") is not None) if ranks[1] == 2 else None
    if min(ranks) < 2:
        return None
    terms = out[:-1][-ranks[0] + 1 :] + SUMMED, (out[:-2] + SUMMED + out[-1])[-ranks[1] :]
    return [left, right], terms, False


def _einsum_terms(node: fx.Node, out: str) -> tuple[list[fx.Node], tuple[str, str], bool] | None:
    """The equation with the result's letters renamed to a, b, ... and the summed one to z."""
    equation, *operands = node.args
    if not isinstance(equation, str) or "->" not in equation or "." in equation or len(operands) != 2:
        return None
    inputs, _, output = equation.replace(" ", "").partition("->")
    left, right = inputs.split(",")
    summed = (set(left) | set(right)) - set(output)
    once = all(len(set(term)) == len(term) for term in (left, right, output))
    if len(summed) != 1 or not summed <= set(left) & set(right) or not once:
        return None
    if not all(is_tensor(operand) for operand in operands):
        return None
    rename = str.maketrans(output + summed.pop(), out + SUMMED)
    return list(operands), (left.translate(rename), right.translate(rename)), False  # type: ignore[arg-type]


def source_product(view: View, sizes: dict[str, Any], summed: str) -> tuple[Product, View, View] | None:
    """The product that computes a view's node, and what its operands are read at: the view's labels and `summed`."""
    product = as_product(view.node)
    if product is None:
        return None
    indices = dict(zip(product.out, view.indices)) | {SUMMED: Index(0, ((summed, 1),))}
    left, right = (
        View(
            operand.node,
            tuple(
                Index() if same(size, 1) else indices[label]
                for label, size in zip(term, tensor_of(operand.node).shape)
            ),
            (*view.steps, (view.node, operand.node)),
        )
        for operand, term in zip(product.operands, product.terms)
    )
    return product, left, right
