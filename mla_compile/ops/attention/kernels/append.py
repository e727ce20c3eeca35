"""Write new latents into their pages, in one launch: a program copies one token's latent, or nothing."""

import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.device import power_of_two


@triton.jit
def append_kernel(
    kv_c,  # [tokens, RANK], last stride 1
    k_pe,  # [tokens, ROPE], last stride 1
    kv_cache,  # [slots, RANK + ROPE], contiguous
    slot_mapping,  # int64 [tokens]; -1 writes nowhere
    kv_c_stride,
    k_pe_stride,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`kv_cache[slot_mapping[token]] = kv_c[token] | k_pe[token]`; grid `[tokens]`."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    column = tl.arange(0, BLOCK)
    latent = tl.load(kv_c + token * kv_c_stride + column, mask=column < RANK)
    rotary = tl.load(
        k_pe + token * k_pe_stride + (column - RANK), mask=(column >= RANK) & (column < RANK + ROPE)
    )
    value = tl.where(column < RANK, latent, rotary)
    target = kv_cache + slot * (RANK + ROPE) + column
    tl.store(target, value, mask=(column < RANK + ROPE) & (slot >= 0))


def append_triton(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """`mla_append` on the GPU or in Triton's interpreter."""
    tokens, rank = kv_c.shape
    rope = k_pe.shape[1]
    append_kernel[(tokens,)](
        kv_c,
        k_pe,
        kv_cache,
        slot_mapping.contiguous(),
        kv_c.stride(0),
        k_pe.stride(0),
        RANK=rank,
        ROPE=rope,
        BLOCK=power_of_two(rank + rope),
        num_warps=4,
    )
