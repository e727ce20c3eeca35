"""Write a checkpoint of GLM-4.7-Flash's published shape, with few layers, an MTP layer and random bfloat16 weights.

    python -m benchmarks.random_checkpoint DIRECTORY --layers 4

The checkpoint has the shipped model's tokenizer and loads as any other: 4 layers and the MTP layer take 7 GB.
`--set NAME=NUMBER` changes a setting of the shape.
"""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Glm4MoeLiteConfig

from benchmarks.reporting import command_parser
from mla_compile.defaults import SHIPPED_MODEL


def shapes_of_layer(config: Any, *, dense: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names in a layer, as published, and shapes."""
    c, hidden = config, config.hidden_size
    heads, head = c.num_attention_heads, c.qk_nope_head_dim + c.qk_rope_head_dim
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    yield "self_attn.q_a_proj.weight", (c.q_lora_rank, hidden)
    yield "self_attn.q_a_layernorm.weight", (c.q_lora_rank,)
    yield "self_attn.q_b_proj.weight", (heads * head, c.q_lora_rank)
    yield "self_attn.kv_a_proj_with_mqa.weight", (c.kv_lora_rank + c.qk_rope_head_dim, hidden)
    yield "self_attn.kv_a_layernorm.weight", (c.kv_lora_rank,)
    yield "self_attn.kv_b_proj.weight", (heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
    yield "self_attn.o_proj.weight", (hidden, heads * c.v_head_dim)
    if dense:
        yield from shapes_of_mlp("mlp", hidden, c.intermediate_size)
        return
    yield "mlp.gate.weight", (c.n_routed_experts, hidden)
    yield "mlp.gate.e_score_correction_bias", (c.n_routed_experts,)
    yield from shapes_of_mlp("mlp.shared_experts", hidden, c.n_shared_experts * c.moe_intermediate_size)
    for expert in range(c.n_routed_experts):
        yield from shapes_of_mlp(f"mlp.experts.{expert}", hidden, c.moe_intermediate_size)


def shapes_of_mlp(name: str, hidden: int, intermediate: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of gate, up and down."""
    yield f"{name}.gate_proj.weight", (intermediate, hidden)
    yield f"{name}.up_proj.weight", (intermediate, hidden)
    yield f"{name}.down_proj.weight", (hidden, intermediate)


def shards(config: Any) -> Iterator[dict[str, tuple[int, ...]]]:
    """The tensors of each file: those outside of layers first, then one layer a file, the MTP layer last."""
    hidden, vocab, layers = config.hidden_size, config.vocab_size, config.num_hidden_layers
    ends = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    yield ends | {"model.norm.weight": (hidden,)}
    for i in range(layers + 1):
        names = dict(shapes_of_layer(config, dense=i == 0))
        if i == layers:
            names |= {"eh_proj.weight": (hidden, 2 * hidden), "enorm.weight": (hidden,)}
            names |= {"hnorm.weight": (hidden,), "shared_head.norm.weight": (hidden,)}
            names |= {"embed_tokens.weight": (vocab, hidden), "shared_head.head.weight": (vocab, hidden)}
        yield {f"model.layers.{i}.{name}": shape for name, shape in names.items()}


def config_of(layers: int, settings: dict[str, Any]) -> Glm4MoeLiteConfig:
    """settings: of the class, in the place of the published ones."""
    kinds = ["dense", *["sparse"] * (layers - 1)]
    return Glm4MoeLiteConfig(num_hidden_layers=layers, mlp_layer_types=kinds, **settings)


def write(directory: Path, layers: int, settings: dict[str, Any]) -> None:
    """Write the checkpoint of `config_of`."""
    directory.mkdir(parents=True, exist_ok=True)
    config = config_of(layers, settings)
    raw = config.to_dict() | {"architectures": ["Glm4MoeLiteForCausalLM"], "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(raw | {"dtype": "bfloat16", "eos_token_id": 0}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED_MODEL / name, directory / name)
    generator = torch.Generator("cuda" if torch.cuda.is_available() else "cpu").manual_seed(0)
    copied: dict[str, Tensor] = {}
    places: dict[str, str] = {}
    for i, shapes in enumerate(shards(config)):
        tensors = {}
        for name, shape in shapes.items():
            ending = ".".join(name.split(".")[-2:])
            tensors[name] = copied[ending] if ending in copied else draw(name, shape, generator)
        if i == 0:  # the MTP layer has copies of these
            copied["embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
            copied["head.weight"] = tensors["lm_head.weight"]
        file = f"model-{i:05}.safetensors"
        save_file({name: tensor.cpu() for name, tensor in tensors.items()}, directory / file)
        places |= dict.fromkeys(shapes, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A random weight that keeps the size of hidden states; 1 for norms, 0 for the router's bias."""
    if len(shape) == 1:
        is_bias = name.endswith("e_score_correction_bias")
        return torch.zeros(shape) if is_bias else torch.ones(shape, dtype=torch.bfloat16)
    noise = torch.randn(shape, generator=generator, dtype=torch.bfloat16, device=generator.device)
    return noise / math.sqrt(shape[-1])


def main() -> None:
    """The command."""
    parser = command_parser(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=NUMBER", dest="settings")
    args = parser.parse_args()
    settings = {name: int(number) for name, _, number in (each.partition("=") for each in args.settings)}
    write(args.directory, args.layers, settings)


if __name__ == "__main__":
    main()
