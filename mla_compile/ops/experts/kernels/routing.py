"""The router of a MoE layer: the scores of the experts, then the top-k of each token.

For few tokens the time is one read of the router's weights, so experts are divided among programs. Programs use CUDA
cores, where products of bfloat16 are exact in float32. Many tokens are divided among programs too.

`router_triton` gives a token the same bits in any batch: it adds an expert's dot product in one order, and a top-k
program takes one token. Among equal scores the lowest id wins.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.dependent_launch import early_options, wait_for_kernel_before
from mla_compile.ops.device import aligned_rows, power_of_two
from mla_compile.ops.dispatch import HALF

_EXPERTS = 4
"""Experts per program: 16 programs for a token of GLM (64 experts), 64 for one of DeepSeek-V3 (256 experts)."""
_TOKENS = 8
"""Tokens per program if there are many: 512 tokens read the weights from the cache 64 times."""
_FEW = 32
"""Most tokens with one token per program. On an H200 eight tokens in sequence take 6.5 us, one takes 2.4 us."""
_COLUMNS = 1024


@triton.constexpr_function
def _up_to_power(n: int) -> int:
    return 1 << (n - 1).bit_length()


class _Rule(NamedTuple):
    """How experts are chosen (see `choose_experts`), as a constant of a kernel."""

    topk: int
    num_groups: int
    topk_groups: int
    softmax: bool
    normalize: bool
    scaling: float


@triton.jit(do_not_specialize=["tokens"])
def logits_kernel(
    x,  # [tokens, HIDDEN], strides (x_stride, 1)
    weight,  # [EXPERTS, HIDDEN], contiguous
    logits,  # float32 [tokens, EXPERTS]
    x_stride,
    tokens,
    EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid `[blocks of experts, blocks of tokens]`."""
    wait_for_kernel_before(EARLY)
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    first = tl.program_id(1).to(tl.int64) * BLOCK_T
    for token in range(first, tl.minimum(first + BLOCK_T, tokens)):
        acc = tl.zeros([BLOCK_E, BLOCK_K], tl.float32)
        for start in range(0, HIDDEN, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            inside = (e < EXPERTS)[:, None] & (k < HIDDEN)[None, :]
            w = tl.load(weight + e[:, None] * HIDDEN + k[None, :], mask=inside, other=0.0).to(tl.float32)
            h = tl.load(x + token * x_stride + k, mask=k < HIDDEN, other=0.0).to(tl.float32)
            acc = tl.fma(w, tl.broadcast_to(h[None, :], [BLOCK_E, BLOCK_K]), acc)
        tl.store(logits + token * EXPERTS + e, tl.sum(acc, 1), mask=e < EXPERTS)


@triton.jit
def norm_logits_kernel(
    x,  # [tokens, HIDDEN], strides (x_stride, 1)
    residual,  # [tokens, HIDDEN], strides (residual_stride, 1)
    norm_weight,  # [HIDDEN] or None
    weight,  # [EXPERTS, HIDDEN], contiguous
    logits,  # float32 [tokens, EXPERTS]
    normed,  # [tokens, HIDDEN], contiguous
    total,  # [tokens, HIDDEN], contiguous: x + residual
    x_stride,
    residual_stride,
    eps,
    EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`logits_kernel` of the norm of a token, whose first program writes it. Grid `[blocks of experts, tokens]`."""
    wait_for_kernel_before(EARLY)
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    token = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < HIDDEN
    dtype = normed.dtype.element_ty
    # All loads are issued before the reduction over threads.
    of_experts = weight + e[:, None] * HIDDEN + k[None, :]
    w = tl.load(of_experts, mask=(e < EXPERTS)[:, None] & inside[None, :], other=0.0)
    factor = 1.0
    if norm_weight is not None:
        factor = tl.load(norm_weight + k, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + token * x_stride + k, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(residual + token * residual_stride + k, mask=inside, other=0.0).to(tl.float32)
    rounded = value.to(dtype)
    value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / HIDDEN + eps)
    # Rounded before the weight multiplies, as in `rms_norm.py`.
    h = ((value * scale).to(dtype).to(tl.float32) * factor).to(dtype)
    tl.store(
        logits + token * EXPERTS + e,
        tl.sum(w.to(tl.float32) * h.to(tl.float32)[None, :], 1),
        mask=e < EXPERTS,
    )
    first = inside & (tl.program_id(0) == 0)
    tl.store(total + token * HIDDEN + k, rounded, mask=first)
    tl.store(normed + token * HIDDEN + k, h, mask=first)


@triton.jit
def _first_best(values, ids, none: tl.constexpr):
    """The maximum of a vector and the lowest id that has it; the id is `none` if all values are NaN."""
    best = tl.max(values, 0)
    return best, tl.min(tl.where(values == best, ids, none), 0)


@triton.jit
def _within_best_groups(choice, g, p, PER_GROUP: tl.constexpr, RULE: tl.constexpr):
    """`choice` `[groups, experts of a group]`, -inf outside the best groups."""
    TOPK_GROUPS: tl.constexpr = RULE.topk_groups
    value = tl.max(choice, 1)
    if not RULE.softmax:
        at = tl.min(tl.where(choice == value[:, None], p, PER_GROUP), 1)
        value += tl.max(tl.where(p == at[:, None], -float("inf"), choice), 1)
    value = tl.where(g < RULE.num_groups, value, -float("inf"))
    kept = g < 0
    for _ in tl.static_range(TOPK_GROUPS):
        _, best = _first_best(
            tl.where(kept, -float("inf"), value), tl.where(kept, RULE.num_groups, g), RULE.num_groups
        )
        kept |= g == best
    return tl.where(kept[:, None], choice, -float("inf"))


@triton.jit
def choice_kernel(
    logits,  # float32 [tokens, EXPERTS]
    bias,  # [EXPERTS] or None
    weights,  # float32 [tokens, topk]
    ids,  # int64 [tokens, topk]
    EXPERTS: tl.constexpr,
    RULE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`choose_experts` of one token; grid `[tokens]`."""
    wait_for_kernel_before(EARLY)
    TOPK: tl.constexpr = RULE.topk
    GROUPS: tl.constexpr = RULE.num_groups
    PER_GROUP: tl.constexpr = EXPERTS // GROUPS
    BLOCK_K: tl.constexpr = _up_to_power(TOPK)
    BLOCK_G: tl.constexpr = _up_to_power(GROUPS)
    BLOCK_P: tl.constexpr = _up_to_power(PER_GROUP)
    token = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, BLOCK_G)
    p = tl.arange(0, BLOCK_P)[None, :]
    there = (g < GROUPS)[:, None] & (p < PER_GROUP)
    expert = tl.where(there, g[:, None] * PER_GROUP + p, EXPERTS)
    logit = tl.load(logits + token * EXPERTS + expert, mask=there, other=-float("inf"))
    if RULE.softmax:
        powers = tl.exp(logit - tl.max(tl.max(logit, 1), 0))
        scores = powers / tl.sum(tl.sum(powers, 1), 0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-logit))
    choice = scores
    if bias is not None:
        choice += tl.load(bias + expert, mask=there, other=0.0).to(tl.float32)
    choice = tl.where(there, choice, -float("inf"))
    if RULE.topk_groups < GROUPS:
        choice = _within_best_groups(choice, g, p, PER_GROUP, RULE)

    k = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    chosen_scores = tl.zeros([BLOCK_K], tl.float32)
    flat_choice = tl.reshape(choice, [BLOCK_G * BLOCK_P])
    flat_scores = tl.reshape(scores, [BLOCK_G * BLOCK_P])
    flat_expert = tl.reshape(expert, [BLOCK_G * BLOCK_P])
    for i in tl.static_range(TOPK):
        _, best = _first_best(flat_choice, flat_expert, EXPERTS)
        best = tl.minimum(best, EXPERTS - 1)  # all scores may be NaN
        mine = flat_expert == best
        chosen = tl.where(k == i, best, chosen)
        chosen_scores = tl.where(k == i, tl.sum(tl.where(mine, flat_scores, 0.0), 0), chosen_scores)
        flat_choice = tl.where(mine, -float("inf"), flat_choice)
        flat_expert = tl.where(mine, EXPERTS, flat_expert)  # not twice, even if only -inf is left
    if RULE.normalize:
        chosen_scores = chosen_scores / (tl.sum(chosen_scores, 0) + 1e-20)
    tl.store(weights + token * TOPK + k, chosen_scores * RULE.scaling, mask=k < TOPK)
    tl.store(ids + token * TOPK + k, chosen.to(tl.int64), mask=k < TOPK)


