"""Make every token's bits independent of the other tokens of the batch.

    before                                          after

    x ─> linear(w) ─> softmax ─> mla_decode         x ─> batch_invariant_matmul(w) ─> amax, exp, batch_invariant_sum
                                                         ─> mla_decode(batch_invariant=True)

It runs with `options={"batch_invariant": True}` only, after all other passes; norms are ops with a fixed order of the
sum by then (`fuse_rms_norm`). The pass fixes the order of all other sums:

- products, whose kernel depends on the number of tokens and may split the sum, become an op of ours;
- sums along the last dimension (softmax, router weights), whose order depends on what Inductor fuses with them,
  become an op too, or elementwise sums if they are short;
- our attention and experts use batch-invariant candidates.

All other operations are elementwise or move numbers. Under the settings that come with this pass (`INDUCTOR_OPTIONS`)
their rounding does not depend on fusion.

Calls without a fixed order raise an error that names them: another attention, convolutions, a user's ops, sums over
several dimensions.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from mla_compile.errors import MLAError
from mla_compile.ops.attention.masked_decode import masked_decode_op
from mla_compile.ops.attention.mla_attention import attention_op
from mla_compile.ops.attention.select_keys import decode_select_op, prefill_select_op
from mla_compile.ops.attention.sparse import sparse_op
from mla_compile.ops.library import FLAG
from mla_compile.ops.linear.matmul import batch_invariant_matmul_op as matmul_op
from mla_compile.ops.linear.matmul import matmul_by_head_op
from mla_compile.ops.reductions.last_dim import row_sum_op
from mla_compile.passes.emit import change_arguments, inline, set_example_value
from mla_compile.passes.nodes import (
    arguments,
    function_name,
    namespace_of,
    op_arguments,
    tensor_of,
    value_of,
    values_of,
)
from mla_compile.passes.provenance import where
from mla_compile.torch_internals import overload_of, statically_known_true

INDUCTOR_OPTIONS = {
    # A value in half precision is rounded after every op, fused or not, and no product is added unrounded.
    "emulate_precision_casts": True,
    # Inductor does not select kernels by timing, in any mode.
    "deterministic": True,
}
SHORT = 32
"""Sums of at most this many numbers are written out, so that Inductor can fuse them."""

_Rule = Callable[[fx.Node, dict[str, Any]], Any]
"""Maps a call and its arguments by name to the call's replacement; None keeps the call."""


