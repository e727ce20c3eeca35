"""Norm and rotation of projected latents and queries, in plain torch and as ops.

`mla_rotate_queries` rotates queries in place. `mla_norm_rope_append` also normalises and rotates the output of the
latents' projection, and appends it to the cache. Passes of these names insert the ops; no model calls them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_compile.errors import MLAError
from mla_compile.ops import validate
from mla_compile.ops.attention.operands import NormRopeAppendOperands
from mla_compile.ops.dispatch import FLOATS, SOME, UNIT, reference, triton
from mla_compile.ops.library import define_op
from mla_compile.ops.paging import write_latents


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm (arXiv 1910.07467) over the last dimension of `x` `[..., size]`, in float32 at least.

    The result is rounded to the dtype of `x` before the weight multiplies it, as in DeepSeek's models.
    """
    return weight * F.rms_norm(x, weight.shape, eps=eps)


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved_in: bool, interleaved_out: bool = False
) -> Tensor:
    """Rotate pairs of the last dimension of `x` `[..., d]` (arXiv 2104.09864), in float32 at least, to its dtype.

    Queries and keys with the same permutation have the same products, so the layout of the result is free.

    cos, sin: `[..., d / 2]`, by pair; or `[..., d]`, for the pairs' first elements, then for the second ones.
    interleaved_in, interleaved_out: whether the elements of a pair are adjacent in `x`, and in the result; else they
        are `d / 2` apart.
    """
    dtype = x.dtype
    if torch.promote_types(dtype, cos.dtype) in (torch.float16, torch.bfloat16):
        x = x.float()
    if interleaved_in:
        pairs = torch.unflatten(x, -1, (-1, 2))  # under a default device Dynamo cannot trace the method
        a, b = pairs[..., 0], pairs[..., 1]
    else:
        a, b = x.chunk(2, dim=-1)
    per_element = cos.shape[-1] == x.shape[-1]
    cos_a, cos_b = cos.chunk(2, dim=-1) if per_element else (cos, cos)
    sin_a, sin_b = sin.chunk(2, dim=-1) if per_element else (sin, sin)
    first, second = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    if interleaved_out:
        return torch.stack([first, second], dim=-1).flatten(-2).to(dtype)
    return torch.cat([first, second], dim=-1).to(dtype)


