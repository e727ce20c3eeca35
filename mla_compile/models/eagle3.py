"""EAGLE-3 heads with MLA (arXiv 2503.01840), and EAGLE-3.1: one layer that drafts from the outputs of target layers.

At position i the layer reads the token i + 1 and a hidden state. A pass over verified positions takes the hidden state
from the target: the outputs of some of its layers, joined by `fc`. A chained draft takes the layer's own output.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mla_compile.batch import MLABatch
from mla_compile.errors import MLAError
from mla_compile.hub import find_checkpoint
from mla_compile.models.architecture import Architecture
from mla_compile.models.attention import MLAAttention
from mla_compile.models.checkpoint import (
    CONFIG,
    check_tensors,
    raw_config,
    rope_settings,
    transformers_config,
)
from mla_compile.models.layers import MLP, RMSNorm
from mla_compile.models.rotary import RotaryEmbedding
from mla_compile.models.safetensor_files import SafetensorFiles
from mla_compile.models.settings import FLAG, HEAD_SETTINGS, SETTINGS, check_settings

ARCHITECTURES = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")
"""Of a head with MLA, in its config."""

_SHAPES = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "intermediate_size",
)
"""The settings that a config must have."""
_OPTIONAL = ("rms_norm_eps", "max_position_embeddings", "rope_interleave", "attention_bias", "hidden_act")
_LAYER = ("midlayer.", "layers.0.")
"""The names of the layer in checkpoints: SafeAILab's and SpecForge's, and that of others."""


@dataclass(frozen=True)
class HeadConfig:
    """The config.json of a head.

    file: its path, for errors.
    draft_vocab_size: ids that the head can draft.
    aux_layers: the target layers whose outputs it reads; None for the layers that such heads are trained with.
    norm_before_residual: whether the residual connection begins after `hidden_norm`.
    fc_norm: whether each of the outputs has a norm before `fc`; norm_output: whether a chained draft reads the layer's
        output after the final norm. EAGLE-3.1 has both.
    """

    file: str
    arch: Architecture
    draft_vocab_size: int
    aux_layers: tuple[int, ...] | None
    norm_before_residual: bool
    fc_norm: bool
    norm_output: bool

    @classmethod
    def read(cls, directory: Path) -> "HeadConfig":
        """Raises `MLAError` for a config of another kind of head, or a bad setting, with the file and the setting."""
        file = str(directory / CONFIG)
        raw = raw_config(directory, "the config of an EAGLE-3 head", "use a directory with an EAGLE-3 head")
        prefix = f"{file}: "
        names = raw.get("architectures")
        if not isinstance(names, list) or not set(map(str, names)) & set(ARCHITECTURES):
            raise MLAError(f"{prefix}architectures", "one of " + ", ".join(ARCHITECTURES), f"{names!r:.80}")
        missing = [name for name in _SHAPES if raw.get(name) is None]
        if missing:
            raise MLAError(f"{prefix}{missing[0]}", SETTINGS[missing[0]].expected, "none")
        check_settings(raw, {name: SETTINGS[name] for name in (*_SHAPES, *_OPTIONAL)} | HEAD_SETTINGS, prefix)
        known = {name: raw[name] for name in (*_SHAPES, *_OPTIONAL) if name in raw} | rope_settings(
            raw, prefix
        )
        known |= {"num_hidden_layers": 1, "first_k_dense_replace": 1}
        known["num_key_value_heads"] = known["num_attention_heads"]
        config = transformers_config("deepseek_v3", known, directory / CONFIG)
        hidden, of_target = raw["hidden_size"], raw.get("target_hidden_size")
        if of_target not in (None, hidden):
            raise MLAError(f"{prefix}target_hidden_size", f"hidden_size = {hidden}", of_target)
        settings = raw.get("eagle_config") or {}
        check_settings(settings, {"use_aux_hidden_state": FLAG} | HEAD_SETTINGS, f"{prefix}eagle_config.")
        if settings.get("use_aux_hidden_state") is False:
            raise MLAError(f"{prefix}eagle_config.use_aux_hidden_state", "true", "false")
        layers = settings.get("eagle_aux_hidden_state_layer_ids")
        return cls(
            file=file,
            arch=Architecture.from_config(config, prefix),
            draft_vocab_size=raw.get("draft_vocab_size") or raw["vocab_size"],
            aux_layers=None if layers is None else tuple(layers),
            norm_before_residual=bool(raw.get("norm_before_residual")),
            fc_norm=bool(raw.get("fc_norm")),
            norm_output=bool(raw.get("norm_output")),
        )

    def layers_of(self, model: Any) -> tuple[int, ...]:
        """The layers of a target whose outputs the head reads.

        Raises:
            MLAError: the head does not fit the target.
        """
        for name in ("hidden_size", "vocab_size"):
            mine, its = getattr(self.arch, name), getattr(model, name, None)
            if its is None:
                raise MLAError("model", f"a model with `{name}` and `embed`", type(model).__name__)
            if mine != its:
                raise MLAError(f"{self.file}: {name}", f"that of the target, {its}", mine)
        count = getattr(model, "num_aux_layers", 0)
        layers = self.aux_layers or (1, count // 2 - 1, count - 4)
        if not all(0 <= layer < count for layer in layers):
            name = f"{self.file}: eagle_config.eagle_aux_hidden_state_layer_ids"
            raise MLAError(name, f"layers of the target, which has {count}", list(layers))
        return layers


class Eagle3Layer(nn.Module):
    """A decoder layer whose attention reads an embedding beside the hidden state."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        arch = config.arch
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.hidden_norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.self_attn = MLAAttention(arch, input_size=2 * arch.hidden_size)
        self.post_attention_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.mlp = MLP(arch.hidden_size, arch.intermediate_size)

    def forward(
        self, embedded: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], batch: MLABatch
    ) -> Tensor:
        """`embedded` and `hidden` `[tokens, hidden_size]` to `[tokens, hidden_size]`."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        both = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        hidden = residual + self.self_attn(both, rope, batch)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Eagle3Head(nn.Module):
    """The weights of a head, and its passes.

    place: for each id of the target's vocabulary, its place among the ids that the head can draft, int64
        `[vocab_size]`; `draft_vocab_size` for an id that it cannot draft. None if it can draft all.
    """

    place: Tensor | None

    def __init__(
        self, config: HeadConfig, num_aux_layers: int, *, has_embedding: bool, maps_ids: bool
    ) -> None:
        super().__init__()
        arch = config.arch
        self.norm_output = config.norm_output
        self.fc = nn.Linear(num_aux_layers * arch.hidden_size, arch.hidden_size, bias=False)
        norms = [RMSNorm(arch.hidden_size, arch.rms_norm_eps) for _ in range(num_aux_layers)]
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.layer = Eagle3Layer(config)
        self.norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.lm_head = nn.Linear(arch.hidden_size, config.draft_vocab_size, bias=False)
        self.embed_tokens = nn.Embedding(arch.vocab_size, arch.hidden_size) if has_embedding else None
        self.rotary = RotaryEmbedding(arch.rope)
        place = torch.zeros(arch.vocab_size, dtype=torch.int64) if maps_ids else None
        self.register_buffer("place", place, persistent=False)
        self.requires_grad_(False)

    def join(self, aux: Sequence[Tensor]) -> Tensor:
        """The outputs of the target's layers, each `[tokens, hidden_size]`, to hidden states."""
        if self.fc_norm is not None:
            aux = [norm(each) for norm, each in zip(self.fc_norm, aux, strict=True)]
        hidden: Tensor = self.fc(torch.cat(list(aux), dim=-1))
        return hidden

    def forward(self, embedded: Tensor, hidden: Tensor, positions: Tensor, batch: MLABatch) -> Tensor:
        """The layer at `positions` `[tokens]`: hidden states for a chained draft, and for `logits`."""
        hidden = self.layer(embedded, hidden, self.rotary(positions), batch)
        return self.norm(hidden) if self.norm_output else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., hidden_size]` to logits of the target's ids, `[..., vocab_size]`; -inf for those it cannot draft."""
        logits: Tensor = self.lm_head(hidden if self.norm_output else self.norm(hidden))
        if self.place is None:
            return logits
        return F.pad(logits, (0, 1), value=-torch.inf).index_select(-1, self.place)


def load_head(path: str | Path, model: Any, *, dtype: torch.dtype) -> tuple[Eagle3Head, tuple[int, ...]]:
    """The head in a directory for a target, and the target's layers whose outputs it reads.

    path: the head's directory, or ORG/NAME of one in the local Hugging Face cache.
    model: the target, with `hidden_size`, `vocab_size`, `num_aux_layers` and `device`. On the meta device no weight is
        read.

    Raises:
        MLAError: a missing or unreadable file, a head of another kind or for another target, missing, extra or
            misshapen tensors, ids outside the vocabulary; before any memory is allocated.
    """
    directory = find_checkpoint(path, "drafter_model")
    config = HeadConfig.read(directory)
    layers = config.layers_of(model)
    files = SafetensorFiles(directory)
    has_embedding, maps_ids = "embed_tokens.weight" in files.entries, "d2t" in files.entries
    if not maps_ids and config.draft_vocab_size != config.arch.vocab_size:
        raise MLAError(str(directory), "a tensor d2t, as its vocabulary is reduced", "none")
    with torch.device("meta"):
        head = Eagle3Head(config, len(layers), has_embedding=has_embedding, maps_ids=maps_ids).to(dtype)
    layer = next((each for each in _LAYER if any(name.startswith(each) for name in files.entries)), _LAYER[0])

    def parameters() -> Iterator[tuple[str, nn.Parameter]]:
        """With their names in the files."""
        for name, parameter in head.named_parameters():
            yield (layer + name.removeprefix("layer.") if name.startswith("layer.") else name), parameter

    shapes = {name: tuple(parameter.shape) for name, parameter in parameters()}
    entries = {name: entry for name, entry in files.entries.items() if name not in ("d2t", "t2d")}
    expected = "the tensors of an EAGLE-3 head with its config"
    check_tensors(directory, entries, shapes, {}, expected=expected, may_be_fp8=False)
    place = _place(files, directory, config) if maps_ids else None
    if model.device.type == "meta":
        return head, layers
    head.to_empty(device=model.device)
    for name, parameter in parameters():
        parameter.copy_(files.read(name))
    if place is not None:
        head.place = place.to(model.device)
    return head.eval(), layers


def _place(files: SafetensorFiles, directory: Path, config: HeadConfig) -> Tensor:
    """See `Eagle3Head`; from `d2t`, the offsets from the head's ids to the target's."""
    draft_vocab_size, vocab_size, entry = (
        config.draft_vocab_size,
        config.arch.vocab_size,
        files.entries["d2t"],
    )
    if entry.shape != (draft_vocab_size,) or entry.dtype not in ("I64", "I32"):
        raise MLAError(f"{directory}: d2t", f"int64 [{draft_vocab_size}]", entry)
    draft_ids = torch.arange(draft_vocab_size)
    target_ids = draft_ids + files.read("d2t").long()
    if ((target_ids < 0) | (target_ids >= vocab_size)).any() or len(target_ids.unique()) < draft_vocab_size:
        expected = f"offsets to different ids in [0, {vocab_size})"
        raise MLAError(f"{directory}: d2t", expected, "others")
    place = torch.full((vocab_size,), draft_vocab_size)
    place[target_ids] = draft_ids
    return place
