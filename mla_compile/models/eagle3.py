"""EAGLE-3 heads (arXiv 2503.01840), and EAGLE-3.1: one layer that drafts from the outputs of target layers.

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
from mla_compile.caches import CacheSpec
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
from mla_compile.models.grouped_query import GroupedQueries, GroupedQueryAttention
from mla_compile.models.layers import MLP, RMSNorm
from mla_compile.models.layout import pack_adjacent
from mla_compile.models.parallel import Parallel, gathered
from mla_compile.models.rotary import Rope, RotaryEmbedding
from mla_compile.models.safetensor_files import SafetensorFiles
from mla_compile.models.settings import FLAG, HEAD_SETTINGS, SETTINGS, check_settings

LLAMA, QWEN3, MLA = "llama", "qwen3", "deepseek_v3"
ARCHITECTURES = {
    "Eagle3DeepseekV2ForCausalLM": MLA,
    "Eagle3DeepseekV3ForCausalLM": MLA,
    "LlamaForCausalLMEagle3": LLAMA,
}
"""The kind of layer by the `architectures` in a config of SafeAILab's or SpecForge's."""

_SHAPES = ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size")
_MLA_SHAPES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""The settings that a config must have, those of heads with MLA last."""
_OPTIONAL = ("rms_norm_eps", "max_position_embeddings", "attention_bias", "hidden_act")
_ONLY_VALUE = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "use_sliding_window": False}
"""Settings of Llama's layers that change the computation, and the value that is supported."""
_HEAD = "lm_head.weight"
_LAYER = ("midlayer.", "layers.0.")
"""The names of the layer in checkpoints: SafeAILab's and SpecForge's, and that of others."""