def rotate_first(x: Tensor, width: int, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """`x` `[..., d]` with its first `width` columns rotated: see `rotate`."""
    rotary, rest = x.split([width, x.shape[-1] - width], dim=-1)
    return torch.cat([rotate(rotary, cos, sin, interleaved), rest], dim=-1)


def rotate_heads(q_pe: Tensor, cos: Tensor, sin: Tensor, interleaved_in: bool, interleaved_out: bool) -> None:
    """`mla_rotate_queries` in plain torch, for every device and dtype."""
    q_pe.copy_(rotate(q_pe, cos[:, None], sin[:, None], interleaved_in, interleaved_out))


ROTATE_QUERIES = (
    triton(
        "one launch, a token's heads a program",
        "mla_compile.ops.attention.kernels.rotate_queries:rotate_queries_triton",
        constraints={"dtype": FLOATS, "tokens": SOME, "heads": SOME, "q_pe.stride(2)": UNIT},
    ),
    reference("mla_compile.ops.attention.norm_rope:rotate_heads"),
)


@define_op(
    table=ROTATE_QUERIES,
    layouts={
        "q_pe": "tokens, heads, qk_rope_head_dim",
        "cos": "float tokens, angles",
        "sin": "float tokens, angles",
    },
    mutates=("q_pe",),
    layout=torch.Tag.flexible_layout,
)
def mla_rotate_queries(
    q_pe: Tensor, cos: Tensor, sin: Tensor, *, interleaved_in: bool, interleaved_out: bool
) -> None:
    """Rotate every head of every token by the token's angles, in place.

    Args:
        q_pe: `[tokens, heads, qk_rope_head_dim]`, float, any strides, such as a slice of the projection's output.
        cos, sin: `[tokens, qk_rope_head_dim / 2]` or `[tokens, qk_rope_head_dim]` (see `rotate`), float.
        interleaved_in, interleaved_out: whether the elements of a rotated pair are adjacent, `(0, 1), (2, 3), ...`,
            before and after; else they are `qk_rope_head_dim / 2` apart.
    """
    rope = q_pe.shape[2]
    if rope < 2 or rope % 2:
        raise MLAError("q_pe", "an even number of columns", rope)
    validate.angles(cos, sin, rope)


rotate_queries_op = torch.ops.mla_compile.mla_rotate_queries.default


NORM_ROPE_APPEND = (
    triton(
        "one launch, one program per token",
        "mla_compile.ops.attention.kernels.norm_rope_append:norm_rope_append_triton",
        constraints={"dtype": FLOATS, "tokens": SOME, "kv_a.stride(1)": UNIT, "q_pe.stride(2)": UNIT},
    ),
    reference("mla_compile.ops.attention.norm_rope:norm_rope_append_torch"),
)


@define_op(
    table=NORM_ROPE_APPEND,
    layouts={
        "kv_a": "tokens, kv_lora_rank + qk_rope_head_dim",
        "weight": "kv_lora_rank",
        "kv_cache": validate.PAGED,
        "q_pe": "tokens, heads, columns or None",
        "cos": "float tokens, angles",
        "sin": "float tokens, angles",
        "slot_mapping": "int64 tokens",
    },
    mutates=("kv_cache", "q_pe"),
)
def mla_norm_rope_append(operands: NormRopeAppendOperands) -> None:
    """Write `[rms_norm(kv_a[:, :rank]) | rotate(kv_a[:, rank:])]` of every token to its slot of `kv_cache`, in place.

    With `q_pe` also do the work of `mla_rotate_queries`, with the same angles.

    Args:
        kv_a: `[tokens, kv_lora_rank + qk_rope_head_dim]`, float, any stride between tokens.
        weight: of the norm, `[kv_lora_rank]`, the dtype of `kv_a`.
        cos, sin: `[tokens, qk_rope_head_dim / 2]` or `[tokens, qk_rope_head_dim]` (see `rotate`), float; they
            include any factor that scales the rotary keys.
        kv_cache, slot_mapping: as in `mla_append`, with `kv_a` for `kv_c`.
        eps: of the norm, added to the mean square.
        interleaved_in, interleaved_out: whether the elements of a rotated pair are adjacent, `(0, 1), (2, 3), ...`,
            in `kv_a`, and in the cache; else they are `qk_rope_head_dim / 2` apart.
        q_pe: `[tokens, heads, qk_rope_head_dim]`, the dtype of `kv_a`: rotated in place.

    Raises:
        MLAError: an argument is invalid. Slots are range-checked on the CPU only.
    """
    kv_a, weight, cos, sin, kv_cache, slot_mapping, *_, q_pe = operands
    rope = kv_a.shape[1] - weight.shape[0]
    if rope < 2 or rope % 2:
        raise MLAError(
            "weight", f"an even number of columns less than kv_a's {kv_a.shape[1]}", weight.shape[0]
        )
    validate.angles(cos, sin, rope)
    validate.slots("slot_mapping", slot_mapping, kv_cache)
    if q_pe is not None and q_pe.shape[2] != rope:
        raise MLAError("q_pe", f"{rope} columns, those of kv_a that are rotated", q_pe.shape[2])


norm_rope_append_op = torch.ops.mla_compile.mla_norm_rope_append.default


def norm_rope_append_torch(operands: NormRopeAppendOperands) -> None:
    """`mla_norm_rope_append` in plain torch, for every device and dtype."""
    kv_a, weight, cos, sin, kv_cache, slot_mapping, eps, interleaved_in, interleaved_out, q_pe = operands
    kv_c, k_pe = kv_a.split([weight.shape[0], kv_a.shape[1] - weight.shape[0]], dim=1)
    k_pe = rotate(k_pe, cos, sin, interleaved_in, interleaved_out)
    write_latents(rms_norm(kv_c, weight, eps), k_pe, kv_cache, slot_mapping)
    if q_pe is not None:
        rotate_heads(q_pe, cos, sin, interleaved_in, interleaved_out)
