"""Rotation of queries in place: a program reads some heads of a token, then writes them."""

import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.attention.kernels.rotation import Queries, rotate_heads, rotation_of
from mla_compile.ops.dependent_launch import early_options, wait_for_kernel_before


@triton.jit
def rotate_queries_kernel(queries, angles, S: tl.constexpr, EARLY: tl.constexpr):
    """`rotate_heads` of all queries; grid `[tokens, blocks of heads]`."""
    wait_for_kernel_before(EARLY)
    rotate_heads(queries, angles, tl.program_id(0).to(tl.int64), tl.program_id(1), S)


def rotate_queries_triton(
    q_pe: Tensor, cos: Tensor, sin: Tensor, interleaved_in: bool, interleaved_out: bool
) -> None:
    """`mla_rotate_queries` on the GPU or in Triton's interpreter."""
    tokens, heads, rope = q_pe.shape
    angles, sizes, blocks = rotation_of(cos, sin, heads, interleaved_in, interleaved_out, rope // 2)
    rotate_queries_kernel[(tokens, blocks)](
        Queries.of(q_pe), angles, sizes, num_warps=4, **early_options(q_pe)
    )
