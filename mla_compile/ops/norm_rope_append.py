"""`mla_norm_rope_append`: normalise and rotate what the projection gives, and append it, in one call.

No model calls it: the pass `fuse_norm_rope_append` puts it in the place of `mla_append` and what comes before.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_compile.ops import validate
from mla_compile.ops.append import append_torch
from mla_compile.ops.kernels.plan import supports_norm_rope_append
from mla_compile.ops.library import define_op


def _fake(
    kv_a: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    eps: float,
    interleaved_in: bool,
    interleaved_out: bool,
) -> None:
    validate.norm_rope_append(kv_a, weight, cos, sin, kv_cache, slot_mapping)


@define_op(
    "mla_norm_rope_append(Tensor kv_a, Tensor weight, Tensor cos, Tensor sin, Tensor(a!) kv_cache, "
    "Tensor slot_mapping, float eps, bool interleaved_in, bool interleaved_out) -> ()",
    fake=_fake,
)
def norm_rope_append_op(
    kv_a: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    eps: float,
    interleaved_in: bool,
    interleaved_out: bool,
) -> None:
    if supports_norm_rope_append(kv_a):
        from mla_compile.ops.kernels.norm_rope_append import norm_rope_append_triton as append
    else:
        append = norm_rope_append_torch
    append(kv_a, weight, cos, sin, kv_cache, slot_mapping, eps, interleaved_in, interleaved_out)


def norm_rope_append_torch(
    kv_a: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    eps: float,
    interleaved_in: bool,
    interleaved_out: bool,
) -> None:
    """`mla_norm_rope_append` in plain torch: every device and dtype."""
    kv_c, k_pe = kv_a.split([weight.shape[0], kv_a.shape[1] - weight.shape[0]], dim=1)
    k_pe = rotate(k_pe, cos, sin, interleaved_in, interleaved_out)
    append_torch(rms_norm(kv_c, weight, eps), k_pe, kv_cache, slot_mapping)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm (arXiv 1910.07467) of rows `[..., size]`, in float32 at least.

    Rounded to the dtype of `x` before the weight multiplies, as DeepSeek's models do.
    """
    return weight * F.rms_norm(x, weight.shape, eps=eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved_in: bool, interleaved_out: bool) -> Tensor:
    """Rotate pairs of each row of `x` `[tokens, d]` (arXiv 2104.09864), in float32 at least, to the dtype of `x`.

    cos, sin: `[tokens, d / 2]`, by pair; or `[tokens, d]`, of first elements of pairs, then of second ones.
    interleaved_in, interleaved_out: pairs are neighbours in `x`, in the result; else they are halves apart.
    """
    half = x.shape[1] // 2
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    a, b = (wide[:, 0::2], wide[:, 1::2]) if interleaved_in else (wide[:, :half], wide[:, half:])
    first = a * cos[:, :half] - b * sin[:, :half]
    second = b * cos[:, -half:] + a * sin[:, -half:]
    if interleaved_out:
        return torch.stack([first, second], dim=-1).flatten(1).to(x.dtype)
    return torch.cat([first, second], dim=-1).to(x.dtype)


def mla_norm_rope_append(
    kv_a: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    eps: float,
    interleaved_in: bool,
    interleaved_out: bool,
) -> None:
    """Write `[rms_norm(kv_a[:, :rank]) | rotate(kv_a[:, rank:])]` of every token to its slot of `kv_cache`, in place.

    Args:
        kv_a: `[tokens, kv_lora_rank + qk_rope_head_dim]`, float; rows may lie apart.
        weight: of the norm, `[kv_lora_rank]`, the dtype of `kv_a`.
        cos, sin: `[tokens, qk_rope_head_dim / 2]` or `[tokens, qk_rope_head_dim]` (see `rotate`), float; a factor
            that scales the rotary keys is in them.
        kv_cache: `[num_pages, page_size, kv_lora_rank + qk_rope_head_dim]`, contiguous, the dtype of `kv_a`.
        slot_mapping: as of `mla_append`.
        eps: of the norm, added to the mean square.
        interleaved_in, interleaved_out: whether the two elements of a rotated pair are neighbours `(0, 1), (2, 3), ...`
            in `kv_a`, and in the cache; else they are halves apart.

    Raises:
        MLAError: an argument that is not so, named. Slots are range-checked where they are on the CPU.
    """
    if not torch.compiler.is_compiling():
        validate.norm_rope_append(kv_a, weight, cos, sin, kv_cache, slot_mapping)
        validate.slots("slot_mapping", slot_mapping, kv_cache)
    norm_rope_append_op(kv_a, weight, cos, sin, kv_cache, slot_mapping, eps, interleaved_in, interleaved_out)
