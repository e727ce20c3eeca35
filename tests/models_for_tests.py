"""Tiny random models with an MTP layer."""

from functools import cache

import torch
from torch import Tensor
from transformers import DeepseekV3Config

from mla_compile.models import MLAForCausalLM
from mla_compile.speculate import ServedModel
from tests.models.small import randomize

VOCAB = 40


@cache
def tiny_config() -> DeepseekV3Config:
    return DeepseekV3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=12,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )


def tiny_model(dtype: torch.dtype = torch.float64, seed: int = 0) -> MLAForCausalLM:
    model = MLAForCausalLM(tiny_config(), mtp=True)
    randomize(model, seed)
    model.lm_head.weight.mul_(3)  # otherwise noise would decide what is sampled
    return model.to(dtype)


def one_layer_model(dtype: torch.dtype = torch.float64, rank: int = 16) -> MLAForCausalLM:
    """One dense layer and an MTP layer: its steps take milliseconds, and compile much faster than `tiny_model`'s."""
    config = DeepseekV3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=9,
        kv_lora_rank=rank,
        q_lora_rank=None,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )
    model = MLAForCausalLM(config, mtp=True)
    randomize(model, 0)
    model.lm_head.weight.mul_(3)
    model.layers[0].self_attn.o_proj.weight.mul_(4)  # so that tokens depend on what the caches hold
    return model.to(dtype)


def caches_of(model: ServedModel) -> list[Tensor]:
    """The caches that are allocated, the target's first."""
    return [spec.cache for spec in model.cache_specs() if spec.layer.kv_cache is not None]


def poison_caches(model: MLAForCausalLM) -> None:
    """NaN in every page, which shows in results if it is read before it is written."""
    for each in caches_of(model):
        each.fill_(torch.nan)
