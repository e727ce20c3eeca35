"""The operands of attention ops: an op's arguments in one record, as its candidates take them.

The schemas of ops and of kernels are flat. Between them the arguments are passed as one named tuple, which the op's
declaration describes. A frozen dataclass would take four to six times as long to make, in every eager call.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class DecodeOperands(NamedTuple):
    """The operands of `mla_decode`."""

    q_latent: Tensor
    q_pe: Tensor
    kv_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    q_lens: Tensor | None
    q_len: int
    softmax_scale: float


class PrefillOperands(NamedTuple):
    """The operands of `mla_prefill`."""

    q: Tensor
    kv_cache: Tensor
    w_uk: Tensor
    w_uv: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    key_slots: Tensor
    softmax_scale: float
    before: Tensor | None = None

    def empty_result(self) -> tuple[Tensor, Tensor]:
        """The result, with `before` copied to its first tokens, and its part of the new tokens, to be written."""
        tokens, heads = self.q.shape[:2]
        num_before = 0 if self.before is None else self.before.shape[0]
        result = self.q.new_empty(num_before + tokens, heads, self.w_uv.shape[2])
        if self.before is not None:
            result[:num_before] = self.before
        return result, result[num_before:]

    def joined(self, out: Tensor) -> Tensor:
        """The result from its part of the new tokens."""
        return out if self.before is None else torch.cat([self.before, out])


class NormRopeAppendOperands(NamedTuple):
    """The operands of `mla_norm_rope_append`."""

    kv_a: Tensor
    weight: Tensor
    cos: Tensor
    sin: Tensor
    kv_cache: Tensor
    slot_mapping: Tensor
    eps: float
    interleaved_in: bool
    interleaved_out: bool
    q_pe: Tensor | None = None
