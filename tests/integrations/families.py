"""A small random model of every MLA family in transformers, as a user would have loaded it."""

import math
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    Kimi_K25ForConditionalGeneration,
    Mistral4ForCausalLM,
    PreTrainedModel,
)

from tests.models.small import YARN

VOCAB_SIZE = 211
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0, 1.1, 1.2, 1.4, 1.7, 2.0, 2.5, 3.0],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 9.0],
    "original_max_position_embeddings": 256,  # behind every test's text: stock changes all rows' factors at once
}
_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_LAYERS = {"num_hidden_layers": 3}
_DENSE = _LAYERS | {"intermediate_size": 96}
_EXPERTS = _DENSE | {
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
}
_V3 = _TEXT | _EXPERTS | {"first_k_dense_replace": 1}
# So many heads that hardly any scores are 0, where transformers does not define which keys are selected.
_INDEXER = {"index_n_heads": 32, "index_head_dim": 24, "index_topk": 6, "num_nextn_predict_layers": 1}
_VISION = {
    "patch_size": 4,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
}
_LONGCAT_EXPERTS = {
    "expert_ffn_hidden_size": 32,
    "n_routed_experts": 6,
    "zero_expert_num": 2,
    "moe_topk": 3,
    "routed_scaling_factor": 3.0,
}

# What each family adds to the common shapes; between them they have every option that changes the arithmetic.
_CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v2": _V3 | {"topk_method": "group_limited_greedy", "q_lora_rank": None, "n_shared_experts": 2},
    "deepseek_v3": _V3 | {"rope_parameters": YARN, "num_nextn_predict_layers": 1},
    "deepseek_v32": _V3 | _INDEXER | {"rope_parameters": YARN},
    "glm_moe_dsa": _V3
    | _INDEXER
    | {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "full"]},
    "glm4_moe_lite": _TEXT | _EXPERTS | {"rope_interleave": False, "num_nextn_predict_layers": 1},
    "kimi_k25": {
        "text_config": _V3 | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        "vision_config": _VISION,
        "projection_hidden_size": 64,
        "tie_word_embeddings": False,
    },
    # No num_hidden_layers: it follows from num_layers, two to a layer, one for each attention.
    "longcat_flash": _TEXT | _LONGCAT_EXPERTS | {"ffn_hidden_size": 96, "num_layers": 2, "head_dim": 16},
    "minicpm3": _TEXT | _DENSE | {"dim_model_base": 32, "scale_emb": 3, "rope_parameters": _LONGROPE},
    "mistral4": _V3 | {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.3}},
    "youtu": _TEXT | _DENSE | {"attention_bias": True},
    "kimi_linear": _TEXT
    | _DENSE
    | {
        "num_hidden_layers": 4,
        "q_lora_rank": None,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "moe_intermediate_size": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
    },
    "axk1": _V3 | {"rope_parameters": YARN},
    "bailing_hybrid": _TEXT
    | _DENSE
    | {
        "num_hidden_layers": 4,
        "layer_group_size": 2,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "num_mtp_layers": 0,
    },
}
# Changes of families that a number of layers alone does not make deep.
_DEEP: dict[str, dict[str, Any]] = {
    "glm_moe_dsa": {"num_hidden_layers": 9, "indexer_types": ["full"] * 9},
    "kimi_k25": {"text_config": _CONFIGS["kimi_k25"]["text_config"] | {"num_hidden_layers": 9}},
    "longcat_flash": {"num_layers": 9},
    "kimi_linear": {
        "num_hidden_layers": 12,
        "layer_types": ["linear_attention", "full_attention"] * 6,
        "mlp_layer_types": ["dense"] + ["sparse"] * 11,
    },
    "bailing_hybrid": {"num_hidden_layers": 12},
}
# Those that `AutoModelForCausalLM` does not know.
_CLASSES = {"kimi_k25": Kimi_K25ForConditionalGeneration, "mistral4": Mistral4ForCausalLM}
FAMILIES = tuple(_CONFIGS)
RECURRENT = ("kimi_linear", "bailing_hybrid")
"""Those with recurrent layers between MLA layers."""
SELECTING = ("deepseek_v32", "glm_moe_dsa")
"""Those whose indexers select keys."""
_SEEDS = {"deepseek_v3": 1, "glm4_moe_lite": 1, "kimi_k25": 1}  # of the text that is furthest from ties


def stock_model(family: str, seed: int | None = None, **changes: Any) -> PreTrainedModel:
    """The family's model that generates text, in float32, whose greedy text is neither a short cycle nor near-ties.

    changes: of the config.
    """
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    if family in SELECTING and tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 18):
        pytest.skip("`accelerate` takes an indexer from transformers 5.18 on")
    config = AutoConfig.for_model(family, **_CONFIGS[family] | changes)
    build = _CLASSES.get(family, AutoModelForCausalLM.from_config)
    model: PreTrainedModel = build(config).eval().requires_grad_(False)
    randomize(model, _SEEDS.get(family, 0) if seed is None else seed)
    return model


def deep_model(family: str) -> PreTrainedModel:
    """`stock_model` with 9 layers, or 12 of two kinds in turn."""
    return stock_model(family, **_DEEP.get(family, {"num_hidden_layers": 9}))


def randomize(module: nn.Module, seed: int) -> None:
    """Weights under which every part of the model matters and logits are sharp."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            drawn = _draw(name, tensor, g)
            if drawn is not None:
                tensor.copy_(drawn)


def _draw(name: str, tensor: Tensor, g: torch.Generator) -> Tensor | None:
    """A new value for a weight; None for a constant."""
    noise: Tensor = torch.randn(tensor.shape, generator=g)
    if name.endswith(("inv_freq", "embed_scale")):
        return None
    if name.endswith("A_log"):
        return noise.abs().log1p()
    if name.endswith("e_score_correction_bias"):
        return 0.1 * noise
    if name.endswith(("bias", "dt_bias")):
        return 0.3 * noise
    if name.endswith("model.norm.weight"):
        return 3 * noise
    if tensor.dim() < 2:
        return 1 + 0.3 * noise
    if name.endswith("embed_tokens.weight"):
        return 0.5 * noise
    return 1.4 * noise / math.sqrt(tensor.shape[-1])


def prompts(lengths: tuple[int, ...] = (9, 1, 17, 4)) -> list[list[int]]:
    """Random prompts, without the padding token."""
    g = torch.Generator().manual_seed(11)
    return [torch.randint(1, VOCAB_SIZE, (length,), generator=g).tolist() for length in lengths]
