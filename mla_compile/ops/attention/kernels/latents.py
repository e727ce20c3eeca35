"""Cached latents in kernels: reads and writes of both forms, floats and FP8 (`mla_compile/latents.py`).

The dtype of the pointer is the form: uint8 for FP8, whose tokens are bytes.
"""

import triton
import triton.language as tl

from mla_compile import latents
from mla_compile.ops.device import power_of_two

padded = triton.constexpr_function(power_of_two)
"""`power_of_two` in kernels."""
_BLOCK = tl.constexpr(latents.BLOCK)
_FIELD_BITS, _QUIET_NAN, _ROOM, _LEAST_FIELD = (
    tl.constexpr(number)
    for number in (latents.FIELD_BITS, latents.QUIET_NAN, latents.ROOM, latents.LEAST_FIELD)
)


@triton.jit
def rotary_of(token, RANK: tl.constexpr):
    """The rotary part of a token, from its pointer."""
    if token.dtype.element_ty == tl.uint8:
        return (token + RANK + RANK // _BLOCK * 4).to(tl.pointer_type(tl.bfloat16), bitcast=True)
    else:
        return token + RANK


@triton.jit
def load_latents(token, live, dtype: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr):
    """The latents `[keys, RANK]` and rotary keys `[keys, ROPE]` of tokens, padded; zeros if they are not `live`.

    token: pointers, `[keys, 1]`; live: `[keys]`; dtype: of the result, for FP8 latents.
    """
    c = tl.arange(0, padded(RANK))[None, :]
    p = tl.arange(0, padded(ROPE))[None, :]
    live = live[:, None]
    if token.dtype.element_ty == tl.uint8:
        # Triton 3.6 takes every token's bytes to be as aligned as those of the first one of 16 in a page.
        BYTES: tl.constexpr = RANK + RANK // _BLOCK * 4 + 2 * ROPE
        ALIGNED: tl.constexpr = (BYTES | 16) & -(BYTES | 16)
        at = tl.multiple_of(token + c, [ALIGNED, ALIGNED])
        k = tl.load(at, mask=live & (c < RANK), other=0)
        at = tl.multiple_of(rotary_of(token, RANK) + p, [ALIGNED, ALIGNED])
        k_pe = tl.load(at, mask=live & (p < ROPE), other=0.0)
        BLOCKS: tl.constexpr = padded(RANK) // _BLOCK
        block = tl.arange(0, BLOCKS)[None, :]
        at = (token + RANK).to(tl.pointer_type(tl.float32), bitcast=True) + block
        at = tl.multiple_of(at, [ALIGNED, ALIGNED])
        scale = tl.load(at, mask=live & (block < RANK // _BLOCK), other=0.0)
        k = k.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        k = tl.reshape(k, [k.shape[0], BLOCKS, _BLOCK]) * scale[:, :, None]
        return tl.reshape(k, [k.shape[0], BLOCKS * _BLOCK]).to(dtype), k_pe.to(dtype)
    else:
        k = tl.load(token + c, mask=live & (c < RANK), other=0)
        return k, tl.load(rotary_of(token, RANK) + p, mask=live & (p < ROPE), other=0.0)


@triton.jit
def store_latent(token, latent, inside, RANK: tl.constexpr):
    """Write one token's latent `[RANK]`, padded, in the model's dtype; with FP8 latents as `latents.pack`.

    token: a pointer; inside: whether to write.
    """
    c = tl.arange(0, padded(RANK))
    if token.dtype.element_ty == tl.uint8:
        BLOCKS: tl.constexpr = padded(RANK) // _BLOCK
        block = tl.arange(0, BLOCKS)
        values = tl.reshape(latent.to(tl.float32), [BLOCKS, _BLOCK])
        largest = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)  # of NaN, the largest
        is_finite = largest < 0x7F800000
        field = tl.maximum(((largest + _ROOM) >> _FIELD_BITS) - 8, _LEAST_FIELD)
        scale = tl.where(is_finite, field << _FIELD_BITS, _QUIET_NAN)
        at = (token + RANK).to(tl.pointer_type(tl.int32), bitcast=True)
        tl.store(at + block, scale, mask=(block < RANK // _BLOCK) & inside)
        inverse = ((254 - field) << _FIELD_BITS).to(tl.float32, bitcast=True)
        values = tl.where(is_finite[:, None], values * inverse[:, None], 0.0)
        values = values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        tl.store(token + c, tl.reshape(values, [BLOCKS * _BLOCK]), mask=(c < RANK) & inside)
    else:
        tl.store(token + c, latent, mask=(c < RANK) & inside)
