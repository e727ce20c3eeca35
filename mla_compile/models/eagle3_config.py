"""The config.json of an EAGLE-3 head, as SafeAILab, SpecForge or speculators write it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_compile.errors import MLAError
from mla_compile.models.architecture import Architecture
from mla_compile.models.checkpoint import CONFIG, raw_config, rope_settings, transformers_config
from mla_compile.models.grouped_query import GroupedQueries
from mla_compile.models.rotary import Rope
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
"""Settings of layers that change the computation, and the value that is supported."""


@dataclass(frozen=True)
class HeadConfig:
    """The config.json of a head.

    file: its path, for errors.
    attention: the shapes of its attention; an `Architecture` for MLA.
    draft_vocab_size: ids that the head can draft.
    aux_layers: the target layers whose outputs it reads; None for 1, N/2 - 1 and N - 4 of N.
    counts_inputs: whether its setting counts the inputs of layers, one more.
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
    counts_inputs: bool
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
        _check_layer(layer, of_layer)
        known = {name: layer[name] for name in allowed if layer.get(name) is not None}
        known |= {"rms_norm_eps": float(layer.get("rms_norm_eps", 1e-6))} | rope_settings(layer, of_layer)
        rope, attention = (_mla if kind == MLA else _grouped_query)(kind, known, layer, file, of_layer)
        hidden, of_target = layer["hidden_size"], raw.get("target_hidden_size")
        if of_target not in (None, hidden):
            raise MLAError(f"{prefix}target_hidden_size", f"hidden_size = {hidden}", of_target)
        drafted = raw.get("draft_vocab_size") or layer["vocab_size"]
        if drafted > layer["vocab_size"]:
            raise MLAError(
                f"{prefix}draft_vocab_size", f"at most vocab_size = {layer['vocab_size']}", drafted
            )
        if raw.get("norm_before_fc") and raw.get("fc_norm"):
            raise MLAError(f"{prefix}norm_before_fc, fc_norm", "one of the two", "both")
        return cls(
            file=str(file),
            vocab_size=layer["vocab_size"],
            hidden_size=hidden,
            intermediate_size=layer["intermediate_size"],
            rms_norm_eps=known["rms_norm_eps"],
            rope=rope,
            attention=attention,
            draft_vocab_size=drafted,
            aux_layers=_aux_layers(raw, prefix, is_speculators),
            counts_inputs=is_speculators,
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
                raise lacks(model, name)
        for name in ("hidden_size", "vocab_size"):
            mine, its = getattr(self, name), getattr(model, name)
            if mine != its:
                raise MLAError(f"{self.file}: {name}", f"that of the target, {its}", mine)
        count = model.num_aux_layers
        layers = self.aux_layers or (1, count // 2 - 1, count - 4)
        if not all(0 <= layer < count for layer in layers):
            where = "" if self.counts_inputs else "eagle_config."
            name = f"{self.file}: {where}eagle_aux_hidden_state_layer_ids"
            if self.aux_layers is None:
                raise MLAError(name, f"a list, as a target of {count} layers has no default", "none")
            given = [layer + self.counts_inputs for layer in layers]
            raise MLAError(name, f"layers of the target, which has {count}", given)
        return layers


def lacks(model: object, name: str) -> MLAError:
    """The error for a target without a member that heads need."""
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
        hint = "drafter_model names the directory of a head, not that of a model"
        raise MLAError(f"{prefix}architectures", expected, f"{names!r:.80}", hint)
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


def _check_layer(layer: dict[str, Any], prefix: str) -> None:
    """Refuse settings of a layer that change the computation."""
    for name, only in _ONLY_VALUE.items():
        if layer.get(name, only) not in (only, None):
            raise MLAError(f"{prefix}{name}", repr(only), f"{layer[name]!r:.80}")
    if layer.get("sliding_window") is not None and layer.get("use_sliding_window") is not False:
        raise MLAError(f"{prefix}sliding_window", "null, as all keys are attended", layer["sliding_window"])
    if others := set(layer.get("layer_types") or ()) - {"full_attention"}:
        raise MLAError(f"{prefix}layer_types", "only 'full_attention'", f"{sorted(others)!r:.80}")
    for key in ("rope_scaling", "rope_parameters"):
        table = layer.get(key)
        rope = (table.get("rope_type") or table.get("type")) if isinstance(table, dict) else None
        if rope not in (None, "default", "yarn"):
            raise MLAError(f"{prefix}{key}.rope_type", "'default' or 'yarn'", f"{rope!r:.80}")


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
    heads, kv_heads = known["num_attention_heads"], known.get("num_key_value_heads")
    kv_heads = kv_heads or heads
    if heads % kv_heads:
        raise MLAError(
            f"{prefix}num_key_value_heads", f"a divisor of num_attention_heads = {heads}", kv_heads
        )
    if not layer.get("head_dim") and known["hidden_size"] % heads:
        expected = f"a divisor of hidden_size = {known['hidden_size']}, as there is no head_dim"
        raise MLAError(f"{prefix}num_attention_heads", expected, heads)
    head_dim = layer.get("head_dim") or known["hidden_size"] // heads
    if head_dim < 2 or head_dim % 2:
        raise MLAError(f"{prefix}head_dim", "an even number, as pairs are rotated", head_dim)
    known |= {"num_hidden_layers": 1, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    config = transformers_config(kind, known, file)
    eps = known["rms_norm_eps"] if kind == QWEN3 else None
    return Rope.from_config(config, prefix), GroupedQueries(heads, kv_heads, head_dim, eps)


def _aux_layers(raw: dict[str, Any], prefix: str, is_speculators: bool) -> tuple[int, ...] | None:
    """See `HeadConfig`. speculators counts the inputs of layers, SpecForge the outputs."""
    name = "eagle_aux_hidden_state_layer_ids"
    if is_speculators:
        inputs = raw.get(name)
        if inputs is not None and 0 in inputs:
            raise MLAError(f"{prefix}{name}", "inputs of layers >= 1, as 0 is the embedding", inputs)
        return None if inputs is None else tuple(each - 1 for each in inputs)
    if raw.get(name) is not None:
        raise MLAError(f"{prefix}{name}", f"the ids in eagle_config.{name}", raw[name])
    settings = raw.get("eagle_config") or {}
    check_settings(settings, {"use_aux_hidden_state": FLAG} | HEAD_SETTINGS, f"{prefix}eagle_config.")
    if settings.get("use_aux_hidden_state") is False:
        raise MLAError(f"{prefix}eagle_config.use_aux_hidden_state", "true", "false")
    layers = settings.get(name)
    return None if layers is None else tuple(layers)
