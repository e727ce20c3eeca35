"""`batch_invariant_matmul`: a product of which a token's row has the same bits whatever other rows there are."""

import torch
from torch import Tensor

from mla_compile.ops import cublas, validate
from mla_compile.ops.by_row import product_by_row
from mla_compile.ops.implementations import FLOATS, HALF, SOME, Implementation, triton
from mla_compile.ops.library import define_op, empty

# Who serves a call depends on the weights alone, not on x: two rows of the table need not give the same bits.
BATCH_INVARIANT_MATMUL = (
    Implementation(
        "cublas",
        "cuBLAS, where it was seen to give the same bits in any batch",
        "mla_compile.ops.matmul:matmul_cublas",
        ("cuda",),
        takes={"dtype": HALF, "tokens": SOME, "bits in any batch": ("equal",)},
        batch_invariant=True,
    ),
    triton(
        "one order along k, whatever the tile",
        "mla_compile.ops.kernels.matmul:matmul_triton",
        takes={"dtype": FLOATS, "tokens": SOME, "groups": SOME, "k": SOME, "n": SOME},
        batch_invariant=True,
    ),
    Implementation(
        "by_row",
        "plain torch, any device, each token by itself",
        "mla_compile.ops.matmul:matmul_by_row",
        batch_invariant=True,
    ),
)


@define_op(
    table=BATCH_INVARIANT_MATMUL,
    facts=lambda x, w: {
        "dtype": x.dtype,
        "tokens": x.shape[0],
        "groups": w.shape[0],
        "k": w.shape[1],
        "n": w.shape[2],
        "bits in any batch": "different" if cublas.fewest_tokens(x, w) is None else "equal",
    },
)
def batch_invariant_matmul(x: Tensor, w: Tensor) -> Tensor:
    """`out[t, g] = x[t, g] @ w[g]`, where the bits of `out[t]` depend on `x[t]` and `w` alone.

    They do not depend on the number of tokens, on the place of a token among them, nor on the strides of `x`. They may
    depend on those of `w`, on the device and on versions. Sums are in float32 at least, and rounded once.

    Compiling a call on CUDA tries, once for each shape of weights, whether cuBLAS may serve it.

    Args:
        x: `[tokens, groups, k]`, float.
        w: `[groups, k, n]`, the dtype of `x`: a view of weights `[n, k]`, transposed, or one matrix for each head.

    Returns:
        `[tokens, groups, n]`, contiguous, in the dtype of `x`.

    Raises:
        MLAError: an argument that is not so, named.
    """
    sizes = validate.Layouts()
    sizes.floats(x=(x, "tokens, groups, k"), w=(w, "groups, k, n"))
    cublas.fewest_tokens(x, w)  # now, while nothing is recorded
    return empty(x, (x.shape[0], w.shape[0], w.shape[2]))


batch_invariant_matmul_op = torch.ops.mla_compile.batch_invariant_matmul.default


def matmul_cublas(x: Tensor, w: Tensor) -> Tensor:
    """`batch_invariant_matmul` by cuBLAS, for weights of which its bits are known to be the same in any batch."""
    return cublas.multiply(x, w)


def matmul_by_row(x: Tensor, w: Tensor) -> Tensor:
    """`batch_invariant_matmul` in plain torch: every device and dtype."""
    return product_by_row(x, w)
