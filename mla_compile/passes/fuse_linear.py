"""Products by weights select their kernel at run time; two products of one input become one.

    before                           after

    x ─┬─> linear(a) ─> ...          x ─> fused_linear(a, b) ─┬─> [..., :n] ─> ...
       └─> linear(b) ─> ...                                   └─> [..., n:] ─> ...
    y ───> linear(c) ─> ...          y ─> fused_linear(c) ─> ...

One graph serves all numbers of tokens, and the fastest kernel depends on that number, so the op selects it in each
call. At few tokens a product takes about as long with twice the columns, so two products of one input are joined: the
compressed queries and latents of MLA, gate and up of an MLP. Their weights must be adjacent in memory, as
`models/layout.py` makes them, so nothing is copied. The op checks this in each call, so weights may move afterwards.

Joined products become columns of a wider result. Products are left if a reader may depend on their strides: an op of
another library, a view that would become a copy, the graph's output.

Products by FP8 weights are ops that select their kernel already. They are joined too, if the blocks of the second
weight begin where those of the first end.

The pass acts on GPUs only: on the CPU the time of few tokens is that of reading the weights, which joining does not
change. `TORCH_LOGS="+mla_compile"` logs the products that were joined, and adjacent weights that were not.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from mla_compile.ops.adjacent import lies_before
from mla_compile.ops.dispatch import first_serves
from mla_compile.ops.linear.fp8 import is_one_matrix
from mla_compile.ops.linear.fp8_linear import fp8_linear_op
from mla_compile.ops.linear.matmul import FUSED_LINEAR, MAX_FEW, fused_linear_op
from mla_compile.passes.effects import at_once, erase_dead
from mla_compile.passes.emit import inline, set_example_value
from mla_compile.passes.nodes import (
    arguments,
    function_name,
    is_call,
    is_tensor,
    op_arguments,
    op_name,
    tensor_of,
)
from mla_compile.passes.provenance import where
from mla_compile.passes.rewrite import Refusal, rewrite
from mla_compile.passes.strides import views_of
from mla_compile.torch_internals import is_wrapper


def fuse_linear(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> fx.GraphModule:
    """Rewrite `gm` in place and return it; a graph without products by weights is left untouched."""
    erase_dead(gm.graph)
    products = [node for node in gm.graph.nodes if _is_product(node)]
    joined = [node for node in products if _pays(node)]
    pairs = {max(pair): pair for pair in _pairs(joined)}
    few = {node for node in products if _may_have_few_tokens(node)}
    rewrite(gm.graph, pairs.__contains__, lambda node: _join(*pairs[node]))

    def choose(node: fx.Node) -> None:
        node.replace_all_uses_with(inline(node, _product_of, (_input(node), *_weight(node))))

    rewrite(gm.graph, few.__contains__, choose)
    return gm


def _pays(product: fx.Node) -> bool:
    """Whether joining may be faster: on the CPU it is not."""
    return tensor_of(product).is_cuda


def _arguments(node: fx.Node) -> dict[str, Any]:
    if is_call(node, fp8_linear_op):
        fp8 = op_arguments(node)
        return {"input": fp8["x"], "weight": fp8["first"], "scale": fp8["first_scale"], "bias": fp8["second"]}
    given = arguments(node, ("input", "weight", "bias"))
    return {} if given is None else {"scale": None, **given}


def _input(product: fx.Node) -> Any:
    return _arguments(product)["input"]


def _weight(product: fx.Node) -> tuple[Any, ...]:
    """The weight, followed by its scales if it is FP8."""
    given = _arguments(product)
    return (given["weight"],) if given["scale"] is None else (given["weight"], given["scale"])


def _may_have_few_tokens(product: fx.Node) -> bool:
    """Whether a kernel for few tokens may run. Torch selects the best product for a static number of tokens."""
    if len(_weight(product)) == 2:
        return False  # the FP8 op selects its kernel already
    x = tensor_of(_input(product))
    tokens = x.numel() // x.shape[-1] if all(type(size) is int for size in x.shape) and x.shape[-1] else None
    return first_serves(FUSED_LINEAR, x) and (tokens is None or tokens <= MAX_FEW)


def _is_product(node: fx.Node) -> bool:
    """Whether a node multiplies tokens, not one vector, by a weight that is an input of the graph, without a bias."""
    is_fp8 = is_call(node, fp8_linear_op)
    if not is_fp8 and (function_name(node) != "linear" or not is_tensor(node)):
        return False
    given = _arguments(node)
    if given.get("bias") is not None:
        return False
    x: Any = given.get("input")
    weight: Any = given.get("weight")
    if not (is_tensor(x) and is_tensor(weight)) or weight.op not in ("placeholder", "get_attr"):
        return False
    if is_fp8:  # the op's declaration has checked the rest
        return True
    values = [tensor_of(n) for n in (node, x, weight)]
    if any(map(is_wrapper, values)) or len({value.dtype for value in values}) != 1:  # autocast
        return False
    is_fixed = all(type(size) is int for size in (*values[2].shape, values[2].storage_offset()))
    return values[1].dim() > 1 and values[2].dim() == 2 and is_fixed and not values[0].requires_grad


def _pairs(products: Sequence[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Pairs of products of one input whose weights are adjacent, in the order of the weights; each product once."""
    waiting: dict[fx.Node, list[fx.Node]] = {}
    for product in products:
        others = waiting.setdefault(_input(product), [])
        for other in others:
            pair = next((p for p in ((other, product), (product, other)) if _are_adjacent(*p)), None)
            if pair is not None:
                others.remove(other)
                yield pair
                break
        else:
            others.append(product)


def _are_adjacent(first: fx.Node, second: fx.Node) -> bool:
    one, other = (tuple(map(tensor_of, _weight(product))) for product in (first, second))
    if len(one) == len(other) == 2:
        return is_one_matrix(*one, *other)
    return len(one) == len(other) and lies_before(one[0], other[0])


def _join(first: fx.Node, second: fx.Node) -> str:
    """Replace two products with one."""
    before, after = sorted((first, second))
    read = [_input(first), *_weight(first), *_weight(second)]
    if not max(read) < before or not at_once(before, after, read):
        raise Refusal("an operand may be made or written to between the products")
    value = tensor_of(first)
    columns = value.shape[-1], tensor_of(second).shape[-1]
    wide = value.new_empty(*value.shape[:-1], sum(columns))
    views: list[fx.Node] = []
    for product, part in zip((first, second), wide.split(columns, dim=-1)):
        found = views_of(product, part)
        if isinstance(found, fx.Node):
            raise Refusal(f"`{op_name(found)}` may depend on the strides of a product")
        views += found

    def parts_of(x: Any, *weights: Any) -> Any:
        out = _product_of(x, *weights)
        return out[..., : columns[0]], out[..., columns[0] :]

    parts = inline(before, parts_of, read)
    for product, part in zip((first, second), parts):
        product.replace_all_uses_with(part)
    for view in views:
        set_example_value(view)
    return f"a product with {where(before)}"


def _product_of(x: Any, *weights: Any) -> Any:
    """`fused_linear` for tokens in any number of dimensions; `fp8_linear` for two weights with their scales."""
    if len(weights) == 4:
        return fp8_linear_op(x, *weights)
    if len(x.shape) == 2:
        return fused_linear_op(x, *weights)
    out = fused_linear_op(x.flatten(0, -2), *weights)
    return out.view(*x.shape[:-1], out.shape[-1])
