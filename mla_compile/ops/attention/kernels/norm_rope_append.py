"""Norm, rotation and write of new latents in one launch: a program does one token, or nothing.

Further programs rotate the tokens' queries, if there are any.
"""

import triton
import triton.language as tl

from mla_compile.ops.attention.kernels.latents import padded, rotary_of, store_latent
from mla_compile.ops.attention.kernels.rotation import Queries, angles_of, rotate_heads, rotation_of
from mla_compile.ops.attention.operands import NormRopeAppendOperands
from mla_compile.ops.dependent_launch import early_options, wait_for_kernel_before


@triton.jit
def _write_latent(
    kv_a,
    weight,
    angles,
    kv_cache,
    slot_mapping,
    token,
    kv_a_stride,
    eps,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    S: tl.constexpr,
):
    """`kv_cache[slot_mapping[token]] = rms_norm(kv_a[token, :RANK]) | rotate(kv_a[token, RANK:])`."""
    HALF: tl.constexpr = S.HALF
    # All loads are issued before the first wait, for the slot and for the sum over the threads.
    slot = tl.load(slot_mapping + token)
    source = kv_a + token * kv_a_stride
    column = tl.arange(0, padded(RANK))
    latent = tl.load(source + column, mask=column < RANK, other=0.0).to(tl.float32)
    factor = tl.load(weight + column, mask=column < RANK, other=0.0).to(tl.float32)
    pair = tl.arange(0, S.BLOCK_HALF)
    first_in = RANK + (2 * pair if S.INTERLEAVED_IN else pair)
    second_in = first_in + (1 if S.INTERLEAVED_IN else HALF)
    a = tl.load(source + first_in, mask=pair < HALF, other=0.0).to(tl.float32)
    b = tl.load(source + second_in, mask=pair < HALF, other=0.0).to(tl.float32)
    cos_a, sin_a, cos_b, sin_b = angles_of(angles, token, pair, S)

    target = kv_cache + slot * WIDTH
    rotary = rotary_of(target, RANK)
    dtype = kv_a.dtype.element_ty
    first_out = 2 * pair if S.INTERLEAVED_OUT else pair
    second_out = first_out + (1 if S.INTERLEAVED_OUT else HALF)
    inside = (pair < HALF) & (slot >= 0)
    tl.store(rotary + first_out, (a * cos_a - b * sin_a).to(dtype), mask=inside)
    tl.store(rotary + second_out, (b * cos_b + a * sin_b).to(dtype), mask=inside)

    scale = tl.rsqrt(tl.sum(latent * latent) / RANK + eps)
    # Rounded before the weight multiplies it, as in the models.
    normed = (latent * scale).to(dtype).to(tl.float32)
    store_latent(target, (normed * factor).to(dtype), slot >= 0, RANK)


@triton.jit
def norm_rope_append_kernel(
    kv_a,  # [tokens, RANK + 2 * HALF], last stride 1
    weight,  # [RANK]
    angles,  # `Angles`
    kv_cache,  # [slots, WIDTH], contiguous
    slot_mapping,  # int64 [tokens]; -1 writes nowhere
    queries,  # `Queries`
    kv_a_stride,
    eps,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    S: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid `[tokens, 1 + blocks of heads]`: the first program of a token writes its latent."""
    wait_for_kernel_before(EARLY)
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if block == 0:
        _write_latent(kv_a, weight, angles, kv_cache, slot_mapping, token, kv_a_stride, eps, RANK, WIDTH, S)
    elif queries.q_pe is not None:
        rotate_heads(queries, angles, token, block - 1, S)


def norm_rope_append_triton(operands: NormRopeAppendOperands) -> None:
    """`mla_norm_rope_append` on the GPU or in Triton's interpreter."""
    kv_a, weight, cos, sin, kv_cache, slot_mapping, eps, interleaved_in, interleaved_out, q_pe = operands
    tokens, width = kv_a.shape
    rank = weight.shape[0]
    half = (width - rank) // 2
    queries = Queries.of(q_pe)
    angles, sizes, blocks = rotation_of(cos, sin, queries.heads, interleaved_in, interleaved_out, half)
    norm_rope_append_kernel[(tokens, 1 + blocks)](
        *(kv_a, weight.contiguous(), angles, kv_cache, slot_mapping.contiguous(), queries),
        *(kv_a.stride(0), eps, rank, kv_cache.shape[2], sizes),
        num_warps=4,
        **early_options(kv_a),
    )