@dataclass(frozen=True)
class HeadConfig:
    """The config.json of a head.

    file: its path, for errors.
    attention: the shapes of its attention; an `Architecture` for MLA.
    draft_vocab_size: ids that the head can draft.
    aux_layers: the target layers whose outputs it reads; None for the layers that such heads are trained with.
    norm_before_residual: whether the residual connection begins after `hidden_norm`.
    norm_before_fc: whether the joined outputs have a norm before `fc`; fc_norm: whether each of them has its own.
    norm_output: whether a chained draft reads the layer's output after the final norm. EAGLE-3.1 has it and `fc_norm`.
    """

    file: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    rms_norm_eps: float
    rope: Rope
    attention: Architecture | GroupedQueries
    draft_vocab_size: int
    aux_layers: tuple[int, ...] | None
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    @classmethod
    def read(cls, directory: Path) -> "HeadConfig":
        """Raises `MLAError` for a config of another kind of head, or a bad setting, with the file and the setting."""
        file = directory / CONFIG
        raw = raw_config(directory, "the config of an EAGLE-3 head", "use a directory with an EAGLE-3 head")
        prefix = f"{file}: "
        is_speculators = raw.get("speculators_model_type") is not None
        kind, layer, of_layer = (_speculators_layer if is_speculators else _flat_layer)(raw, prefix)
        needed = _SHAPES + (_MLA_SHAPES if kind == MLA else ())
        missing = [name for name in needed if layer.get(name) is None]
        if missing:
            raise MLAError(f"{of_layer}{missing[0]}", SETTINGS[missing[0]].expected, "none")
        allowed = (*needed, *_OPTIONAL, *(("rope_interleave",) if kind == MLA else ("num_key_value_heads",)))
        check_settings(layer, {name: SETTINGS[name] for name in allowed}, of_layer)
        for settings, where in ((raw, prefix), (layer, of_layer)):
            check_settings(settings, HEAD_SETTINGS, where)
        known = {name: layer[name] for name in allowed if name in layer} | rope_settings(layer, of_layer)
        rope, attention = (_mla if kind == MLA else _grouped_query)(kind, known, layer, file, of_layer)
        hidden, of_target = layer["hidden_size"], raw.get("target_hidden_size")
        if of_target not in (None, hidden):
            raise MLAError(f"{prefix}target_hidden_size", f"hidden_size = {hidden}", of_target)
        if raw.get("norm_before_fc") and raw.get("fc_norm"):
            raise MLAError(f"{prefix}norm_before_fc, fc_norm", "one of the two", "both")
        return cls(
            file=str(file),
            vocab_size=layer["vocab_size"],
            hidden_size=hidden,
            intermediate_size=layer["intermediate_size"],
            rms_norm_eps=layer.get("rms_norm_eps", 1e-6),
            rope=rope,
            attention=attention,
            draft_vocab_size=raw.get("draft_vocab_size") or layer["vocab_size"],
            aux_layers=_aux_layers(raw, prefix, is_speculators),
            norm_before_residual=bool(raw.get("norm_before_residual")),
            norm_before_fc=bool(raw.get("norm_before_fc")),
            fc_norm=bool(raw.get("fc_norm")),
            norm_output=bool(raw.get("norm_output")),
        )

    def layers_of(self, model: Any) -> tuple[int, ...]:
        """The layers of a target whose outputs the head reads.

        Raises:
            MLAError: the head does not fit the target.
        """
        for name in ("hidden_size", "vocab_size", "num_aux_layers"):
            if not getattr(model, name, None):
                raise _lacks(model, name)
        for name in ("hidden_size", "vocab_size"):
            mine, its = getattr(self, name), getattr(model, name)
            if mine != its:
                raise MLAError(f"{self.file}: {name}", f"that of the target, {its}", mine)
        count = model.num_aux_layers
        layers = self.aux_layers or (1, count // 2 - 1, count - 4)
        if not all(0 <= layer < count for layer in layers):
            name = f"{self.file}: eagle_aux_hidden_state_layer_ids"
            raise MLAError(name, f"layers of the target, which has {count}", f"the outputs of {list(layers)}")
        return layers


def _lacks(model: object, name: str) -> MLAError:
    hint = "docs/own-module.md lists the members of a model that drafters need"
    return MLAError("model", f"a model with `{name}`, for an EAGLE-3 head", type(model).__name__, hint)


_Layer = tuple[str, dict[str, Any], str]
"""The kind of a head's layer, the layer's settings, and what precedes their names in errors."""


def _flat_layer(raw: dict[str, Any], prefix: str) -> _Layer:
    """Of a config with one level, as SafeAILab and SpecForge write it; its `model_type` is often the target's."""
    names = raw.get("architectures")
    texts = names if isinstance(names, list) else []
    kind = next((ARCHITECTURES[each] for each in map(str, texts) if each in ARCHITECTURES), None)
    if kind is None:
        expected = f"one of {', '.join(ARCHITECTURES)}, or speculators_model_type: 'eagle3'"
        raise MLAError(f"{prefix}architectures", expected, f"{names!r:.80}")
    return kind, raw, prefix


def _speculators_layer(raw: dict[str, Any], prefix: str) -> _Layer:
    """Of a config that the package speculators wrote."""
    if raw["speculators_model_type"] != "eagle3":
        raise MLAError(
            f"{prefix}speculators_model_type", "'eagle3'", f"{raw['speculators_model_type']!r:.80}"
        )
    layer = raw.get("transformer_layer_config")
    kind = layer.get("model_type") if isinstance(layer, dict) else None
    if not isinstance(layer, dict) or kind not in (LLAMA, QWEN3):
        expected = f"an object with model_type: {LLAMA!r} or {QWEN3!r}"
        raise MLAError(f"{prefix}transformer_layer_config", expected, f"{layer!r:.80}")
    return str(kind), layer, f"{prefix}transformer_layer_config."


def _mla(
    kind: str, known: dict[str, Any], layer: dict[str, Any], file: Path, prefix: str
) -> tuple[Rope, Architecture]:
    """The rotation and the shapes of a layer with MLA; `known` are its checked settings."""
    known |= {"num_hidden_layers": 1, "first_k_dense_replace": 1}
    known["num_key_value_heads"] = known["num_attention_heads"]
    arch = Architecture.from_config(transformers_config(kind, known, file), prefix)
    return arch.rope, arch


def _grouped_query(
    kind: str, known: dict[str, Any], layer: dict[str, Any], file: Path, prefix: str
) -> tuple[Rope, GroupedQueries]:
    """The rotation and the shapes of a layer of Llama or Qwen3; `known` are its checked settings."""
    for name, only in _ONLY_VALUE.items():
        if layer.get(name, only) not in (only, None):
            raise MLAError(f"{prefix}{name}", repr(only), f"{layer[name]!r:.80}")
    is_sliding = layer.get("sliding_window") is not None and layer.get("use_sliding_window") is not False
    if is_sliding or "sliding_attention" in (layer.get("layer_types") or ()):
        raise MLAError(
            f"{prefix}sliding_window", "null, as all keys are attended", layer.get("sliding_window")
        )
    heads, kv_heads = known["num_attention_heads"], known.get("num_key_value_heads")
    kv_heads = kv_heads or heads
    if heads % kv_heads:
        raise MLAError(
            f"{prefix}num_key_value_heads", f"a divisor of num_attention_heads = {heads}", kv_heads
        )
    head_dim = layer.get("head_dim") or known["hidden_size"] // heads
    if head_dim < 2 or head_dim % 2:
        raise MLAError(f"{prefix}head_dim", "an even number, as pairs are rotated", head_dim)
    known |= {"num_hidden_layers": 1, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    config = transformers_config(kind, known, file)
    eps = layer.get("rms_norm_eps", 1e-6) if kind == QWEN3 else None
    return Rope.from_config(config, prefix), GroupedQueries(heads, kv_heads, head_dim, eps)


def _aux_layers(raw: dict[str, Any], prefix: str, is_speculators: bool) -> tuple[int, ...] | None:
    """See `HeadConfig`. speculators counts the inputs of layers, SpecForge the outputs."""
    name = "eagle_aux_hidden_state_layer_ids"
    if is_speculators:
        inputs = raw.get(name)
        if inputs is not None and 0 in inputs:
            raise MLAError(f"{prefix}{name}", "inputs of layers >= 1, as 0 is the embedding", inputs)
        return None if inputs is None else tuple(each - 1 for each in inputs)
    settings = raw.get("eagle_config") or {}
    check_settings(settings, {"use_aux_hidden_state": FLAG} | HEAD_SETTINGS, f"{prefix}eagle_config.")
    if settings.get("use_aux_hidden_state") is False:
        raise MLAError(f"{prefix}eagle_config.use_aux_hidden_state", "true", "false")
    layers = settings.get(name)
    return None if layers is None else tuple(layers)


class Eagle3Layer(nn.Module):
    """A decoder layer whose attention reads an embedding beside the hidden state."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        size, eps, shapes = config.hidden_size, config.rms_norm_eps, config.attention
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn: MLAAttention | GroupedQueryAttention
        if isinstance(shapes, Architecture):
            self.self_attn = MLAAttention(shapes, input_size=2 * size)
        else:
            self.self_attn = GroupedQueryAttention(shapes, input_size=2 * size, output_size=size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(size, config.intermediate_size)

    def fill(self, embedded: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], batch: MLABatch) -> None:
        """Write the cache at prompt chunks; arguments as in `forward`."""
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], dim=-1)
        self.self_attn.fill(both, rope, batch)

    def forward(
        self, embedded: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], batch: MLABatch
    ) -> Tensor:
        """`embedded` and `hidden` `[tokens, hidden_size]` of decode rows to `[tokens, hidden_size]`."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        both = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        hidden = residual + self.self_attn(both, rope, batch)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Eagle3Head(nn.Module):
    """The weights of a head, and its passes.

    Processes that share the target have whole heads, but each has a part of the rows of `lm_head`. A product's bits may
    differ between processes, and all must draft the same ids.

    parallel: this process's place among those.
    place: for each id of the target's vocabulary, its place among the ids that the head can draft, int64
        `[vocab_size]`; `draft_vocab_size` for an id that it cannot draft. None if it can draft all.
    """

    place: Tensor | None

    def __init__(
        self,
        config: HeadConfig,
        num_aux_layers: int,
        *,
        has_embedding: bool,
        maps_ids: bool,
        parallel: Parallel | None,
    ) -> None:
        super().__init__()
        self.parallel = parallel
        num_processes = 1 if parallel is None else parallel.size
        size, eps = config.hidden_size, config.rms_norm_eps
        self.norm_output = config.norm_output
        self.fc = nn.Linear(num_aux_layers * size, size, bias=False)
        self.input_norm = RMSNorm(num_aux_layers * size, eps) if config.norm_before_fc else None
        norms = [RMSNorm(size, eps) for _ in range(num_aux_layers)]
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.layer = Eagle3Layer(config)
        self.norm = RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size // num_processes, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if has_embedding else None
        self.rotary = RotaryEmbedding(config.rope)
        place = torch.zeros(config.vocab_size, dtype=torch.int64) if maps_ids else None
        self.register_buffer("place", place, persistent=False)
        self.requires_grad_(False)

    def cache_specs(self) -> list[CacheSpec]:
        """The cache of the layer."""
        return self.layer.self_attn.cache_specs("eagle3.self_attn", "drafter", lookahead=1)

    def join(self, aux: Sequence[Tensor]) -> Tensor:
        """The outputs of the target's layers, each `[tokens, hidden_size]`, to hidden states."""
        if self.fc_norm is not None:
            aux = [norm(each) for norm, each in zip(self.fc_norm, aux, strict=True)]
        joined = torch.cat(list(aux), dim=-1)
        hidden: Tensor = self.fc(joined if self.input_norm is None else self.input_norm(joined))
        return hidden

    def fill(self, embedded: Tensor, hidden: Tensor, positions: Tensor, batch: MLABatch) -> None:
        """Write the layer's cache at the `positions` `[tokens]` of prompt chunks."""
        self.layer.fill(embedded, hidden, self.rotary(positions), batch)

    def forward(self, embedded: Tensor, hidden: Tensor, positions: Tensor, batch: MLABatch) -> Tensor:
        """The layer at `positions` `[tokens]` of decode rows: hidden states for a chained draft, and for `logits`."""
        hidden = self.layer(embedded, hidden, self.rotary(positions), batch)
        return self.norm(hidden) if self.norm_output else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., hidden_size]` to logits of the target's ids, `[..., vocab_size]`; -inf for those it cannot draft."""
        logits = gathered(self.lm_head(hidden if self.norm_output else self.norm(hidden)), self.parallel)
        if self.place is None:
            return logits
        return F.pad(logits, (0, 1), value=-torch.inf).index_select(-1, self.place)


def load_head(
    path: str | Path, model: Any, *, dtype: torch.dtype, on_meta: bool = False
) -> tuple[Eagle3Head, tuple[int, ...]]:
    """The head in a directory for a target, and the target's layers whose outputs it reads.

    path: the head's directory, or ORG/NAME of one in the local Hugging Face cache.
    model: the target, with `hidden_size`, `vocab_size`, `num_aux_layers`, `device` and, for a head without embeddings,
        `embed`.
    on_meta: leave the head on the meta device and read no weight, as if the target were there.

    Raises:
        MLAError: a missing or unreadable file, a head of another kind or for another target, missing, extra or
            misshapen tensors, ids outside the vocabulary; before any memory is allocated.
    """
    directory = find_checkpoint(path, "drafter_model")
    config = HeadConfig.read(directory)
    layers = config.layers_of(model)
    files = SafetensorFiles(directory)
    has_embedding, maps_ids = "embed_tokens.weight" in files.entries, "d2t" in files.entries
    if not has_embedding and not hasattr(model, "embed"):
        raise _lacks(model, "embed")
    if not maps_ids and config.draft_vocab_size != config.vocab_size:
        raise MLAError(str(directory), "a tensor d2t, as its vocabulary is reduced", "none")
    parallel: Parallel | None = getattr(model, "parallel", None)
    if parallel is not None and config.draft_vocab_size % parallel.size:
        expected = f"a multiple of the number of processes, {parallel.size}"
        raise MLAError(f"{config.file}: draft_vocab_size", expected, config.draft_vocab_size)
    with torch.device("meta"):
        head = Eagle3Head(
            config, len(layers), has_embedding=has_embedding, maps_ids=maps_ids, parallel=parallel
        ).to(dtype)
    layer = next((each for each in _LAYER if any(name.startswith(each) for name in files.entries)), _LAYER[0])

    def parameters() -> Iterator[tuple[str, nn.Parameter]]:
        """With their names in the files."""
        for name, parameter in head.named_parameters():
            yield (layer + name.removeprefix("layer.") if name.startswith("layer.") else name), parameter

    shapes = {name: tuple(parameter.shape) for name, parameter in parameters()}
    shapes[_HEAD] = (config.draft_vocab_size, config.hidden_size)
    entries = {name: entry for name, entry in files.entries.items() if name not in ("d2t", "t2d")}
    expected = "the tensors of an EAGLE-3 head with its config"
    check_tensors(directory, entries, shapes, {}, expected=expected, may_be_fp8=False)
    place = _place(files, directory, config) if maps_ids else None
    if on_meta or model.device.type == "meta":
        return head, layers
    head.to_empty(device=model.device)
    pack_adjacent(head)
    for name, parameter in parameters():
        weight = files.read(name)
        if name == _HEAD and parallel is not None:
            weight = weight.chunk(parallel.size)[parallel.rank]
        parameter.copy_(weight)
    if place is not None:
        head.place = place.to(model.device)
    return head.eval(), layers


def _place(files: SafetensorFiles, directory: Path, config: HeadConfig) -> Tensor:
    """See `Eagle3Head`; from `d2t`, the offsets from the head's ids to the target's."""
    draft_vocab_size, vocab_size, entry = (
        config.draft_vocab_size,
        config.vocab_size,
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
