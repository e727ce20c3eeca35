"""Small random models of every family, ours and transformers' side by side."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV2Config, DeepseekV3Config, Glm4MoeLiteConfig

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
    "original_max_position_embeddings": 32,
}
_COMMON = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "kv_lora_rank": 32,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
}


def v2_config(**changes: Any) -> DeepseekV2Config:
    defaults = {"n_shared_experts": 2, "first_k_dense_replace": 1, "topk_method": "greedy", "n_group": 1, "topk_group": 1}
    return DeepseekV2Config(**_COMMON | defaults | changes)


def v3_config(**changes: Any) -> DeepseekV3Config:
    defaults = {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
    return DeepseekV3Config(**_COMMON | defaults | changes)


def glm_config(**changes: Any) -> Glm4MoeLiteConfig:
    """GLM-4.7-Flash's head shapes in narrow layers."""
    heads = {"num_attention_heads": 20, "num_key_value_heads": 20, "qk_nope_head_dim": 192, "v_head_dim": 256}
    return Glm4MoeLiteConfig(**_COMMON | heads | {"qk_rope_head_dim": 64, "num_hidden_layers": 2} | changes)
