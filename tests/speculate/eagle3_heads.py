"""EAGLE-3 heads with random weights, and what they draft by the definition: float64, without a cache.

The definition: "EAGLE-3" (arXiv 2503.01840), section 3; EAGLE-3.1's norms; DeepSeek-V2 (arXiv 2405.04434) for MLA. The
layers of Llama and Qwen3 are those of the package speculators, which also writes heads with them.
"""

import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from mla_compile import MLABatch, prefill_segment
from mla_compile.caches import allocate
from mla_compile.models import MLAForCausalLM
from tests.models_for_tests import VOCAB
from tests.speculate.from_scratch import PAGE, Choose, greedy

HEADS, NOPE, ROPE, VALUE, LATENT, QUERIES, MLP = 2, 6, 4, 5, 16, 12, 24
DRAFTED = 30
"""Ids of a reduced vocabulary."""
EPS = 1e-6


def config_of(hidden: int, layers: list[int], **settings: Any) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "num_attention_heads": HEADS,
        "q_lora_rank": QUERIES,
        "kv_lora_rank": LATENT,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE,
        "intermediate_size": MLP,
        "rms_norm_eps": EPS,
        "rope_theta": 10000.0,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True},
        **settings,
    }


def weights_of(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """float64; the layer's names are those of SpecForge."""
    g = torch.Generator().manual_seed(seed)
    hidden, num_aux = config["hidden_size"], len(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
    vocab = config["vocab_size"]
    drafted = config.get("draft_vocab_size") or vocab

    def matrix(out: int, size: int) -> Tensor:
        return torch.randn(out, size, generator=g, dtype=torch.float64) * size**-0.5

    def norm(size: int) -> Tensor:
        return torch.rand(size, generator=g, dtype=torch.float64) + 0.5

    attention = (
        {
            "q_proj": matrix(config["num_attention_heads"] * config["head_dim"], 2 * hidden),
            "k_proj": matrix(config["num_key_value_heads"] * config["head_dim"], 2 * hidden),
            "v_proj": matrix(config["num_key_value_heads"] * config["head_dim"], 2 * hidden),
            "o_proj": matrix(hidden, config["num_attention_heads"] * config["head_dim"]) * 3,
        }
        if "head_dim" in config
        else {
            "q_a_proj": matrix(QUERIES, 2 * hidden),
            "q_a_layernorm": norm(QUERIES),
            "q_b_proj": matrix(HEADS * (NOPE + ROPE), QUERIES),
            "kv_a_proj_with_mqa": matrix(LATENT + ROPE, 2 * hidden),
            "kv_a_layernorm": norm(LATENT),
            "kv_b_proj": matrix(HEADS * (NOPE + VALUE), LATENT),
            "o_proj": matrix(hidden, HEADS * VALUE) * 3,  # so that drafts depend on attention
        }
    )
    mlp = {"gate_proj": matrix(MLP, hidden), "up_proj": matrix(MLP, hidden), "down_proj": matrix(hidden, MLP)}
    layer = {f"self_attn.{name}": weight for name, weight in attention.items()}
    layer |= {f"mlp.{name}": weight for name, weight in mlp.items()}
    layer |= {name: norm(hidden) for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")}
    found = {f"midlayer.{name}.weight": weight for name, weight in layer.items()}
    found |= {"fc.weight": matrix(hidden, num_aux * hidden), "norm.weight": norm(hidden)}
    found["lm_head.weight"] = matrix(drafted, hidden) * 3
    if config.get("fc_norm"):
        found |= {f"fc_norm.{i}.weight": norm(hidden) for i in range(num_aux)}
    if drafted < vocab:
        ids = torch.randperm(vocab, generator=g)[:drafted].sort().values
        found["d2t"] = ids - torch.arange(drafted)
        found["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    return found


def llama_config(hidden: int, layers: list[int], **settings: Any) -> dict[str, Any]:
    """Of a head with Llama's layer, as SpecForge writes it; its `model_type` is the target's."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "kimi_k2",
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "intermediate_size": MLP,
        "rms_norm_eps": EPS,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "sliding_window": None,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True},
        **settings,
    }


@cache
def speculators() -> SimpleNamespace:
    """The classes of speculators that tests use, imported without the packages that only its training needs."""
    absent = [name for name in ("datasets", "hs_connectors") if importlib.util.find_spec(name) is None]
    sys.modules.update({name: mock.MagicMock() for name in absent})
    try:
        eagle3 = pytest.importorskip("speculators.models.eagle3")
        from speculators.models.eagle3 import core, model_definitions
    finally:
        for name in absent:
            del sys.modules[name]
    return SimpleNamespace(
        Config=eagle3.Eagle3SpeculatorConfig,
        Model=core.Eagle3DraftModel,
        layers=model_definitions.model_classes,
    )


def speculators_head(directory: Path, kind: str, hidden: int, layers: list[int], **settings: Any) -> Path:
    """A head that speculators writes, with a reduced vocabulary.

    kind: "llama" or "qwen3", of its layer. layers: the inputs of target layers that it reads.
    """
    from transformers import AutoConfig

    package = speculators()
    layer = AutoConfig.for_model(
        kind,
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=MLP,
        rms_norm_eps=EPS,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        num_hidden_layers=1,
    )
    layer._attn_implementation = "eager"
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:DRAFTED].sort().values
    config = package.Config(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFTED,
        eagle_aux_hidden_state_layer_ids=layers,
        **settings,
    )
    head = package.Model(config)
    head.load_vocab_mappings(
        torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True), ids - torch.arange(DRAFTED)
    )
    g = torch.Generator().manual_seed(2)
    for parameter in head.parameters():
        values = torch.randn(parameter.shape, generator=g) * parameter.shape[-1] ** -0.5
        parameter.data = values * 2 if parameter.dim() > 1 else 1 + values
    head.save_pretrained(directory)
    return directory


def write_head(directory: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, directory / "model.safetensors")
    return directory


def outputs_of(target: MLAForCausalLM) -> Callable[[list[int]], Sequence[Tensor]]:
    """A function from a text to the outputs of all layers of a target, on new caches."""

    def outputs(text: list[int]) -> Sequence[Tensor]:
        allocate(target.cache_specs(), 2 + (len(text) + 8) // PAGE, PAGE)
        table = torch.arange(1, 1 - -len(text) // PAGE, dtype=torch.int32)[None]
        segment, positions = prefill_segment([len(text)], [0], table, page_size=PAGE)
        layers = range(target.num_aux_layers)
        return target(torch.tensor(text), positions, MLABatch(prefill=segment), layers).aux

    return outputs


class DefinedHead:
    """A head in a directory, for a target.

    outputs: from a text to the outputs of the target's layers, each `[tokens, hidden_size]`.
    embedding: the target's, `[vocab_size, hidden_size]`.
    """

    def __init__(
        self, directory: Path, outputs: Callable[[list[int]], Sequence[Tensor]], embedding: Tensor
    ) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        self.weights = {
            name: x.double() if x.is_floating_point() else x
            for name, x in load_file(directory / "model.safetensors").items()
        }
        self.outputs, self.embedding = outputs, embedding

    def drafts(self, text: list[int], count: int, choose: Choose = greedy) -> list[int]:
        """What the head proposes after `text`, whose last token the target has just sampled."""
        hidden = self._joined(text[:-1])
        inputs, found = text[1:], list[int]()
        for j in range(count):
            out = self._layer(self._embedded(inputs), hidden)
            normed = self._norm("norm", out)
            found.append(choose(self._logits(normed)[-1], len(text) + j))
            hidden = torch.cat([hidden, (normed if self.config.get("norm_output") else out)[-1:]])
            inputs = [*inputs, found[-1]]
        return found

    def logits(self, inputs: list[int], aux: Sequence[Tensor]) -> Tensor:
        """Of the first draft after each of `inputs`, beside the outputs `aux` of the layers that the head reads."""
        out = self._layer(self._embedded(inputs), self._join(aux))
        return self._logits(self._norm("norm", out))

    def _logits(self, normed: Tensor) -> Tensor:
        logits = torch.full((len(normed), len(self.embedding)), -torch.inf, dtype=torch.float64)
        drafted = F.linear(normed, self.weights["lm_head.weight"])
        logits[:, torch.arange(drafted.shape[1]) + self.weights.get("d2t", 0)] = drafted
        return logits

    def _joined(self, text: list[int]) -> Tensor:
        outputs = self.outputs(text)
        if "speculators_model_type" in self.config:  # which counts the inputs of layers
            layers = [i - 1 for i in self.config["eagle_aux_hidden_state_layer_ids"]]
        else:
            layers = self.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        return self._join([outputs[i] for i in layers])

    def _join(self, aux: Sequence[Tensor]) -> Tensor:
        if self.config.get("fc_norm"):
            aux = [self._norm(f"fc_norm.{i}", each) for i, each in enumerate(aux)]
        joined = torch.cat(aux, dim=-1)
        if self.config.get("norm_before_fc"):
            joined = self._norm("input_norm", joined)
        return F.linear(joined, self.weights["fc.weight"])

    def _embedded(self, ids: list[int]) -> Tensor:
        return self.weights.get("embed_tokens.weight", self.embedding)[torch.tensor(ids)]

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.weights[f"{name}.weight"]

    def _layer(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        def linear(name: str, x: Tensor) -> Tensor:
            return F.linear(x, self.weights[f"midlayer.{name}.weight"])

        normed = self._norm("midlayer.hidden_norm", hidden)
        residual = normed if self.config.get("norm_before_residual") else hidden
        x = torch.cat([self._norm("midlayer.input_layernorm", embedded), normed], dim=-1)
        n = len(x)
        q = linear(
            "self_attn.q_b_proj",
            self._norm("midlayer.self_attn.q_a_layernorm", linear("self_attn.q_a_proj", x)),
        )
        q_nope, q_pe = q.view(n, HEADS, NOPE + ROPE).split([NOPE, ROPE], dim=-1)
        latent, k_pe = linear("self_attn.kv_a_proj_with_mqa", x).split([LATENT, ROPE], dim=-1)
        kv = linear("self_attn.kv_b_proj", self._norm("midlayer.self_attn.kv_a_layernorm", latent))
        k_nope, v = kv.view(n, HEADS, NOPE + VALUE).split([NOPE, VALUE], dim=-1)
        q_pe, k_pe = _rotated(q_pe), _rotated(k_pe[:, None])
        scores = torch.einsum("qhd,khd->hqk", q_nope, k_nope) + torch.einsum("qhd,kd->hqk", q_pe, k_pe[:, 0])
        scores = scores * (NOPE + ROPE) ** -0.5
        weights = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
        hidden = residual + linear("self_attn.o_proj", attended)
        y = self._norm("midlayer.post_attention_layernorm", hidden)
        return hidden + linear("mlp.down_proj", F.silu(linear("mlp.gate_proj", y)) * linear("mlp.up_proj", y))


class SpeculatorsHead(DefinedHead):
    """A head with the layer of Llama or Qwen3: speculators' own class computes it."""

    def __init__(self, directory: Path, *args: Any) -> None:
        super().__init__(directory, *args)
        settings = self.config.get("transformer_layer_config") or {**self.config, "model_type": "llama"}
        names = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        names += ("intermediate_size", "rms_norm_eps")
        from transformers import AutoConfig

        config = AutoConfig.for_model(settings["model_type"], **{name: settings[name] for name in names})
        config._attn_implementation = "eager"
        classes = speculators().layers[settings["model_type"]]
        residual = bool(self.config.get("norm_before_residual"))
        self.layer = classes.first_layer_class(config, 0, norm_before_residual=residual).double()
        prefix = "layers.0." if any(name.startswith("layers.0.") for name in self.weights) else "midlayer."
        mine = {n.removeprefix(prefix): x for n, x in self.weights.items() if n.startswith(prefix)}
        self.layer.load_state_dict(mine)
        self.rotary = classes.rotary_emb_class(config)

    def _layer(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        x = torch.cat([embedded, hidden], dim=-1)[None].double()
        n = x.shape[1]
        mask = torch.full((n, n), -torch.inf, dtype=x.dtype).triu(1)[None, None]
        with torch.no_grad():
            rope = self.rotary(x, torch.arange(n)[None])
            out: Tensor = self.layer(x, attention_mask=mask, position_embeddings=rope)[0]
        return out


def _rotated(x: Tensor) -> Tensor:
    """Pairs (0, 1), (2, 3), ... of `x` `[tokens, heads, ROPE]`, rotated by the tokens' positions 0, 1, ...."""
    freqs = 10000.0 ** (-torch.arange(0, ROPE, 2, dtype=torch.float64) / ROPE)
    angles = torch.arange(len(x), dtype=torch.float64)[:, None, None] * freqs
    even, odd = x[..., ::2], x[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
