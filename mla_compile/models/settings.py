"""The settings that the model reads from a config, and the values allowed for each.

The limits allow any existing model, but no product of sizes that overflows 64 bits and no logits that are NaN. The
checkpoint's tensors show whether the sizes are its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mla_compile.errors import MLAError
from mla_compile.sampling_params import MAX_STOP_IDS


@dataclass(frozen=True)
class Rule:
    expected: str
    accepts: Callable[[object], bool]


def _integer(least: int, most: int) -> Rule:
    def accepts(value: object) -> bool:
        return type(value) is int and least <= value <= most

    return Rule(f"an integer in [{least}, {most}]", accepts)


def _number(least: float, most: float) -> Rule:
    def accepts(value: object) -> bool:
        return type(value) in (int, float) and least <= value <= most  # type: ignore[operator]

    return Rule(f"a number in [{least:g}, {most:g}]", accepts)


def _or_null(rule: Rule) -> Rule:
    return Rule(f"{rule.expected}, or null", lambda value: value is None or rule.accepts(value))


FLAG = Rule("true or false", lambda value: type(value) is bool)
_TEXT = Rule("a text", lambda value: type(value) is str)
_WIDTH = _integer(1, 2**20)
_HEAD_WIDTH = _integer(1, 2**16)
_MAX_LAYERS = 1024
_END = _integer(0, 2**31 - 1)
_MAX_AUX_LAYERS = 16


def _is_list(value: object, most: int, accepts: Callable[[object], bool]) -> bool:
    return isinstance(value, list) and len(value) <= most and all(map(accepts, value))


_ENDS = _or_null(
    Rule(
        f"a token id, a list of at most {MAX_STOP_IDS}",
        lambda value: _END.accepts(value) or _is_list(value, MAX_STOP_IDS, _END.accepts),
    )
)
_TEXTS = Rule(
    f"a list of at most {_MAX_LAYERS} texts",
    lambda value: _is_list(value, _MAX_LAYERS, lambda each: type(each) is str),
)


def _kinds_of_layers(one: str, other: str) -> Rule:
    return Rule(
        f"a list of at most {_MAX_LAYERS} of {one!r} and {other!r}",
        lambda value: _is_list(value, _MAX_LAYERS, lambda kind: kind in (one, other)),
    )


_INDEXER_TYPES = _kinds_of_layers("full", "shared")
_INDEXER_PATTERN = Rule(
    f"a text of at most {_MAX_LAYERS} F and S, or {_INDEXER_TYPES.expected}",
    lambda value: (
        (type(value) is str and len(value) <= _MAX_LAYERS and set(value) <= {"F", "S"})
        or _INDEXER_TYPES.accepts(value)
    ),
)

SETTINGS: dict[str, Rule] = {
    "vocab_size": _integer(1, 2**24),
    "hidden_size": _WIDTH,
    "num_hidden_layers": _integer(1, _MAX_LAYERS),
    "num_nextn_predict_layers": _or_null(_integer(0, _MAX_LAYERS)),
    "num_attention_heads": _integer(1, 2**16),
    "num_key_value_heads": _or_null(_integer(1, 2**16)),
    "q_lora_rank": _or_null(_WIDTH),
    "kv_lora_rank": _WIDTH,
    "qk_nope_head_dim": _HEAD_WIDTH,
    "qk_rope_head_dim": Rule(
        "an even number in [2, 65536], as pairs are rotated",
        lambda value: type(value) is int and 2 <= value <= 2**16 and value % 2 == 0,
    ),
    "v_head_dim": _HEAD_WIDTH,
    "intermediate_size": _WIDTH,
    "moe_intermediate_size": _WIDTH,
    "n_routed_experts": _integer(1, 2**16),
    "n_shared_experts": _integer(1, 1024),
    "num_experts_per_tok": _integer(1, 2**16),
    "n_group": _or_null(_integer(1, 2**16)),
    "topk_group": _or_null(_integer(1, 2**16)),
    "first_k_dense_replace": _integer(0, _MAX_LAYERS),
    "mlp_layer_types": _or_null(_kinds_of_layers("dense", "sparse")),
    "norm_topk_prob": _or_null(FLAG),
    "routed_scaling_factor": _number(1e-4, 1e4),
    "rms_norm_eps": _number(1e-12, 1),  # 0 turns a vector of zeros into NaN
    "max_position_embeddings": _integer(2, 2**24),  # float32 holds these positions exactly
    "tie_word_embeddings": FLAG,
    "rope_interleave": _or_null(FLAG),
    "eos_token_id": _ENDS,
    "attention_bias": _or_null(FLAG),
    "mlp_bias": _or_null(FLAG),
    "hidden_act": _or_null(_TEXT),
    "moe_layer_freq": _or_null(_integer(1, _MAX_LAYERS)),
    "scoring_func": _or_null(_TEXT),
    "topk_method": _or_null(_TEXT),
    "index_n_heads": _integer(1, 1024),
    "index_head_dim": _HEAD_WIDTH,
    "index_topk": _integer(1, 2**16),
    "indexer_rope_interleave": _or_null(FLAG),
    "indexer_types": _or_null(_INDEXER_TYPES),
    "index_topk_freq": _integer(1, _MAX_LAYERS),
    "index_skip_topk_offset": _integer(0, _MAX_LAYERS),
    "index_topk_pattern": _or_null(_INDEXER_PATTERN),
}

HEAD_SETTINGS: dict[str, Rule] = {
    "draft_vocab_size": _or_null(_integer(1, 2**24)),
    "target_hidden_size": _or_null(_WIDTH),
    "norm_before_residual": _or_null(FLAG),
    "norm_before_fc": _or_null(FLAG),
    "fc_norm": _or_null(FLAG),
    "norm_output": _or_null(FLAG),
    "head_dim": _or_null(_HEAD_WIDTH),
    "mlp_bias": _or_null(FLAG),
    "use_sliding_window": _or_null(FLAG),
    "sliding_window": _or_null(_END),
    "layer_types": _or_null(_TEXTS),
    "eagle_config": _or_null(Rule("an object", lambda value: isinstance(value, dict))),
    "eagle_aux_hidden_state_layer_ids": _or_null(
        Rule(
            f"a list of 1 to {_MAX_AUX_LAYERS} layers",
            lambda value: bool(value) and _is_list(value, _MAX_AUX_LAYERS, _END.accepts),
        )
    ),
}
"""Of an EAGLE-3 head, beside those that it shares with a model."""

GENERATION_SETTINGS = {"do_sample": _or_null(FLAG), "eos_token_id": _ENDS}
"""Of generation_config.json; `SamplingParams` checks the others."""

ROPE_SETTINGS: dict[str, Rule] = {
    "rope_type": _TEXT,
    "type": _TEXT,
    "rope_theta": _number(2, 1e15),
    "partial_rotary_factor": _number(0, 1),
    "factor": _number(1, 1e6),
    "attention_factor": _or_null(_number(1e-3, 1e3)),
    "beta_fast": _or_null(_number(1e-3, 1e6)),
    "beta_slow": _or_null(_number(1e-3, 1e6)),
    "mscale": _or_null(_number(0, 100)),
    "mscale_all_dim": _or_null(_number(0, 100)),
    "original_max_position_embeddings": _integer(1, 2**24),
    "truncate": _or_null(FLAG),
}


def check_settings(values: Mapping[str, object], rules: Mapping[str, Rule], prefix: str) -> None:
    """Raises `MLAError` for the first of `values` that its rule rejects, named by `prefix` and its key."""
    for name, rule in rules.items():
        if name in values and not rule.accepts(values[name]):
            got = repr(values[name])
            raise MLAError(prefix + name, rule.expected, got if len(got) <= 80 else got[:80] + "...")