def make_batch_invariant(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> fx.GraphModule:
    """Rewrite `gm` in place and return it.

    Raises:
        MLAError: a call without a batch-invariant implementation; the message names the module and the line.
    """
    for node in gm.graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        target, name = overload_of(node.target), function_name(node)
        namespace = namespace_of(target)
        if namespace == "mla_compile":
            _set_flag(node, target)
        elif namespace not in (None, "aten", "prims"):
            raise _refused(node, f"the op {target}", "write it with torch functions")
        elif (name in _REFUSED or _REFUSED_FAMILIES.search(name)) and _is_float(node):
            hint = "write it with F.linear, sums along the last dimension and elementwise functions"
            raise _refused(node, f"`{name}`", _ATTENTION_HINT if "attention" in name else hint)
        elif name in _RULES:
            _replace(node, name)
    return gm


def _replace(node: fx.Node, name: str) -> None:
    """Replace a call by its rule."""
    names, rule = _RULES[node.target if node.target in _RULES else name]
    given = arguments(node, names)
    if given is None:
        raise _refused(node, f"`{name}` with arguments other than {', '.join(names)}")
    found = rule(node, given)
    if found is None:
        return
    if tensor_of(found).dtype != tensor_of(node).dtype:  # under autocast
        what = f"`{name}` of {tensor_of(found).dtype} that returns {tensor_of(node).dtype}"
        raise _refused(node, what, "call the model outside autocast")
    node.replace_all_uses_with(found)
    node.graph.erase_node(node)


def _refused(node: fx.Node, what: str, hint: str = "") -> MLAError:
    got = f"{what} in {where(node)}"
    return MLAError("batch_invariant", "calls whose bits can be made independent of the batch", got, hint)


def _set_flag(node: fx.Node, target: Any) -> None:
    """Make a call of our op batch-invariant, if the op has that flag."""
    if target in (masked_decode_op, attention_op):
        hint = "use `mla_compile.mla_attention` and the backend's own passes"
        raise _refused(node, f"the op {target}", hint)
    if target in (sparse_op, decode_select_op, prefill_select_op):
        raise _refused(node, f"the op {target}", "use a model without an indexer")
    if target is matmul_by_head_op:
        node.target = matmul_op  # it has the same arguments
        set_example_value(node)
    elif FLAG in op_arguments(node):
        change_arguments(node, **{FLAG: True})  # raises if a named backend is not batch-invariant


# --- products


def _linear(node: fx.Node, given: dict[str, Any]) -> Any:
    _check_weights(node, given["weight"])
    if tensor_of(given["weight"]).dim() != 2:
        raise _refused(node, "a product by a vector", "write its weight as [1, in_features]")
    return inline(node, _linear_of, (given["input"], given["weight"], given.get("bias")))


def _check_weights(node: fx.Node, weights: Any) -> None:
    """Raises an error if the right side has dynamic sizes: its columns, which may affect an element's bits, must not be
    tokens."""
    shape = tensor_of(weights).shape
    if not all(isinstance(size, int) for size in shape):
        hint = "put the weights on the right: parameters, buffers, or tensors marked by torch._dynamo.mark_static"
        raise _refused(node, f"a product by {list(shape)}, whose sizes vary,", hint)


def _linear_of(x: Any, weight: Any, bias: Any) -> Any:
    out = _product_of(x, weight.t())
    return out if bias is None else out + bias


def _product_of(x: Any, w: Any) -> Any:
    """`x @ w`, `[..., k]` by `[k, n]`."""
    *leading, k = x.shape
    out = matmul_op(x.reshape(-1, 1, k), w.unsqueeze(0))
    return out.reshape(*leading, w.shape[1])


def _matmul(node: fx.Node, given: dict[str, Any]) -> Any:
    a, b = given["input"], given["other"]
    left, right = tensor_of(a), tensor_of(b)
    if left.dim() >= 1 and statically_known_true(left.shape[-1] == 1):
        return None  # nothing is added
    if left.dim() >= 2 and right.dim() == 2:
        _check_weights(node, b)
        return inline(node, _product_of, (a, b))
    raise _refused(node, f"a product of {list(left.shape)} by {list(right.shape)}", "write it as F.linear")


# --- sums along the last dimension


def _is_float(node: Any) -> bool:
    values = values_of(node) if isinstance(node, fx.Node) else []
    return any(
        isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()) for value in values
    )


def _adds_floats(node: fx.Node, x: fx.Node, dim: Any) -> bool:
    """Whether a call adds floating point numbers (integers become these if a floating point `dtype` is given).

    Raises an error if the sum is not along the last dimension alone.
    """
    if not _is_float(node):
        return False
    value = tensor_of(x)
    dims = dim if isinstance(dim, (tuple, list)) else (dim,)
    is_last = value.dim() > 0 and len(dims) == 1 and dims[0] in (-1, value.dim() - 1)
    if not is_last or statically_known_true(value.shape[-1] == 0):
        what = f"a sum over dimensions {dim} of {list(value.shape)}"
        raise _refused(node, what, "sum over the last one alone, which is not empty")
    if tensor_of(node).is_complex() or value.is_complex():
        raise _refused(node, f"a sum of {value.dtype}", "add up the real and the imaginary part")
    return True


def _along_last(emit: Callable[[Any], Any]) -> _Rule:
    """A rule for `emit`, which sums along the last dimension and keeps that dimension, with size 1 or unchanged."""

    def rule(node: fx.Node, given: dict[str, Any]) -> Any:
        if not _adds_floats(node, given["input"], given.get("dim")):
            return None

        def call(x: Any) -> Any:
            x = x if given.get("dtype") is None else x.to(given["dtype"])
            out = emit(x).to(value_of(node).dtype)
            return out if len(out.shape) == tensor_of(node).dim() else out.squeeze(-1)

        return inline(node, call, (given["input"],))

    return rule