def router_triton(x: Tensor, weight: Tensor, bias: Tensor | None, *rule: Any) -> tuple[Tensor, Tensor]:
    """`moe_router` on the GPU or in Triton's interpreter."""
    x, stride = aligned_rows(x)
    (tokens, hidden), experts = x.shape, weight.shape[0]
    block_t = 1 if tokens <= _FEW else _TOKENS
    logits = x.new_empty(tokens, experts, dtype=torch.float32)
    logits_kernel[(triton.cdiv(experts, _EXPERTS), triton.cdiv(tokens, block_t))](
        x,
        weight.contiguous(),
        logits,
        stride,
        tokens,
        EXPERTS=experts,
        HIDDEN=hidden,
        BLOCK_T=block_t,
        BLOCK_E=_EXPERTS,
        BLOCK_K=min(_COLUMNS, power_of_two(hidden)),
        num_warps=4,
        **early_options(x),
    )
    return _choose(logits, bias, *rule)


def norm_router_triton(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    *rule: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`norm_router` for few tokens, on the GPU or in Triton's interpreter."""
    (x, x_stride), (residual, residual_stride) = aligned_rows(x), aligned_rows(residual)
    (tokens, hidden), experts = x.shape, weight.shape[0]
    logits = x.new_empty(tokens, experts, dtype=torch.float32)
    normed, total = (
        x.new_empty(tokens, hidden),
        x.new_empty(tokens, hidden),
    )  # separate tensors, as results of an op may not share memory
    block = power_of_two(hidden)
    norm_logits_kernel[(triton.cdiv(experts, _EXPERTS), tokens)](
        *(x, residual, None if norm_weight is None else norm_weight.contiguous(), weight.contiguous()),
        *(logits, normed, total, x_stride, residual_stride, eps),
        EXPERTS=experts,
        HIDDEN=hidden,
        BLOCK_E=_EXPERTS,
        BLOCK=block,
        num_warps=4 if block <= 2048 else 8,
        **early_options(x),
    )
    return normed, total, *_choose(logits, bias, *rule)


def router_product(x: Tensor, weight: Tensor, bias: Tensor | None, *rule: Any) -> tuple[Tensor, Tensor]:
    """`router_triton` with scores by cuBLAS, whose order of addition depends on the number of tokens."""
    if x.is_cuda and x.dtype == weight.dtype and x.dtype in HALF:
        logits = torch.mm(x, weight.T, out_dtype=torch.float32)  # exact products, added in float32
    else:
        logits = F.linear(x.float(), weight.float())
    return _choose(logits, bias, *rule)


def _choose(logits: Tensor, bias: Tensor | None, *rule: Any) -> tuple[Tensor, Tensor]:
    """`choose_experts` of float32 `[tokens, experts]`, contiguous."""
    (tokens, experts), topk = logits.shape, rule[0]
    weights = logits.new_empty(tokens, topk)
    ids = logits.new_empty(tokens, topk, dtype=torch.int64)
    bias = None if bias is None else bias.contiguous()
    choice_kernel[(tokens,)](
        *(logits, bias, weights, ids, experts, _Rule(*rule)), num_warps=1, **early_options(logits)
    )
    return weights, ids
