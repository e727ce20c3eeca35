"""When the absorbed form pays: a roofline estimate from the sizes of one attention call."""

from dataclasses import dataclass

FLOPS_PER_BYTE = 100
"""Operations that a processor does in the time in which it reads a byte: some 300 on an H100 in bf16, 20 on a CPU core.
Decode reads the latents once and prefill multiplies large matrices, so the choice hardly depends on it."""

ELEMENT_BYTES = 2


@dataclass(frozen=True)
class AttentionSizes:
    """One attention call: `q_len` query tokens over `keys` cached ones, of each of `batch` rows."""

    batch: int
    heads: int
    q_len: int
    keys: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def __str__(self) -> str:
        tokens = "1 query token" if self.q_len == 1 else f"{self.q_len} query tokens"
        return f"{tokens} over {self.keys} keys, batch {self.batch}, {self.heads} heads, rank {self.kv_lora_rank}"


def expanded_cost(s: AttentionSizes) -> float:
    """In bytes' worth of time: up-project every key and value, write and read them, attend per head."""
    per_head = s.qk_nope_head_dim + s.v_head_dim
    up_projection = s.keys * s.kv_lora_rank * per_head
    attention = s.q_len * s.keys * (per_head + s.qk_rope_head_dim)
    flops = 2 * s.batch * s.heads * (up_projection + attention)
    moved = s.batch * s.keys * (s.kv_lora_rank + 2 * s.heads * (per_head + s.qk_rope_head_dim))
    return _time(flops, moved)


def absorbed_cost(s: AttentionSizes) -> float:
    """In bytes' worth of time: project queries and outputs, attend in latent space, with scores in memory."""
    projections = s.q_len * s.kv_lora_rank * (s.qk_nope_head_dim + s.v_head_dim)
    attention = s.q_len * s.keys * (2 * s.kv_lora_rank + s.qk_rope_head_dim)
    flops = 2 * s.batch * s.heads * (projections + attention)
    scores = 2 * s.heads * s.q_len * s.keys
    moved = s.batch * (2 * s.keys * (s.kv_lora_rank + s.qk_rope_head_dim) + scores)
    return _time(flops, moved)


def absorbing_pays(s: AttentionSizes) -> bool:
    """For DeepSeek-V3's sizes and a long cache: up to some 200 query tokens a row.

    Past that the wider dot products (2 * 512 + 64 instead of 128 + 64 + 128) cost more than up-projecting the keys.
    """
    return absorbed_cost(s) < expanded_cost(s)


def _time(flops: int, elements: int) -> float:
    return flops / FLOPS_PER_BYTE + elements * ELEMENT_BYTES
