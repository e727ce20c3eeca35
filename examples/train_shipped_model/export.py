"""Write the trained model under the tensor names of published DeepSeek-V3 checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import DeepseekV3ForCausalLM, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from transformers.modeling_layers import MtpLayer

SHARDS = 2
CHAT_TEMPLATE = Path(__file__).parents[2] / "mla_compile" / "models" / "shipped" / "chat_template.jinja"
END_OF_TEXT = "<|endoftext|>"


def expert_tensors(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """transformers stacks the experts of a layer in one tensor; checkpoints store each projection by itself."""
    prefix, _, kind = name.rpartition(".")
    tensors = {}
    for expert, weight in enumerate(tensor):
        if kind == "gate_up_proj":
            gate, up = weight.chunk(2)
            tensors[f"{prefix}.{expert}.gate_proj.weight"] = gate
            tensors[f"{prefix}.{expert}.up_proj.weight"] = up
        else:
            tensors[f"{prefix}.{expert}.down_proj.weight"] = weight
    return tensors


def checkpoint_tensors(trunk: DeepseekV3ForCausalLM, mtp: MtpLayer) -> dict[str, Tensor]:
    """All tensors by checkpoint name: bfloat16, except the routing bias (float32). The tied head is left out."""
    layer = f"model.layers.{trunk.config.num_hidden_layers}"
    named = {k: v for k, v in trunk.state_dict().items() if k != "lm_head.weight"}
    for key, value in mtp.state_dict().items():
        key = (
            key.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.", 1)
            if "mtp_block" not in key
            else key
        )
        named[f"{layer}.{key.removeprefix('mtp_block.')}"] = value
    tensors: dict[str, Tensor] = {}
    for name, tensor in named.items():
        dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        tensor = tensor.detach().to("cpu", dtype)
        tensors.update(expert_tensors(name, tensor) if ".mlp.experts." in name else {name: tensor})
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def save_shards(tensors: dict[str, Tensor], folder: Path) -> None:
    """Split into `SHARDS` files of about equal size, in order, with the usual index."""
    total = sum(t.nbytes for t in tensors.values())
    shards: list[dict[str, Tensor]] = [{} for _ in range(SHARDS)]
    seen = 0
    for name, tensor in tensors.items():
        shards[min(seen * SHARDS // total, SHARDS - 1)][name] = tensor
        seen += tensor.nbytes
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{SHARDS:05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def save_tokenizer(file: Path, folder: Path, max_length: int) -> None:
    """tokenizer.json and its configuration, as `AutoTokenizer` expects them."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(file)),
        eos_token=END_OF_TEXT,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE.read_text("utf-8"),
    )
    tokenizer.save_pretrained(folder)


def export(trunk: DeepseekV3ForCausalLM, mtp: MtpLayer, tokenizer: Path, folder: Path) -> None:
    """Everything that `from_pretrained` needs, in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    save_shards(checkpoint_tensors(trunk, mtp), folder)
    config = trunk.config.to_dict() | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    generation = {
        "do_sample": False,
        "eos_token_id": trunk.config.eos_token_id,
        "pad_token_id": trunk.config.eos_token_id,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_tokenizer(tokenizer, folder, trunk.config.max_position_embeddings)
