"""Small random models of every family, ours and transformers'."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Glm4MoeLiteConfig,
    GlmMoeDsaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import MtpLayer

from mla_compile import MLABatch, decode_segment, prefill_segment
from mla_compile.caches import allocate
from mla_compile.models import MLAForCausalLM

PAGE_SIZE = 4
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
    "rms_norm_eps": 1e-2,  # large, since the norms inside attention have an epsilon of their own
}


def v2_config(**changes: Any) -> DeepseekV2Config:
    routing = {"n_shared_experts": 2, "topk_method": "greedy", "n_group": 4, "topk_group": 2}
    return DeepseekV2Config(**_COMMON | {"first_k_dense_replace": 1} | routing | changes)


def v3_config(**changes: Any) -> DeepseekV3Config:
    return DeepseekV3Config(**_COMMON | {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2} | changes)


def glm_config(**changes: Any) -> Glm4MoeLiteConfig:
    """GLM-4.7-Flash's head shapes, in narrow layers."""
    heads = {"num_attention_heads": 20, "num_key_value_heads": 20, "qk_nope_head_dim": 192, "v_head_dim": 256}
    return Glm4MoeLiteConfig(**_COMMON | heads | {"qk_rope_head_dim": 64, "num_hidden_layers": 2} | changes)


TOPK = 6
# So many heads that hardly any scores are 0, where transformers does not define which keys are selected.
_INDEXER = {"index_n_heads": 32, "index_head_dim": 20, "index_topk": TOPK}


def v32_config(**changes: Any) -> DeepseekV32Config:
    routing = {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
    return DeepseekV32Config(**_COMMON | routing | _INDEXER | changes)


def glm5_config(**changes: Any) -> GlmMoeDsaConfig:
    """Its second layer shares the selection of the first."""
    types = {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "full"]}
    return GlmMoeDsaConfig(**_COMMON | {"first_k_dense_replace": 1} | _INDEXER | types | changes)


CONFIGS: dict[str, PreTrainedConfig] = {
    "v3": v3_config(),
    "v3 without q_lora_rank": v3_config(q_lora_rank=None),
    "v3 not interleaved": v3_config(rope_interleave=False),
    "v3 yarn": v3_config(rope_parameters=dict(YARN)),
    "v3 yarn without mscale_all_dim": v3_config(rope_parameters=YARN | {"mscale_all_dim": 0.0}),
    "v3 one group, weights not normalised": v3_config(n_group=1, topk_group=1, norm_topk_prob=False),
    "v3 tied": v3_config(tie_word_embeddings=True, n_group=2, topk_group=1),
    "v3 dense": v3_config(first_k_dense_replace=3),
    "v2 greedy": v2_config(),
    "v2 group limited": v2_config(topk_method="group_limited_greedy", routed_scaling_factor=4.0),
    "v2 lite": v2_config(q_lora_rank=None, rope_parameters=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}),
    "v2 tied": v2_config(tie_word_embeddings=True),
    "glm": glm_config(),
    "glm not interleaved": glm_config(rope_interleave=False, q_lora_rank=None),
    "v3.2": v32_config(),
    "v3.2 yarn": v32_config(rope_parameters=dict(YARN)),
    "v3.2 more keys than tokens": v32_config(index_topk=64),
    "glm 5": glm5_config(),
    "glm 5 tied": glm5_config(tie_word_embeddings=True, indexer_types=None, index_topk_freq=3),  # FFSS
}


def randomize(module: nn.Module, seed: int = 0) -> None:
    """Weights under which every part of the model matters: transformers' own are so small that attention is flat."""
    g = torch.Generator().manual_seed(seed)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        noise = torch.randn(tensor.shape, generator=g)
        if tensor.dim() > 1:
            tensor.data.copy_(noise * tensor.shape[-1] ** -0.5)
        elif name.endswith("e_score_correction_bias"):
            tensor.data.copy_(noise * 0.1)
        elif not name.endswith("inv_freq"):
            tensor.data.copy_(1 + 0.3 * noise)


def reference_model(config: PreTrainedConfig) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().requires_grad_(False)
    randomize(model)
    return model


