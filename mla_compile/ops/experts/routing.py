"""`moe_router`: the top-k experts of each token and their weights, in two launches.

Only the pass `fuse_router` inserts it, in place of a router's operations.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_compile.errors import MLAError
from mla_compile.ops.batch_invariant import product_by_row
from mla_compile.ops.dispatch import FLOATS, SOME, Allowed, by_token, reference, triton
from mla_compile.ops.dtypes import accumulate_dtype
from mla_compile.ops.library import define_op, empty
from mla_compile.torch_internals import statically_known_true

_CONSTRAINTS: dict[str, Allowed] = {
    "dtype": FLOATS,
    "weight.dtype": FLOATS,
    "tokens": range(1, 33),
    "experts": range(1, 1025),
}
_KERNEL = triton(
    "scores by a program per group of experts, then a top-k by a program per token",
    "mla_compile.ops.experts.kernels.routing:router_triton",
    constraints=_CONSTRAINTS,
    batch_invariant=True,
)
MOE_ROUTER = (
    _KERNEL,
    # cuBLAS is faster from 64 tokens on: for 544 tokens of GLM 8 us, not 20 (H200).
    replace(
        _KERNEL,
        name="product",
        description="scores by cuBLAS, then a top-k by a program per token",
        function="mla_compile.ops.experts.kernels.routing:router_product",
        constraints=_CONSTRAINTS | {"tokens": SOME},
        batch_invariant=False,
    ),
    reference("mla_compile.ops.experts.routing:router_torch"),
    replace(
        _KERNEL,
        name="triton_many",
        description="as triton, for any number of tokens",
        constraints=_CONSTRAINTS | {"tokens": SOME},
    ),
    by_token("mla_compile.ops.experts.routing:router_by_token"),
)


def choose_experts(
    logits: Tensor,
    bias: Tensor | None,
    topk: int,
    num_groups: int,
    topk_groups: int,
    softmax: bool,
    normalize: bool,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Weights and int64 ids of the chosen experts, both `[tokens, topk]`, from `logits` `[tokens, experts]`.

    Scores are either the sigmoid of the logits, and a group's score is the sum of its two best (DeepSeek-V3, arXiv
    2412.19437, section 2.1.2), or the softmax, and a group's score is its best (DeepSeek-V2, arXiv 2405.04434). `bias`
    affects the choice but not the weights.
    """
    scores = logits.softmax(dim=-1) if softmax else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    if topk_groups < num_groups:
        groups = torch.unflatten(
            choice, -1, (num_groups, -1)
        )  # under a default device Dynamo cannot trace the method
        group_scores = groups.topk(1 if softmax else 2, dim=-1).values.sum(dim=-1)
        group_ids = group_scores.topk(topk_groups, dim=-1, sorted=False).indices
        # Marking the best groups in their own scores makes no new tensor, so this stays token-wise.
        dropped = group_scores.scatter(-1, group_ids, torch.inf) < torch.inf
        choice = groups.masked_fill(dropped.unsqueeze(-1), -torch.inf).flatten(1)
    ids: Tensor = choice.topk(topk, dim=-1, sorted=False).indices
    weights = scores.gather(-1, ids)
    if normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * scaling, ids


ROUTER = {"x": "tokens, hidden", "weight": "float experts, hidden", "bias": "float experts or None"}
"""The layouts of a router's tensors."""


@define_op(
    table=MOE_ROUTER,
    layouts=ROUTER,
    returns=("weights", "ids"),
)
def moe_router(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    topk: int,
    num_groups: int,
    topk_groups: int,
    softmax: bool,
    normalize: bool,
    scaling: float,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """`choose_experts` of `x @ weight.T`, computed in float32 at least.

    Args:
        x: `[tokens, hidden]`, float; any stride between tokens.
        weight: `[experts, hidden]`, float.
        bias: `[experts]`, float, or None.

    Returns:
        weights: `[tokens, topk]`, float32 at least.
        ids: int64 `[tokens, topk]`, in unspecified order.
    """
    check_router(weight, topk, num_groups, topk_groups, softmax=softmax)
    return empty_choice(x, weight, topk)


def check_router(weight: Tensor, topk: int, num_groups: int, topk_groups: int, *, softmax: bool) -> None:
    """Check the integer arguments of `moe_router`."""
    experts = weight.shape[0]
    least = 1 if softmax or num_groups == 1 else 2
    if num_groups < 1 or experts % num_groups or experts < least * num_groups:
        raise MLAError(
            "num_groups", f"a divisor of {experts} with at least {least} experts per group", num_groups
        )
    if not 1 <= topk_groups <= num_groups:
        raise MLAError("topk_groups", f"between 1 and {num_groups} groups", topk_groups)
    most = topk_groups * (experts // num_groups)
    if statically_known_true(topk < 1) or statically_known_true(topk > most):
        raise MLAError("topk", f"between 1 and {most} experts", topk)


def empty_choice(x: Tensor, weight: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Empty weights and ids of `moe_router`."""
    shape = (x.shape[0], topk)
    wide = accumulate_dtype(torch.promote_types(x.dtype, weight.dtype))
    return empty(x, shape, wide), empty(x, shape, torch.int64)


moe_router_op = torch.ops.mla_compile.moe_router.default


def router_torch(x: Tensor, weight: Tensor, bias: Tensor | None, *rule: Any) -> tuple[Tensor, Tensor]:
    """`moe_router` in plain torch: every device and dtype. rule: the arguments of `choose_experts` from `topk` on."""
    dtype = accumulate_dtype(torch.promote_types(x.dtype, weight.dtype))
    return choose_experts(F.linear(x.to(dtype), weight.to(dtype)), bias, *rule)


def router_by_token(x: Tensor, weight: Tensor, bias: Tensor | None, *rule: Any) -> tuple[Tensor, Tensor]:
    """`router_torch` with separate operations for each token."""
    dtype = accumulate_dtype(torch.promote_types(x.dtype, weight.dtype))
    weights = x.new_empty(x.shape[0], rule[0], dtype=dtype)
    ids = x.new_empty(x.shape[0], rule[0], dtype=torch.int64)
    for token, row in enumerate(x.to(dtype)):
        logits = product_by_row(row.expand(1, 1, -1), weight.to(dtype).mT[None])[:, 0]
        weights[token], ids[token] = (part[0] for part in choose_experts(logits, bias, *rule))
    return weights, ids
