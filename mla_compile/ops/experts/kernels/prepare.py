"""Tokens as sums of FP8 vectors and the sort of their pairs, in one launch: what products by FP8 weights begin with."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.dependent_launch import early_options, wait_for_kernel_before
from mla_compile.ops.experts.kernels.experts import padding_of
from mla_compile.ops.experts.kernels.pairs import Choices, Sort, sort_expert, sorted_like
from mla_compile.ops.experts.operands import ExpertOperands
from mla_compile.ops.linear import fp8
from mla_compile.ops.linear.kernels.fp8 import BLOCKS_AT_ONCE, padded_tokens, quantize_blocks, quantized_like


class Tokens(NamedTuple):
    """Tokens, as the arguments of a kernel with these names."""

    vectors: Any  # float8 [PARTS, stride, COLUMNS], contiguous
    scales: Any  # float32 [COLUMNS / BLOCK, stride]
    stride: Any


@triton.jit(do_not_specialize=["pairs", "tokens", "rows"])
def prepare_kernel(
    x,  # [tokens, HIDDEN], strides (x_stride, 1)
    vectors,  # of `Tokens`
    scales,
    x_stride,
    tokens,
    topk_ids,  # this and the others as in `sort_kernel`
    starts,
    order,
    places,
    pairs,
    row_lens,
    rows,
    q_len,
    experts,
    S: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`sort_expert`, or AT_ONCE blocks of a token; grid `[experts * S.SHARES + tokens, BLOCKS / AT_ONCE]`."""
    wait_for_kernel_before(EARLY)
    program = tl.program_id(0)
    sorting = experts * S.SHARES
    if program < sorting:
        if tl.program_id(1) == 0:
            choices = Choices(topk_ids, pairs, row_lens, rows, q_len)
            sort_expert(choices, program, experts, starts, order, places, S)
    else:
        token = (program - sorting).to(tl.int64)
        block = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
        quantize_blocks(x, vectors, scales, x_stride, token, padded_tokens(tokens), block, PARTS, BLOCKS)


def prepared(operands: ExpertOperands, parts: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The tokens as `quantized_like` has them, and the pairs as `sort_pairs` does, in one launch."""
    x, topk_ids, experts = operands.x, operands.topk_ids.contiguous(), operands.w_down.shape[0]
    x = x if x.stride(1) == 1 else x.contiguous()
    tokens, pairs, blocks = len(x), topk_ids.numel(), x.shape[1] // fp8.BLOCK
    vectors, scales = quantized_like(x, parts)
    starts, order, places = sorted_like(topk_ids, experts)
    sizes = Sort.of(topk_ids)
    prepare_kernel[(experts * sizes.SHARES + tokens, triton.cdiv(blocks, BLOCKS_AT_ONCE))](
        *(x, vectors, scales, x.stride(0), tokens, topk_ids, starts, order, places, pairs),
        *(*padding_of(operands.row_lens, operands.q_len), experts),
        S=sizes,
        PARTS=parts,
        BLOCKS=blocks,
        AT_ONCE=BLOCKS_AT_ONCE,
        **early_options(x),
        num_warps=4,
    )
    return vectors, scales, starts, order, places
