"""MTP layers for the small models, random or fitted to a text, and checkpoints in the published layouts."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV3Config, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import MtpLayer, MtpModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm

from tests.integrations.families import prompts, randomize, stock_model
from tests.integrations.stock import greedy, hidden_states, mtp_hidden
from tests.models.small import add_shard, save

STEPS = 40
"""Tokens that tests generate."""
MTP_FAMILIES = ("deepseek_v3", "glm4_moe_lite", "longcat_flash", "deepseek_v32", "glm_moe_dsa")
_LONGCAT_SHARED = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "rms_norm_eps",
    "rope_parameters",
    "max_position_embeddings",
)


@contextmanager
def mtp_config(model: PreTrainedModel) -> Iterator[None]:
    """Gives the config what transformers' `MtpModel` asks of it, and takes it away again.

    Neither the classes nor the published configs of most families have it.
    """
    config = model.config.get_text_config()
    needed = {"num_mtp_layers": 1, "mtp_mlp_layer_types": ["sparse"]}
    if getattr(config, "layer_types", None):
        needed["mtp_layer_types"] = config.layer_types[-1:]
    missing = {name: value for name, value in needed.items() if getattr(config, name, None) is None}
    for name, value in missing.items():
        setattr(config, name, value)
    yield
    for name in missing:
        delattr(config, name)


def random_mtp(model: PreTrainedModel, seed: int = 1) -> MtpModel:
    """One random MTP layer for the model, that of the published ones."""
    with mtp_config(model):
        mtp = MtpModel(model, 1)
    if model.config.model_type == "longcat_flash":
        mtp.layers[0] = _longcat_layer(model.config)
    mtp.eval().requires_grad_(False)
    randomize(mtp.layers, seed)
    if model.config.model_type == "glm_moe_dsa":  # `MtpLayer` does not expect the layer's second result
        mtp.layers[0].mtp_block.register_forward_hook(lambda _module, _inputs, output: output[0])
    return mtp


def _longcat_layer(config: PreTrainedConfig) -> MtpLayer:
    """LongCat-Flash's layer has one attention and no experts, for which transformers has no class.

    It is a dense one of DeepSeek-V3's, where LongCat's factors on queries and latents are in the norms before them.
    """
    shared = {name: getattr(config, name) for name in _LONGCAT_SHARED}
    dense = DeepseekV3Config(**shared, num_hidden_layers=1, first_k_dense_replace=1)
    dense._attn_implementation = "sdpa"
    return MtpLayer(dense, DeepseekV3DecoderLayer, DeepseekV3RMSNorm, layer_idx=0)


def fitted_mtp(model: PreTrainedModel, texts: list[list[int]]) -> MtpModel:
    """An MTP layer that guesses 70% or more of the texts' tokens, so that drafts are both accepted and rejected."""
    mtp = random_mtp(model)
    hits = 0.8 if model.config.model_type == "glm_moe_dsa" else 0.7  # with less, no step accepts three drafts
    weights = [weight.requires_grad_() for weight in mtp.layers.parameters()]
    optimizer = torch.optim.Adam(weights, lr=3e-3)
    hidden = [hidden_states(model, text[:-2]) for text in texts]
    following = torch.cat([torch.tensor(text[2:]) for text in texts])
    for _ in range(100):
        out = [mtp_hidden(mtp, text[1:-1], states)[0] for text, states in zip(texts, hidden)]
        logits = mtp.shared_head(torch.cat(out))
        if (logits.argmax(dim=-1) == following).float().mean() >= hits:
            break
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits, following).backward()
        optimizer.step()
    mtp.requires_grad_(False)
    return mtp


def with_mtp(family: str) -> tuple[PreTrainedModel, MtpModel, list[list[int]]]:
    """A model, an MTP layer some of whose drafts are right, and the greedy text of `STEPS` tokens after each prompt."""
    return copy.deepcopy(_with_mtp(family))


@cache
def _with_mtp(family: str) -> tuple[PreTrainedModel, MtpModel, list[list[int]]]:
    model = stock_model(family)
    expected = greedy(model, prompts(), STEPS)
    mtp = fitted_mtp(model, [prompt + text for prompt, text in zip(prompts(), expected, strict=True)])
    return model, mtp, expected


def save_checkpoint(model: PreTrainedModel, mtp: MtpModel, path: Path) -> Path:
    """Write both as the published checkpoints have them."""
    layer = mtp.layers[0]
    assert isinstance(layer, MtpLayer)
    if model.config.model_type != "longcat_flash":
        return save(model, path, layer)
    save(model, path)
    tensors = {_longcat_name(name): tensor for name, tensor in layer.state_dict().items()}
    for name, rank in ("q_a", model.config.q_lora_rank), ("kv_a", model.config.kv_lora_rank):
        norm = f"model.mtp.layers.0.self_attn.{name}_layernorm.weight"
        tensors[norm] = tensors[norm] / (model.config.hidden_size / rank) ** 0.5
    tensors["model.mtp.embed_tokens.weight"] = model.state_dict()["model.embed_tokens.weight"].clone()
    add_shard(path, "mtp.safetensors", tensors)
    return path


def _longcat_name(name: str) -> str:
    """The published name of a weight of an `MtpLayer`."""
    name = name.removeprefix("mtp_block.")
    if name == "post_norm.weight":
        return "model.mtp.norm.weight"
    if name in ("enorm.weight", "hnorm.weight"):
        name = name.replace("norm.", "norm.m.")
    elif name.startswith("mlp."):
        name = f"transformer_layer.{name}"
    return f"model.mtp.layers.0.{name}"


def load_checkpoint(path: Path) -> PreTrainedModel:
    """The trunk, such that `MtpModel.from_pretrained` finds the MTP layer."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if model.config.model_type != "longcat_flash":
        # transformers knows the MTP layer by the published models' numbers of layers, 61 and 47.
        model._keys_to_ignore_on_load_unexpected = {rf"model\.layers\.{model.config.num_hidden_layers}\."}
    model.eval().requires_grad_(False)
    return model
