"""`mla_append`: write new latents into the paged cache."""

import torch
from torch import Tensor

from mla_compile.ops import validate
from mla_compile.ops.kernels.plan import supports_append
from mla_compile.ops.library import define_op


def _fake(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    validate.append(kv_c, k_pe, kv_cache, slot_mapping)


@define_op("mla_append(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping) -> ()", fake=_fake)
def append_op(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    if supports_append(kv_c, k_pe):
        from mla_compile.ops.kernels.append import append_triton

        return append_triton(kv_c, k_pe, kv_cache, slot_mapping)
    return append_torch(kv_c, k_pe, kv_cache, slot_mapping)


def append_torch(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """`mla_append` in plain torch: every device and dtype."""
    flat = kv_cache.view(-1, kv_cache.shape[-1])
    latents = torch.cat([kv_c, k_pe], dim=-1)
    if latents.shape[0] == 0:
        return
    # "Writes nowhere" without a data-dependent shape: a masked token repeats the write of the first valid one
    # (same value, same slot), and with no valid token all rewrite slot 0 with what it holds.
    valid = slot_mapping >= 0
    first = valid.to(torch.int32).argmax()
    source = torch.where(valid, torch.arange(latents.shape[0], device=latents.device), first)
    slots = slot_mapping.index_select(0, source).clamp(min=0)
    values = torch.where(valid.any(), latents.index_select(0, source), flat[:1])
    flat.index_copy_(0, slots, values)


def mla_append(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write `[kv_c | k_pe]` of every token to its slot of `kv_cache`, in place.

    Args:
        kv_c: normalised latents, `[tokens, kv_lora_rank]`, float.
        k_pe: rotated shared keys, `[tokens, qk_rope_head_dim]`, the dtype of `kv_c`.
        kv_cache: `[num_pages, page_size, kv_lora_rank + qk_rope_head_dim]`, contiguous, the dtype of `kv_c`.
        slot_mapping: `page * page_size + offset`, int64 `[tokens]`; -1 writes nowhere. Distinct where >= 0.

    Raises:
        MLAError: an argument that is not so, named. Slots are range-checked where they are on the CPU.
    """
    if not torch.compiler.is_compiling():
        validate.append(kv_c, k_pe, kv_cache, slot_mapping)
        validate.slots("slot_mapping", slot_mapping, kv_cache)
    append_op(kv_c, k_pe, kv_cache, slot_mapping)
