"""Configs: what is read from them, and what is refused by name."""

import json
import math
import random

import pytest
import torch
from transformers import AutoConfig, LlamaConfig

from mla_compile import MLAError
from mla_compile.models import MLAForCausalLM
from mla_compile.models.architecture import Architecture
from mla_compile.models.checkpoint import read_config
from tests.models.published import (
    DEEPSEEK_V2,
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GLM_4_7_FLASH,
    GLM_5,
    KIMI_K2,
)
from tests.models.small import CONFIGS, YARN, glm5_config, glm_config, v2_config, v3_config, v32_config


def test_moe_starts_after_the_dense_layers():
    assert Architecture.from_config(v3_config(first_k_dense_replace=2)).is_moe == (False, False, True)
    sparse_first = glm_config(mlp_layer_types=["sparse", "dense"])
    assert Architecture.from_config(sparse_first).is_moe == (True, False)


@pytest.mark.parametrize(
    ("changes", "shared"),
    [
        ({"indexer_types": ["full", "shared", "full", "full"]}, [False, True, False, False]),
        ({"indexer_types": None, "index_topk_freq": 2}, [False, False, True, False]),
        ({"indexer_types": None, "index_topk_pattern": "FSSF"}, [False, True, True, False]),
        ({"indexer_types": None}, [False] * 4),
    ],
)
def test_layers_of_glm_5_share_the_selection_of_the_layer_before(changes, shared):
    indexer = Architecture.from_config(glm5_config(**changes)).indexer
    assert indexer is not None
    assert list(indexer.is_shared) == shared


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("index_head_dim", v32_config(index_head_dim=4)),
        ("index_topk", v32_config(index_topk=0)),
        ("rope_interleave", v32_config(rope_interleave=False)),
        ("indexer_rope_interleave", v32_config(indexer_rope_interleave=True)),
        ("indexer_rope_interleave", glm5_config(indexer_rope_interleave=False)),
        ("index_topk_freq", v32_config(index_topk_freq=2)),
        ("indexer_types", glm5_config(indexer_types=["shared", "full", "full", "full"])),
        ("indexer_types", glm5_config(indexer_types=["full"])),
    ],
)
def test_indexers_of_another_form_are_refused_by_name(name, config):
    with pytest.raises(MLAError, match=f"config.{name}: expected"):
        Architecture.from_config(config)


def test_greedy_routing_of_deepseek_v2_ignores_groups():
    routing = Architecture.from_config(v2_config(n_group=None, topk_group=None)).routing
    assert (routing.num_groups, routing.topk_groups, routing.scoring) == (1, 1, "softmax")


def test_yarn_scales_the_softmax_by_the_square_of_its_mscale():
    plain = Architecture.from_config(v3_config()).softmax_scale
    assert plain == pytest.approx(24**-0.5)
    stretched = Architecture.from_config(v3_config(rope_parameters=dict(YARN))).softmax_scale
    assert stretched / plain == pytest.approx((0.1 * 1.3 * math.log(8) + 1) ** 2)


@pytest.mark.parametrize(
    ("published", "billions", "softmax_scale", "num_dense"),
    [
        (DEEPSEEK_V3, 671.0, 192**-0.5 * (0.1 * math.log(40) + 1) ** 2, 3),
        (DEEPSEEK_V2, 235.7, 192**-0.5 * (0.0707 * math.log(40) + 1) ** 2, 1),
        (DEEPSEEK_V2_LITE, 15.7, 192**-0.5 * (0.0707 * math.log(40) + 1) ** 2, 1),
        (GLM_4_7_FLASH, 29.9, 256**-0.5, 1),
        (KIMI_K2, 1026.4, 192**-0.5 * (0.1 * math.log(32) + 1) ** 2, 1),
        (DEEPSEEK_V32, 671.9, 192**-0.5 * (0.1 * math.log(40) + 1) ** 2, 3),
        (GLM_5, 743.9, 256**-0.5, 3),
    ],
    ids=[
        *("DeepSeek-V3", "DeepSeek-V2", "DeepSeek-V2-Lite", "GLM-4.7-Flash", "Kimi-K2", "DeepSeek-V3.2"),
        "GLM-5",
    ],
)
def test_a_published_config_gives_the_published_size(published, billions, softmax_scale, num_dense, tmp_path):
    (tmp_path / "config.json").write_text(published)
    with torch.device("meta"):
        model = MLAForCausalLM(read_config(tmp_path)[0], mtp=False)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(
        billions, abs=0.05
    )
    assert model.arch.softmax_scale == pytest.approx(softmax_scale)
    assert model.arch.is_moe.index(True) == num_dense
    assert model.arch.q_lora_rank == json.loads(published)["q_lora_rank"]
    if published is not KIMI_K2:  # transformers knows it by its code alone
        theirs = AutoConfig.from_pretrained(tmp_path, trust_remote_code=False)
        assert Architecture.from_config(theirs) == model.arch


@pytest.mark.parametrize("name", [name for name in CONFIGS if name.split()[0] == "v3"])
def test_kimi_k2_is_another_name_of_deepseek_v3(name, tmp_path):
    config, architectures = CONFIGS[name], []
    text = config.to_json_string(use_diff=False)
    for model_type in ("deepseek_v3", "kimi_k2"):
        (tmp_path / "config.json").write_text(json.dumps(json.loads(text) | {"model_type": model_type}))
        architectures.append(Architecture.from_config(read_config(tmp_path)[0]))
    assert architectures[0] == architectures[1] == Architecture.from_config(config)


def test_the_ramp_of_yarn_may_have_no_width():
    """Kimi-K2 has beta_fast = beta_slow = 1: each pair of dimensions is stretched, or is not."""
    rng = random.Random(0)
    for _ in range(200):
        beta, factor, base = rng.uniform(0.1, 64), rng.uniform(1, 64), rng.uniform(1e3, 1e6)
        size, length = 2 * rng.randint(1, 64), rng.randint(128, 32768)
        yarn = {"beta_fast": beta, "beta_slow": beta, "factor": factor, "rope_theta": base}
        yarn |= {"original_max_position_embeddings": length}
        config = v3_config(rope_parameters=YARN | yarn, qk_rope_head_dim=size)
        got = torch.tensor(Architecture.from_config(config).rope.inv_freq)
        plain = base ** -(torch.arange(0, size, 2) / size)
        turns = plain * length / (2 * math.pi)
        stretched, kept = (torch.isclose(got, x, rtol=1e-4) for x in (plain / factor, plain))
        assert (stretched | kept).sum() >= size // 2 - 1, "all but the pair at beta"
        slow, fast = turns < beta / base ** (2 / size), turns > beta * base ** (2 / size)
        assert stretched[slow].all() and kept[fast].all()


def v3(**changes):
    return v3_config, changes


REFUSED = {
    "another architecture": ("model_type", (LlamaConfig, {})),
    "biases in attention": ("attention_bias", v3(attention_bias=True)),
    "biases in the MLPs": ("mlp_bias", (v2_config, {"mlp_bias": True})),
    "rotated halves in V2": ("rope_interleave", (v2_config, {"rope_interleave": False})),
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
