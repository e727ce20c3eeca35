"""Configs: what is read from them, and what is refused by name."""

import math

import pytest
from transformers import LlamaConfig

from mla_compile import MLAError
from mla_compile.models.architecture import Architecture
from tests.models.small import YARN, glm_config, v2_config, v3_config


def test_moe_starts_after_the_dense_layers():
    assert Architecture.from_config(v3_config(first_k_dense_replace=2)).is_moe == (False, False, True)
    sparse_first = glm_config(mlp_layer_types=["sparse", "dense"])
    assert Architecture.from_config(sparse_first).is_moe == (True, False)


def test_greedy_routing_of_deepseek_v2_ignores_groups():
    routing = Architecture.from_config(v2_config(n_group=None, topk_group=None)).routing
    assert (routing.num_groups, routing.topk_groups, routing.scoring) == (1, 1, "softmax")


def test_yarn_scales_the_softmax_by_the_square_of_its_mscale():
    plain = Architecture.from_config(v3_config()).softmax_scale
    assert plain == pytest.approx(24**-0.5)
    stretched = Architecture.from_config(v3_config(rope_parameters=dict(YARN))).softmax_scale
    assert stretched / plain == pytest.approx((0.1 * 1.3 * math.log(8) + 1) ** 2)


def v3(**changes):
    return v3_config, changes


REFUSED = {
    "another architecture": ("model_type", (LlamaConfig, {})),
    "biases in attention": ("attention_bias", v3(attention_bias=True)),
    "biases in the MLPs": ("mlp_bias", (v2_config, {"mlp_bias": True})),
    "another activation": ("hidden_act", v3(hidden_act="gelu")),
    "MoE in every second layer": ("moe_layer_freq", v3(moe_layer_freq=2)),
    "softmax scores in V3": ("scoring_func", v3(scoring_func="softmax")),
    "greedy choice in V3": ("topk_method", v3(topk_method="greedy")),
    "an unknown choice in V2": ("topk_method", (v2_config, {"topk_method": "best"})),
    "normalised softmax weights": ("norm_topk_prob", (v2_config, {"norm_topk_prob": True})),
    "shared key heads": ("num_key_value_heads", v3(num_key_value_heads=2)),
    "no shared expert": ("n_shared_experts", v3(n_shared_experts=0)),
    "no vocabulary": ("vocab_size", v3(vocab_size=0)),
    "no value width": ("v_head_dim", v3(v_head_dim=None)),
    "no count of dense layers": ("first_k_dense_replace", v3(first_k_dense_replace=None)),
    "linear rope": (
        "rope_type",
        v3(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
    ),
    "yarn without factor": (
        "factor",
        v3(rope_parameters={"rope_type": "yarn", "factor": None, "rope_theta": 1e4}),
    ),
    "rope of a part of the width": (
        "partial_rotary_factor",
        v3(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
    ),
    "groups that do not divide the experts": ("n_group", v3(n_group=3)),
    "groups of one expert": ("n_group", v3(n_group=8)),
    "more best groups than groups": ("topk_group", v3(topk_group=5)),
    "more experts than the best groups hold": ("num_experts_per_tok", v3(num_experts_per_tok=5)),
    "no number of experts": ("num_experts_per_tok", (v2_config, {"num_experts_per_tok": None})),
    "no groups": ("n_group", v3(n_group=None)),
    "too few layer types": ("mlp_layer_types", (glm_config, {"mlp_layer_types": ["dense"]})),
}


def test_an_odd_rotary_width_is_refused():
    config = v3_config()
    config.qk_rope_head_dim = 7  # later transformers refuse to build such a config
    with pytest.raises(MLAError, match=r"^config\.qk_rope_head_dim: expected an even number"):
        Architecture.from_config(config)


@pytest.mark.parametrize("case", REFUSED)
def test_an_unsupported_setting_is_named(case):
    name, (make_config, changes) = REFUSED[case]
    with pytest.raises(MLAError, match=rf"^config\.[\w.]*{name}: expected ") as caught:
        Architecture.from_config(make_config(**changes))
    assert "\n" not in str(caught.value)
