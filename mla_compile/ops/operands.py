"""What implementations of ops take: an op's arguments in one record.

An op's schema is flat, and so is a kernel's. Between them its arguments go as one named tuple, which the op's
declaration describes. A frozen dataclass would take four to six times as long to make, in every eager call.
"""

from typing import NamedTuple

from torch import Tensor


class DecodeOperands(NamedTuple):
    """Of `mla_decode`."""

    q_latent: Tensor
    q_pe: Tensor
    kv_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    q_lens: Tensor | None
    q_len: int
    softmax_scale: float


class PrefillOperands(NamedTuple):
    """Of `mla_prefill`."""

    q: Tensor
    kv_cache: Tensor
    w_uk: Tensor
    w_uv: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    key_slots: Tensor
    softmax_scale: float


class ExpertOperands(NamedTuple):
    """Of `moe_experts_op`."""

    x: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    w_gate_up: Tensor
    w_down: Tensor
    row_lens: Tensor | None = None
    q_len: int = 1
    shared_gate: Tensor | None = None
    shared_up: Tensor | None = None
    shared_down: Tensor | None = None
    gate_up_scale: Tensor | None = None
    down_scale: Tensor | None = None
    shared_gate_scale: Tensor | None = None
    shared_up_scale: Tensor | None = None
    shared_down_scale: Tensor | None = None

    @property
    def num_shared(self) -> int:
        """As how many of the chosen experts the shared ones are."""
        return 0 if self.shared_gate is None else self.shared_gate.shape[0] // self.w_down.shape[2]


class NormRopeAppendOperands(NamedTuple):
    """Of `mla_norm_rope_append`."""

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


class NormLinearOperands(NamedTuple):
    """Of `norm_linear`."""

    x: Tensor
    residual: Tensor | None
    norm_weight: Tensor | None
    eps: float
    first: Tensor
    first_scale: Tensor | None = None
    second: Tensor | None = None
    second_scale: Tensor | None = None


class FP8LinearOperands(NamedTuple):
    """Of `fp8_linear`."""

    x: Tensor
    first: Tensor
    first_scale: Tensor
    second: Tensor | None = None
    second_scale: Tensor | None = None
