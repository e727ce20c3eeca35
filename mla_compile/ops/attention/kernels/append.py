"""Write new latents into their pages, in one launch: a program copies one token's latent, or nothing."""

import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.attention.kernels.latents import padded, rotary_of, store_latent


@triton.jit
def append_kernel(
    kv_c,  # [tokens, RANK], last stride 1
    k_pe,  # [tokens, ROPE], last stride 1
    kv_cache,  # [slots, WIDTH], contiguous
    slot_mapping,  # int64 [tokens]; -1 writes nowhere
    kv_c_stride,
    k_pe_stride,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """`kv_cache[slot_mapping[token]] = kv_c[token] | k_pe[token]`; grid `[tokens]`."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    c = tl.arange(0, padded(RANK))
    p = tl.arange(0, padded(ROPE))
    latent = tl.load(kv_c + token * kv_c_stride + c, mask=c < RANK, other=0.0)
    rotary = tl.load(k_pe + token * k_pe_stride + p, mask=p < ROPE, other=0.0)
    target = kv_cache + slot * WIDTH
    store_latent(target, latent, slot >= 0, RANK)
    tl.store(rotary_of(target, RANK) + p, rotary, mask=(p < ROPE) & (slot >= 0))


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
        WIDTH=kv_cache.shape[2],
        num_warps=4,
    )
