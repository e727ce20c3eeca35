"""FP8 latents: the bytes of a cached token, and the conversion from and to floats.

A token is `kv_lora_rank` values in e4m3, then a float32 scale for every 128 of them, then the rotary key in bfloat16:
656 bytes at 512 + 64, as DeepSeek-V3.2's kernels read it. The cache has the dtype uint8.

A scale is the least power of two with which the largest of its 128 values is at most 448. So a stored latent has four
significant bits, and bfloat16 and float32 hold it exactly: all implementations read the same keys. With the scale
`largest / 448` the error of normal latents is 2.6% instead of 2.7%, but keys in bfloat16 would be rounded twice. Values
are rounded from the latent in the model's dtype, and depend on no other token. A block with a value that is not finite
has the scale NaN.
"""

import torch
from torch import Tensor

from mla_compile.errors import MLAError

BLOCK = 128
"""Values with one scale."""
FP8 = torch.uint8
"""The dtype of a cache with FP8 latents."""
FIELD_BITS, QUIET_NAN, ROOM = 23, 0x7FC00000, 0x1FFFFF
"""Of float32's bits: those below the exponent; a NaN; what carries into the exponent from a significand above 1.75."""
LEAST_FIELD = 27
"""The exponent field of the least scale, 2**-100: half of it would still be normal numbers in bfloat16."""


def fp8_width(kv_lora_rank: int, qk_rope_head_dim: int, name: str = "kv_lora_rank") -> int:
    """Bytes of a token with FP8 latents.

    Raises:
        MLAError: sizes that do not fit the format, by `name`.
    """
    if kv_lora_rank % BLOCK or kv_lora_rank < BLOCK or qk_rope_head_dim % 2:
        expected = f"kv_lora_rank to be a multiple of {BLOCK} and qk_rope_head_dim even, for FP8 latents"
        hint = "cache latents in the dtype of the weights (kv_cache_dtype='auto')"
        raise MLAError(name, expected, f"{kv_lora_rank} and {qk_rope_head_dim}", hint)
    return kv_lora_rank + kv_lora_rank // BLOCK * 4 + 2 * qk_rope_head_dim


def rope_width(kv_cache: Tensor, kv_lora_rank: int) -> int:
    """`qk_rope_head_dim` of a cache `[num_pages, page_size, width]` in either form."""
    width = kv_cache.shape[2] - kv_lora_rank
    return width if kv_cache.dtype != FP8 else (width - kv_lora_rank // BLOCK * 4) // 2


def pack(kv_c: Tensor, k_pe: Tensor) -> Tensor:
    """Latents `[tokens, kv_lora_rank]` and rotary keys `[tokens, qk_rope_head_dim]` as uint8 `[tokens, width]`."""
    blocks = kv_c.to(torch.float32).unflatten(1, (-1, BLOCK))
    largest = (blocks.contiguous().view(torch.int32) & 0x7FFFFFFF).amax(
        2, keepdim=True
    )  # of NaN, the largest
    is_finite = largest < 0x7F800000
    field = ((largest + ROOM >> FIELD_BITS) - 8).clamp(min=LEAST_FIELD)  # 448 is 1.75 * 2**8
    scales = torch.where(is_finite, field << FIELD_BITS, QUIET_NAN)
    inverse = (254 - field << FIELD_BITS).view(torch.float32)
    values = torch.where(is_finite, blocks * inverse, 0.0).to(torch.float8_e4m3fn)
    parts = values.flatten(1), scales.flatten(1), k_pe.to(torch.bfloat16).contiguous()
    return torch.cat([part.view(FP8) for part in parts], dim=1)


def unpack(packed: Tensor, kv_lora_rank: int, dtype: torch.dtype) -> Tensor:
    """Tokens `[..., width]` of an FP8 cache as latents and rotary keys `[..., kv_lora_rank + qk_rope_head_dim]`."""
    end = kv_lora_rank + kv_lora_rank // BLOCK * 4
    values, scales, k_pe = packed.tensor_split((kv_lora_rank, end), dim=-1)
    if packed.is_cpu:  # a conversion from e4m3 takes 4 times as long there
        floats = _E4M3.index_select(0, values.flatten().int()).view(values.shape)
    else:
        floats = values.view(torch.float8_e4m3fn).to(torch.float32)
    kv_c = floats.unflatten(-1, (-1, BLOCK)) * scales.contiguous().view(torch.float32)[..., None]
    return torch.cat([kv_c.flatten(-2).to(dtype), k_pe.contiguous().view(torch.bfloat16).to(dtype)], dim=-1)


_E4M3 = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).to(torch.float32)
"""The value of every byte."""
