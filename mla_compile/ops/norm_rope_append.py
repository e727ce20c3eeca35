"""`mla_norm_rope_append`: normalise and rotate what the projection gives, and append it, in one call.

No model calls it: the pass `fuse_norm_rope_append` puts it in the place of `mla_append` and what comes before.
"""

import torch
from torch import Tensor

from mla_compile.errors import MLAError
from mla_compile.ops import validate
from mla_compile.ops.implementations import FLOATS, SOME, UNIT, reference, triton
from mla_compile.ops.library import define_op
from mla_compile.ops.norm_rope import rms_norm, rotate, rotate_heads
from mla_compile.ops.operands import NormRopeAppendOperands
from mla_compile.ops.paging import write_latents

NORM_ROPE_APPEND = (
    triton(
        "one launch, a token a program",
        "mla_compile.ops.kernels.norm_rope_append:norm_rope_append_triton",
        takes={"dtype": FLOATS, "tokens": SOME, "kv_a.stride(1)": UNIT, "q_pe.stride(2)": UNIT},
    ),
    reference("mla_compile.ops.norm_rope_append:norm_rope_append_torch"),
)


@define_op(
    table=NORM_ROPE_APPEND,
    operands=NormRopeAppendOperands,
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
    q_pe: Tensor | None = None,
) -> None:
    """Write `[rms_norm(kv_a[:, :rank]) | rotate(kv_a[:, rank:])]` of every token to its slot of `kv_cache`, in place.

    With `q_pe` also do what `mla_rotate_queries` does, by the same angles.

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
        q_pe: `[tokens, heads, qk_rope_head_dim]`, the dtype of `kv_a`: rotated in place.

    Raises:
        MLAError: an argument that is not so, named. Slots are range-checked where they are on the CPU.
    """
    rope = kv_a.shape[1] - weight.shape[0]
    if rope < 2 or rope % 2:
        raise MLAError(
            "weight", f"an even number of columns less than kv_a's {kv_a.shape[1]}", weight.shape[0]
        )
    validate.angles(cos, sin, rope)
    validate.slots("slot_mapping", slot_mapping, kv_cache)
    if q_pe is not None and q_pe.shape[2] != rope:
        raise MLAError("q_pe", f"{rope} columns, as many as are rotated of kv_a", q_pe.shape[2])


norm_rope_append_op = torch.ops.mla_compile.mla_norm_rope_append.default


def norm_rope_append_torch(operands: NormRopeAppendOperands) -> None:
    """`mla_norm_rope_append` in plain torch: every device and dtype."""
    kv_a, weight, cos, sin, kv_cache, slot_mapping, eps, interleaved_in, interleaved_out, q_pe = operands
    kv_c, k_pe = kv_a.split([weight.shape[0], kv_a.shape[1] - weight.shape[0]], dim=1)
    k_pe = rotate(k_pe, cos, sin, interleaved_in, interleaved_out)
    write_latents(torch.cat([rms_norm(kv_c, weight, eps), k_pe], dim=1), kv_cache, slot_mapping)
    if q_pe is not None:
        rotate_heads(q_pe, cos, sin, interleaved_in, interleaved_out)
