"""`norm_router`: the addition of a residual, an RMSNorm and the router that reads it.

For few tokens each program that computes router scores norms its token itself, and one of them writes the norm for the
experts. Only the pass `fuse_norm_router` inserts it.
"""

from typing import Any

import torch
from torch import Tensor

from mla_compile.ops.dispatch import FLOATS, triton, unfused
from mla_compile.ops.experts.routing import ROUTER, check_router, empty_choice, moe_router_op
from mla_compile.ops.library import define_op, empty
from mla_compile.ops.norm.rms_norm import add_rms_norm_op

MAX_TOKENS = 32
"""Most tokens that the Triton candidate takes."""

NORM_ROUTER = (
    triton(
        "scores by a program per group of experts, which norms its token; then a top-k by a program per token",
        "mla_compile.ops.experts.kernels.routing:norm_router_triton",
        constraints={
            "dtype": FLOATS,
            "weight.dtype": FLOATS,
            "tokens": range(1, MAX_TOKENS + 1),
            "hidden": range(1, 2**13 + 1),
            "experts": range(1, 1025),
        },
    ),
    unfused("mla_compile.ops.experts.norm_router:norm_then_router"),
)


@define_op(
    table=NORM_ROUTER,
    layouts={**ROUTER, "residual": "tokens, hidden", "norm_weight": "hidden or None"},
    returns=("normed", "total", "weights", "ids"),
)
def norm_router(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    topk: int,
    num_groups: int,
    topk_groups: int,
    softmax: bool,
    normalize: bool,
    scaling: float,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`fused_add_rms_norm` of `x` and `residual`, and `moe_router` of its result, with the arguments of both."""
    check_router(weight, topk, num_groups, topk_groups, softmax=softmax)
    return empty(x, x.shape), empty(x, x.shape), *empty_choice(x, weight, topk)


norm_router_op = torch.ops.mla_compile.norm_router.default


def norm_then_router(
    x: Tensor, residual: Tensor, norm_weight: Tensor | None, eps: float, *router: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`norm_router` as two ops. router: the arguments of `moe_router` from `weight` on."""
    normed, total = add_rms_norm_op(x, residual, norm_weight, eps)
    return normed, total, *moe_router_op(normed, *router)