def reference_mtp_layer(model: PreTrainedModel) -> MtpLayer:
    """transformers' MTP layer of the classes that `model` is built of; its block is a MoE layer like the last one."""
    last = model.model.layers[-1]
    config = model.config
    if config.model_type in ("deepseek_v2", "deepseek_v3"):
        config = type(config)(**config.to_dict() | {"first_k_dense_replace": 0})
    if config.model_type == "glm_moe_dsa":
        config = type(config)(**config.to_dict() | {"indexer_types": ["full"] * config.num_hidden_layers})
    config._attn_implementation = "eager"
    layer = MtpLayer(config, type(last), type(last.input_layernorm), config.num_hidden_layers - 1)
    layer = layer.eval().requires_grad_(False)
    randomize(layer, seed=1)
    if (
        config.model_type == "glm_moe_dsa"
    ):  # its layers return their selection too, which `MtpLayer` does not expect
        layer.mtp_block.register_forward_hook(lambda _module, _inputs, output: output[0])
    return layer


def save(model: PreTrainedModel, path: Path, mtp: MtpLayer | None = None) -> Path:
    """Write a checkpoint in shards, with the MTP layer where the published ones have it, copies included."""
    model.save_pretrained(path, max_shard_size="40KB")
    if mtp is None:
        return path
    prefix = f"model.layers.{model.config.num_hidden_layers}."
    tensors = {prefix + mtp_name(name): tensor for name, tensor in unstack(mtp.state_dict()).items()}
    embedding = model.get_input_embeddings().weight
    tensors[prefix + "embed_tokens.weight"] = embedding.clone()
    tensors[prefix + "shared_head.head.weight"] = model.lm_head.weight.clone()
    add_shard(path, "mtp.safetensors", tensors)
    return path


def add_shard(path: Path, name: str, tensors: dict[str, Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / name)
    index = path / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    table["weight_map"] |= dict.fromkeys(tensors, name)
    index.write_text(json.dumps(table))


def to_fp8(path: Path, quantize: Callable[[Tensor], tuple[Tensor, Tensor]], block: tuple[int, int]) -> None:
    """Give a checkpoint FP8 projections, with scales in a file of their own; all else stays plain."""
    files = list(path.glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    scales = {}
    for name, tensor in tensors.items():
        is_projection = name.endswith(
            ("_proj.weight", "kv_a_proj_with_mqa.weight", "wq_b.weight", "wk.weight")
        )
        if is_projection and "eh_proj" not in name and "weights_proj" not in name:
            tensors[name], scales[name + "_scale_inv"] = quantize(tensor)
    for file in path.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, path / "weights.safetensors")
    save_file(scales, path / "scales.safetensors")
    set_quantization(path, quant_method="fp8", fmt="e4m3", weight_block_size=list(block))


def set_quantization(path: Path, **quantization: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization}))


def mtp_name(name: str) -> str:
    return name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")


def unstack(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stacked experts to the names of published checkpoints."""
    out: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, weight in enumerate(tensor):
                gate, up = weight.chunk(2)
                stem = name.removesuffix("gate_up_proj") + str(expert)
                out |= {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            stem = name.removesuffix("down_proj")
            out |= {f"{stem}{expert}.down_proj.weight": weight for expert, weight in enumerate(tensor)}
        else:
            out[name] = tensor
    return out


class Session:
    """Rows of a model with a cache, fed chunk by chunk."""

    def __init__(self, model: MLAForCausalLM, rows: int, max_len: int = 64) -> None:
        self.model = model
        self.pages_per_row = -(-max_len // PAGE_SIZE)
        allocate(model.cache_specs(), 1 + rows * self.pages_per_row, PAGE_SIZE)
        order = torch.randperm(rows * self.pages_per_row, generator=torch.Generator().manual_seed(3)) + 1
        self.block_table = order.view(rows, -1).to(model.norm.weight.device, torch.int32)

    def prefill(self, chunk_lens: list[int], num_cached: list[int]) -> tuple[MLABatch, Tensor]:
        segment, positions = prefill_segment(chunk_lens, num_cached, self.block_table, page_size=PAGE_SIZE)
        return MLABatch(prefill=segment), positions

    def decode(self, num_cached: list[int], q_len: int) -> tuple[MLABatch, Tensor]:
        cached = torch.tensor(num_cached, dtype=torch.int32, device=self.block_table.device)
        segment, positions = decode_segment(cached, self.block_table, q_len=q_len, page_size=PAGE_SIZE)
        return MLABatch(decode=segment), positions


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())
