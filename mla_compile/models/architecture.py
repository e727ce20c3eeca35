"""The architecture that a transformers config describes, in one form for all model families."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from mla_compile.errors import MLAError
from mla_compile.models.rotary import Rope
from mla_compile.models.settings import SETTINGS, check_settings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa")
SAME_AS = {name: name for name in MODEL_TYPES} | {"kimi_k2": "deepseek_v3"}
"""How each `model_type` of a checkpoint is read. Kimi-K2 has DeepSeek-V3's architecture under another name."""
WRAPPERS = {"kimi_k25": "language_model."}
"""Model types with a text model among others, whose config is `text_config`: the prefix of its tensors' names."""

_SPARSE = {"deepseek_v32": False, "glm_moe_dsa": True}
"""The families with an indexer, and whether the rotated pairs of its queries and keys are adjacent."""

_SIGMOID: dict[str, object] = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
# Settings that change the computation and have one value in every published checkpoint, also the default of a config
# without the setting. DeepSeek's own code and transformers disagree on a normalised softmax routing.
_ONLY_VALUE: dict[str, dict[str, object]] = {
    "": {"attention_bias": False, "hidden_act": "silu", "moe_layer_freq": 1},
    "deepseek_v2": {
        "mlp_bias": False,
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "rope_interleave": True,
    },
    "deepseek_v3": _SIGMOID,
    "deepseek_v32": {
        **_SIGMOID,
        "rope_interleave": True,
        "indexer_rope_interleave": False,
        # Its layers share no selection.
        "indexer_types": None,
        "index_topk_freq": 1,
        "index_topk_pattern": None,
    },
    "glm4_moe_lite": _SIGMOID,
    "glm_moe_dsa": {**_SIGMOID, "rope_interleave": True, "indexer_rope_interleave": True},
}


@dataclass(frozen=True)
class Routing:
    """How a MoE layer chooses experts.

    scoring: "sigmoid" with a learned correction bias, a group scored by its two best experts (DeepSeek-V3,
        arXiv 2412.19437, section 2.1.2); "softmax", a group scored by its best expert (DeepSeek-V2, arXiv 2405.04434).
    num_groups, topk_groups: experts are chosen within the `topk_groups` best of `num_groups` equal groups.
    normalize: whether the chosen experts' weights are normalised to sum to 1, before `scaling_factor` multiplies them.
    """

    scoring: Literal["sigmoid", "softmax"]
    num_experts: int
    topk: int
    num_groups: int
    topk_groups: int
    normalize: bool
    scaling_factor: float

    @classmethod
    def from_config(cls, config: "PreTrainedConfig", prefix: str = "config.") -> "Routing":
        """Raises `MLAError`, with `prefix` before a setting's name, if `topk` experts cannot be chosen."""
        softmax = config.model_type == "deepseek_v2"
        if softmax and config.topk_method not in ("greedy", "group_limited_greedy"):
            expected = "'greedy' or 'group_limited_greedy'"
            raise MLAError(f"{prefix}topk_method", expected, repr(config.topk_method))
        one_group = softmax and config.topk_method == "greedy"
        for name in ("n_group", "topk_group"):
            if getattr(config, name) is None and not one_group:
                raise MLAError(f"{prefix}{name}", "an integer >= 1", None)
        routing = cls(
            scoring="softmax" if softmax else "sigmoid",
            num_experts=config.n_routed_experts,
            topk=config.num_experts_per_tok,
            num_groups=1 if one_group else config.n_group,
            topk_groups=1 if one_group else config.topk_group,
            normalize=bool(config.norm_topk_prob),
            scaling_factor=config.routed_scaling_factor,
        )
        routing._check(prefix)
        return routing

    def _check(self, prefix: str) -> None:
        """`check_settings` has rejected numbers below 1."""
        least = 2 if self.scoring == "sigmoid" else 1
        in_group, left_over = divmod(self.num_experts, self.num_groups)
        if left_over or in_group < least:
            expected = (
                f"a divisor of n_routed_experts = {self.num_experts} that leaves groups of {least} or more"
            )
            raise MLAError(f"{prefix}n_group", expected, self.num_groups)
        if self.topk_groups > self.num_groups:
            expected = f"between 1 and n_group = {self.num_groups}"
            raise MLAError(f"{prefix}topk_group", expected, self.topk_groups)
        choice = self.topk_groups * in_group
        if self.topk > choice:
            expected = f"between 1 and {choice}, the experts of topk_group groups"
            raise MLAError(f"{prefix}num_experts_per_tok", expected, self.topk)