def _sum(x: Any) -> Any:
    """The sum along the last dimension, in float32 or wider."""
    *leading, columns = x.shape
    if isinstance(columns, int) and 0 < columns <= SHORT:
        total = _wide(x[..., 0:1])
        for i in range(1, columns):
            total = total + _wide(x[..., i : i + 1])
        return total
    return row_sum_op(x.reshape(-1, columns)).reshape(*leading, 1)


def _wide(x: Any) -> Any:
    return x.to(torch.promote_types(tensor_of(x.node).dtype, torch.float32))


def _mean(x: Any) -> Any:
    return _sum(x) / x.shape[-1]


def _softmax(x: Any) -> Any:
    x = _wide(x)
    weights = torch.exp(x - x.amax(-1, True))
    return weights / _sum(weights)


def _log_softmax(x: Any) -> Any:
    x = _wide(x)
    shifted = x - x.amax(-1, True)
    return shifted - torch.log(_sum(torch.exp(shifted)))


def _logsumexp(x: Any) -> Any:
    x = _wide(x)
    highest = x.amax(-1, True)
    highest = torch.where(torch.isfinite(highest), highest, 0.0)  # infinities, as in torch, not NaN
    return highest + torch.log(_sum(torch.exp(x - highest)))


_PRODUCT = ("input", "other")
_REDUCTION = ("input", "dim", "keepdim", "dtype")
_RULES: dict[Any, tuple[tuple[str, ...], _Rule]] = {
    "linear": (("input", "weight", "bias"), _linear),
    **dict.fromkeys(("matmul", "mm", "bmm"), (_PRODUCT, _matmul)),
    "sum": (_REDUCTION, _along_last(_sum)),
    "mean": (_REDUCTION, _along_last(_mean)),
    "logsumexp": (("input", "dim", "keepdim"), _along_last(_logsumexp)),
    "softmax": (("input", "dim", "dtype"), _along_last(_softmax)),
    "log_softmax": (("input", "dim", "dtype"), _along_last(_log_softmax)),
    F.softmax: (("input", "dim", "_stacklevel", "dtype"), _along_last(_softmax)),
    F.log_softmax: (("input", "dim", "_stacklevel", "dtype"), _along_last(_log_softmax)),
}
"""For a torch function, or the name of a function or method: the names of its arguments, and its rule."""

_ATTENTION_HINT = "attention is `mla_compile.mla_attention`"
_WITHOUT_A_RULE = """
    flex_attention multi_head_attention_forward
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution
    addmm addbmm baddbmm addmv mv dot vdot inner tensordot bilinear trace einsum
    grouped_mm scaled_mm scaled_grouped_mm chain_matmul multi_dot matrix_power matrix_exp
    rms_norm layer_norm native_layer_norm group_norm batch_norm instance_norm local_response_norm _fused_rms_norm
    normalize norm vector_norm matrix_norm renorm cdist pdist dist cosine_similarity pairwise_distance
    sum_to_size nansum nanmean softmin gumbel_softmax _softmax _log_softmax var std var_mean std_mean cov corrcoef
    prod cumsum cumprod logcumsumexp trapz trapezoid cumulative_trapezoid
    index_add index_reduce scatter_add scatter_reduce segment_reduce bincount embedding_bag fold interpolate
    avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    lp_pool1d lp_pool2d lp_pool3d lstm gru rnn_tanh rnn_relu kl_div
    triangular_solve cholesky_solve cholesky_inverse lu_solve
"""
"""Functions that reduce floating point numbers along a dimension; for aten's ops, the name without the overload."""
_REFUSED = set(_WITHOUT_A_RULE.split())
_REFUSED_FAMILIES = re.compile("^_?(linalg|fft|sparse|scaled_dot_product)_|_cell$|_loss|cross_entropy")
"""Matches the names of more such functions: `gru_cell`, and aten's `_scaled_dot_product_flash_attention`."""
