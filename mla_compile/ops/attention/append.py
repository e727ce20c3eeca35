"""`mla_append`: write new latents into the paged cache."""

import torch
from torch import Tensor

from mla_compile.ops import validate
from mla_compile.ops.dispatch import FLOATS, SOME, UNIT, reference, triton
from mla_compile.ops.library import define_op
from mla_compile.ops.paging import write_latents

APPEND = (
    triton(
        "one launch, one program per token",
        "mla_compile.ops.attention.kernels.append:append_triton",
        constraints={"dtype": FLOATS, "tokens": SOME, "kv_c.stride(1)": UNIT, "k_pe.stride(1)": UNIT},
    ),
    reference("mla_compile.ops.attention.append:append_torch"),
)


@define_op(
    table=APPEND,
    layouts={
        "kv_c": "tokens, kv_lora_rank",
        "k_pe": "tokens, qk_rope_head_dim",
        "kv_cache": validate.PAGED,
        "slot_mapping": "int64 tokens",
    },
    mutates=("kv_cache",),
)
def mla_append(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write `[kv_c | k_pe]` of every token to its slot of `kv_cache`, in place.

    Args:
        kv_c: normalised latents, `[tokens, kv_lora_rank]`, float.
        k_pe: rotated shared keys, `[tokens, qk_rope_head_dim]`, the dtype of `kv_c`.
        kv_cache: `[num_pages, page_size, kv_lora_rank + qk_rope_head_dim]`, contiguous, the dtype of `kv_c`; or with
            FP8 latents, uint8 `[num_pages, page_size, latents.fp8_width(kv_lora_rank, qk_rope_head_dim)]`.
        slot_mapping: `page * page_size + offset`, int64 `[tokens]`; -1 writes nowhere. Distinct where >= 0.

    Raises:
        MLAError: an argument is invalid. Slots are range-checked on the CPU only.
    """
    validate.slots("slot_mapping", slot_mapping, kv_cache)


append_op = torch.ops.mla_compile.mla_append.default


def append_torch(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """`mla_append` in plain torch, for every device and dtype."""
    write_latents(kv_c, k_pe, kv_cache, slot_mapping)