@dataclass(frozen=True)
class IndexerSettings:
    """The indexers of a model with sparse MLA.

    topk: keys that a token attends to.
    interleave: whether the rotated pairs of its queries and keys are adjacent; of attention's they always are.
    is_shared: for each layer of the trunk, whether it uses the selection of the layer before, and has no indexer.
    """

    num_heads: int
    head_dim: int
    topk: int
    interleave: bool
    is_shared: tuple[bool, ...]

    @classmethod
    def from_config(cls, config: Any, prefix: str = "config.") -> "IndexerSettings | None":
        """None for a family without indexers. Raises `MLAError`, with `prefix` before a setting's name."""
        if config.model_type not in _SPARSE:
            return None
        layers = config.num_hidden_layers
        if config.index_head_dim < config.qk_rope_head_dim:
            expected = f"at least qk_rope_head_dim = {config.qk_rope_head_dim}"
            raise MLAError(f"{prefix}index_head_dim", expected, config.index_head_dim)
        kinds = getattr(config, "indexer_types", None) or ["full"] * layers
        if len(kinds) != layers or kinds[0] != "full":
            expected = (
                f"'full' or 'shared' for each of num_hidden_layers = {layers} layers, 'full' for the first"
            )
            raise MLAError(f"{prefix}indexer_types", expected, kinds)
        return cls(
            num_heads=config.index_n_heads,
            head_dim=config.index_head_dim,
            topk=config.index_topk,
            interleave=_SPARSE[config.model_type],
            is_shared=tuple(kind == "shared" for kind in kinds),
        )


@dataclass(frozen=True)
class Architecture:
    """Shapes and settings of a model of one of the `MODEL_TYPES`."""

    vocab_size: int
    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    num_shared_experts: int
    is_moe: tuple[bool, ...]  # per trunk layer; an MTP layer always is
    rms_norm_eps: float
    tie_word_embeddings: bool
    routing: Routing
    rope: Rope
    indexer: IndexerSettings | None = None

    @property
    def num_layers(self) -> int:
        return len(self.is_moe)

    @property
    def latent_width(self) -> int:
        """The width of the cache per token and layer: the latent and the rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """`1 / sqrt(qk_head_dim)`, times YaRN's correction."""
        head_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
        return float(head_dim**-0.5) * self.rope.softmax_factor

    @classmethod
    def from_config(cls, config: "PreTrainedConfig", prefix: str = "config.") -> "Architecture":
        """Read a transformers config of one of the `MODEL_TYPES`.

        prefix: precedes a setting's name in an error.

        Raises:
            MLAError: another model type, or a setting out of its limits or not supported, named.
        """
        model_type = getattr(config, "model_type", type(config).__name__)
        if model_type not in MODEL_TYPES:
            raise MLAError(f"{prefix}model_type", "one of " + ", ".join(MODEL_TYPES), model_type)
        values = {name: getattr(config, name) for name in SETTINGS if hasattr(config, name)}
        check_settings(values, SETTINGS, prefix)
        _refuse_unsupported(config, prefix)
        as_named_there = {field.name for field in fields(cls)} & set(SETTINGS)
        return cls(
            **{name: getattr(config, name) for name in as_named_there},
            num_heads=config.num_attention_heads,
            num_shared_experts=config.n_shared_experts,
            is_moe=_moe_layers(config, prefix),
            routing=Routing.from_config(config, prefix),
            rope=Rope.from_config(config, prefix),
            indexer=IndexerSettings.from_config(config, prefix),
        )


def _refuse_unsupported(config: Any, prefix: str) -> None:
    for name, value in (_ONLY_VALUE[""] | _ONLY_VALUE[config.model_type]).items():
        got = getattr(config, name, value)
        if got != value and got is not None:
            raise MLAError(f"{prefix}{name}", repr(value), repr(got), "this setting is not supported")
    if config.num_key_value_heads != config.num_attention_heads:
        expected = f"num_attention_heads = {config.num_attention_heads}: MLA shares no keys between heads"
        raise MLAError(f"{prefix}num_key_value_heads", expected, config.num_key_value_heads)


def _moe_layers(config: Any, prefix: str) -> tuple[bool, ...]:
    if config.model_type in ("deepseek_v2", "deepseek_v3"):
        return tuple(layer >= config.first_k_dense_replace for layer in range(config.num_hidden_layers))
    kinds = config.mlp_layer_types or []
    if len(kinds) != config.num_hidden_layers:
        expected = f"'dense' or 'sparse' for each of num_hidden_layers = {config.num_hidden_layers} layers"
        raise MLAError(f"{prefix}mlp_layer_types", expected, kinds)
    return tuple(kind == "sparse" for kind in kinds)
