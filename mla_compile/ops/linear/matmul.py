"""Matmuls by weights: `batch_invariant_matmul`, which gives a token the same bits in any batch, `fused_linear`, which
selects its kernel by the number of tokens, and `matmul_by_head`, whose result is contiguous.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_compile.ops.adjacent import lies_before, num_columns, one_matrix
from mla_compile.ops.batch_invariant import product_by_row
from mla_compile.ops.dispatch import (
    FLOATS,
    HALF,
    SOME,
    UNIT,
    Candidate,
    at_least,
    by_token,
    reference,
    triton,
)
from mla_compile.ops.library import define_op, empty, serving
from mla_compile.ops.linear import cublas

# The choice depends on the weights only, not on x, because two candidates need not give the same bits.
_TRITON = triton(
    "one order along k for all tiles",
    "mla_compile.ops.linear.kernels.matmul:matmul_triton",
    constraints={"dtype": FLOATS, "tokens": SOME, "groups": SOME, "k": SOME, "n": SOME},
    batch_invariant=True,
)
BATCH_INVARIANT_MATMUL = (
    replace(
        _TRITON,
        name="blocks",
        description="one order of the blocks along k; for few tokens the warps of a program split k",
        function="mla_compile.ops.linear.kernels.linear:matmul_in_order",
        constraints={
            **_TRITON.constraints,
            "dtype": HALF,
            "groups": UNIT,
            "k": range(1, 12 * 2**10 + 1),  # 118 us at 16,384 by 7,168 on an H100; triton takes 82
            "n": range(1, 2**13 + 1),
            "weights": ("one matrix",),
        },
        max_capability=(9, 0),  # on newer GPUs, tiles of few tokens may add in another order
    ),
    replace(
        _TRITON,
        name="by_head",
        description="one matrix per head: a program computes a tile of tokens and columns of a head",
        function="mla_compile.ops.linear.kernels.by_head:multiply_by_head_tiles",
        constraints={
            **_TRITON.constraints,
            "dtype": HALF,
            "groups": at_least(2),
            "k": range(1, 1025),
            "w.stride(1) or w.stride(2)": UNIT,
        },
        max_capability=(9, 0),
    ),
    Candidate(
        "cublas",
        "cuBLAS, if a probe found the same bits in any batch",
        "mla_compile.ops.linear.matmul:cublas.multiply",
        ("cuda",),
        constraints={"dtype": HALF, "tokens": SOME, "bits in any batch": ("equal",)},
        batch_invariant=True,
    ),
    _TRITON,
    by_token("mla_compile.ops.linear.matmul:matmul_by_row", "by_row"),
)


@define_op(
    table=BATCH_INVARIANT_MATMUL,
    layouts={"x": "tokens, groups, k", "w": "groups, k, n"},
    facts=lambda x, w: {
        "weights": "one matrix" if w.mT.is_contiguous() else "strided",
        "w.stride(1) or w.stride(2)": min(w.stride()[1:]),
        "bits in any batch": "equal" if cublas.has_same_bits(x, w) else "different",
    },
)
def batch_invariant_matmul(x: Tensor, w: Tensor) -> Tensor:
    """`out[t, g] = x[t, g] @ w[g]`; the bits of `out[t]` depend on `x[t]` and `w` only.

    They do not depend on the number of tokens, the position of a token among them or the strides of `x`. They may
    depend on the strides of `w`, the device and versions. Sums are in float32 at least, and rounded once.

    Compiling a call on CUDA probes cuBLAS once per shape of weights (`cublas.py`).

    Args:
        x: `[tokens, groups, k]`, float.
        w: `[groups, k, n]`, the dtype of `x`: a view of weights `[n, k]`, transposed, or one matrix for each head.

    Returns:
        `[tokens, groups, n]`, contiguous, in the dtype of `x`.

    Raises:
        MLAError: names the invalid argument.
    """
    cublas.has_same_bits(x, w)  # probe now, while no CUDA graph is recorded
    return empty(x, (x.shape[0], w.shape[0], w.shape[2]))


batch_invariant_matmul_op = torch.ops.mla_compile.batch_invariant_matmul.default


def matmul_by_row(x: Tensor, w: Tensor) -> Tensor:
    """`batch_invariant_matmul` in plain torch: every device and dtype."""
    return product_by_row(x, w)


MAX_FEW = 16
"""Most tokens for which half-precision matmuls have Triton candidates."""

# cuBLAS serves larger k. For one token on an H100 it takes 88 us at 16,384 by 7,168 (gemv 113) and 16.4 us at 8,192 by
# 2,048 (gemv 19.2). For two tokens at 8,192 and 10,240 gemv would be 1.5 us faster; one layer of a model has these.
_GEMV_K = range(1, 2**13)
FUSED_LINEAR = (
    triton(
        "one or two tokens: a program computes a few output columns, on CUDA cores",
        "mla_compile.ops.linear.kernels.linear:linear_gemv",
        constraints={
            "dtype": HALF,
            "tokens": range(1, 3),
            "k": _GEMV_K,
            "columns": SOME,
            "weights": ("one matrix",),
        },
    ),
    triton(
        "few tokens: the warps of a program split k",
        "mla_compile.ops.linear.kernels.linear:linear_blocks",
        name="blocks",
        constraints={
            "dtype": HALF,
            "tokens": range(3, MAX_FEW + 1),
            "k": SOME,
            "columns": range(1, 2**13 + 1),
            "weights": ("one matrix",),
        },
    ),
    Candidate(
        "reference",
        "plain torch, any device: one matmul if the weights are adjacent in memory, else two",
        "mla_compile.ops.linear.matmul:linear_torch",
    ),
    Candidate(
        "each_matmul",
        "batch_invariant_matmul by each weight; if both use blocks, one matmul by both",
        "mla_compile.ops.linear.matmul:linear_by_each",
        batch_invariant=True,
    ),
)


@define_op(
    table=FUSED_LINEAR,
    layouts={"x": "tokens, k", "first": "n_first, k", "second": "n_second, k or None"},
    facts=lambda first, second: {
        "columns": num_columns(first, second),
        "weights": "one matrix" if is_one_matrix(first, second) else "two",
    },
)
def fused_linear(
    x: Tensor, first: Tensor, second: Tensor | None = None, batch_invariant: bool = False
) -> Tensor:
    """`x @ first.T`, or `[x @ first.T | x @ second.T]`, in one matmul if the weights are adjacent in memory.

    Each call selects a candidate by the number of tokens and the addresses of the weights (see `lies_before`), so
    weights may be moved between calls.

    Args:
        x: `[tokens, k]`, float; any stride between tokens.
        first, second: `[n_first, k]` and `[n_second, k]`, the dtype of `x`.
        batch_invariant: whether a token's bits must depend on that token and the weights only. They are then those of
            `batch_invariant_matmul` by each weight, adjacent or not.

    Returns:
        `[tokens, n_first + n_second]`, contiguous, in the dtype of `x`.

    Raises:
        MLAError: names the invalid argument.
    """
    if batch_invariant:
        probe_weights(x, first, second)
    return empty(x, (x.shape[0], num_columns(first, second)))


def probe_weights(x: Tensor, first: Tensor, second: Tensor | None) -> None:
    """Probe cuBLAS for the weights of `fused_linear`, while no CUDA graph is recorded."""
    for weight in (first, second):
        if weight is not None:
            cublas.has_same_bits(x.unsqueeze(1), _as_matrix(weight))


fused_linear_op = torch.ops.mla_compile.fused_linear.default


MATMUL_BY_HEAD = (
    # Within these limits it is faster than cuBLAS on an H200.
    triton(
        "one or two tokens: a program computes a few columns of a head, on CUDA cores",
        "mla_compile.ops.linear.kernels.by_head:multiply_by_head_triton",
        constraints={
            "dtype": HALF,
            "tokens": range(1, 3),
            "heads": range(1, 65),
            "k": range(1, 1025),
            "n": SOME,
            "w.stride(1) or w.stride(2)": UNIT,
        },
    ),
    triton(
        "few tokens: a program computes a few columns of a head, on tensor cores",
        "mla_compile.ops.linear.kernels.by_head:multiply_by_head_tiles",
        name="tiles",
        constraints={
            "dtype": HALF,
            "tokens": range(3, 33),
            "heads": SOME,
            "k": range(1, 1025),
            "n": SOME,
            "w.stride(1) or w.stride(2)": UNIT,
        },
    ),
    Candidate(
        "cublas",
        "cuBLAS, which writes each head's columns in place",
        "mla_compile.ops.linear.matmul:cublas.multiply_by_head",
        ("cuda", "hip"),
    ),
    reference("mla_compile.ops.linear.matmul:matmul_by_head_torch"),
)


@define_op(
    table=MATMUL_BY_HEAD,
    layouts={"x": "tokens, heads, k", "w": "heads, k, n"},
    facts=lambda w: {"w.stride(1) or w.stride(2)": min(w.stride()[1:])},
)
def matmul_by_head(x: Tensor, w: Tensor) -> Tensor:
    """`out[t, h] = x[t, h] @ w[h]`, one matmul that writes the heads of a token adjacent in memory.

    The result of `torch.bmm` has heads first, and the next layer's matmul would need a copy.

    Args:
        x: `[tokens, heads, k]`, float.
        w: `[heads, k, n]`, the dtype of `x`.

    Returns:
        `[tokens, heads, n]`, contiguous, in the dtype of `x`.

    Raises:
        MLAError: names the invalid argument.
    """
    return empty(x, (x.shape[0], w.shape[0], w.shape[2]))


matmul_by_head_op = torch.ops.mla_compile.matmul_by_head.default


def matmul_by_head_torch(x: Tensor, w: Tensor) -> Tensor:
    """`matmul_by_head` in plain torch: every device and dtype."""
    return torch.einsum("thk,hkn->thn", x, w).contiguous()


def is_one_matrix(first: Tensor, second: Tensor | None) -> bool:
    """Whether the weights of a call form one contiguous matrix in memory."""
    return first.is_contiguous() if second is None else lies_before(first, second)


def linear_torch(x: Tensor, first: Tensor, second: Tensor | None) -> Tensor:
    """`fused_linear` in plain torch: every device and dtype."""
    with torch.autocast(x.device.type, enabled=False):
        if second is None or lies_before(first, second):
            return F.linear(x, one_matrix(first, second))
        return torch.cat([F.linear(x, first), F.linear(x, second)], dim=1)


def linear_by_each(x: Tensor, first: Tensor, second: Tensor | None) -> Tensor:
    """`fused_linear` with the bits of `batch_invariant_matmul`.

    The candidate `blocks` adds in the same order in one matmul by both weights.
    """
    x = x.unsqueeze(1)
    weights = [_as_matrix(weight) for weight in (first, second) if weight is not None]
    if second is not None and lies_before(first, second):
        chosen = [serving("batch_invariant_matmul", (x, weight)) for weight in weights]
        if all(candidate.name == "blocks" for candidate in chosen):
            joined: Tensor = chosen[0].load()(x, _as_matrix(one_matrix(first, second)))
            return joined.squeeze(1)
    products = [batch_invariant_matmul_op(x, weight) for weight in weights]
    return (products[0] if second is None else torch.cat(products, dim=2)).squeeze(1)


def _as_matrix(weight: Tensor) -> Tensor:
    """A weight `[n, k]` as `batch_invariant_matmul` takes it, `[1, k, n]`."""
    return weight.t().unsqueeze(0)
