"""`absorb_mla` on unchanged models of transformers: `generate` with a static cache and `backend="mla"`."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from transformers import CompileConfig, MiniCPM3Config, PreTrainedConfig, StaticCache, YoutuConfig

from mla_compile.backend import mla
from mla_compile.passes import pipeline
from mla_compile.passes.absorb_mla import absorb_mla
from tests.models.small import glm_config, reference_model, v2_config, v3_config
from tests.passes.capture import Capture, ops, shape

MAX_LEN = 96
DENSE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "pad_token_id": 0,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "glm4_moe_lite": glm_config(),
    "deepseek_v3": v3_config(num_hidden_layers=2),
    "deepseek_v2": v2_config(num_hidden_layers=2),
    "minicpm3": MiniCPM3Config(**DENSE),
    "youtu": YoutuConfig(**DENSE, bos_token_id=1, eos_token_id=2),
}


def expanded_width(config: Any) -> int:
    return config.num_attention_heads * (config.qk_nope_head_dim + config.v_head_dim)


def expansions(gm: fx.GraphModule, config: Any) -> list[str]:
    """Linear layers that expand latents to keys and values."""
    linears = [node for node in gm.graph.nodes if getattr(node.target, "__name__", "") == "linear"]
    return [node.name for node in linears if shape(node)[-1] == expanded_width(config)]


@pytest.mark.long
def test_the_count_of_expansions_sees_those_of_the_stock_graph() -> None:
    config = CONFIGS["deepseek_v3"]
    capture = Capture([])
    decode(reference_model(config), capture)
    assert len(expansions(capture.after[0], config)) == 2


def decode(model: Any, capture: Capture) -> list[Tensor]:
    """Logits of two new tokens after five cached ones, uncompiled and compiled."""
    ids = torch.arange(2 * 7).view(2, 7)
    logits = []
    for compiled in (False, True):
        cache = StaticCache(config=model.config, max_cache_len=MAX_LEN)

        def step(ids: Tensor, positions: Tensor, cache: StaticCache = cache) -> Tensor:
            return model(ids, past_key_values=cache, position_ids=positions).logits

        with torch.no_grad():
            step(ids[:, :5], torch.arange(5)[None])
            run = torch.compile(step, backend=capture, fullgraph=True) if compiled else step
            logits.append(run(ids[:, 5:], torch.arange(5, 7)[None]))
    return logits


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "attention"),
    [
        *((name, "sdpa") for name in CONFIGS if name != "youtu"),
        pytest.param("youtu", "sdpa", marks=pytest.mark.slow),  # its attention is DeepSeek-V3's
        ("deepseek_v3", "eager"),
        # transformers' eager attention is the same code in every model.
        *(pytest.param(name, "eager", marks=pytest.mark.slow) for name in CONFIGS if name != "deepseek_v3"),
    ],
)
def test_a_decode_step_of_a_stock_model_attends_on_latents(
    name: str, attention: str, logged: Callable
) -> None:
    model, capture = reference_model(CONFIGS[name]), Capture([absorb_mla])
    model.set_attn_implementation(attention)
    expected, got = decode(model, capture)
    torch.testing.assert_close(got, expected)
    assert not expansions(capture.after[0], model.config)
    assert "scaled_dot_product_attention" not in ops(capture.after[0])
    assert ops(capture.after[0]).count("mla_masked_decode") == (2 if attention == "sdpa" else 0)
    messages = logged()
    assert len(messages) == 2
    for layer, message in enumerate(messages):
        assert message.startswith(f"fused: model.layers.{layer}.self_attn ")
        assert re.search(rf"\b2 query tokens.*\b{MAX_LEN} keys", message)


@pytest.mark.long
@pytest.mark.usefixtures("lowering")
def test_generate_with_a_static_cache_gives_the_same_tokens_and_every_layer_is_absorbed(
    logged: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = []

    def spy(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
        graphs.append(absorb_mla(gm, example_inputs))
        return graphs[-1]

    monkeypatch.setattr(pipeline, "absorb_mla", spy)
    model = reference_model(glm_config(num_attention_heads=4, num_key_value_heads=4))
    model.set_attn_implementation("sdpa")
    prompts = torch.tensor([[0, 0, 5, 9, 3], [7, 1, 2, 8, 4]])
    arguments: dict[str, Any] = {
        "attention_mask": (prompts > 0).long(),
        "do_sample": False,
        "max_new_tokens": 12,
        "cache_implementation": "static",
    }
    expected = model.generate(prompts, **arguments)
    compile_config = CompileConfig(backend="mla", mode="reduce-overhead", fullgraph=True)
    compile_config._compile_all_devices = True  # private; transformers has no public way to compile on a CPU
    got = model.generate(prompts, compile_config=compile_config, **arguments)
    assert got.tolist() == expected.tolist()
    messages = logged()
    assert len(messages) == 2 * len(graphs) and all(message.startswith("fused: ") for message in messages)
    assert graphs and not any(expansions(gm, model.config) for gm in graphs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_captured_decode_step_on_a_gpu_is_as_near_the_truth_as_the_stock_one(dtype: torch.dtype) -> None:
    """With Inductor and CUDA graphs, against float32 on the CPU."""
    truth = reference_model(glm_config())
    ids = torch.arange(2 * 7).view(2, 7)
    errors = []
    expected = truth(ids).logits[:, 5:]
    model = reference_model(glm_config()).to("cuda", dtype)
    model.set_attn_implementation("sdpa")
    for backend in ("eager", mla):
        mode = "reduce-overhead" if backend is mla else None
        cache = StaticCache(config=model.config, max_cache_len=MAX_LEN)
        with torch.no_grad():
            model(ids[:, :5].cuda(), past_key_values=cache)
            run = torch.compile(model.__call__, backend=backend, mode=mode, fullgraph=True)
            positions = torch.arange(5, 7, device="cuda")[None]
            logits = run(ids[:, 5:].cuda(), past_key_values=cache, position_ids=positions).logits
        errors.append(float((logits.float().cpu() - expected).square().mean().sqrt()))
    assert errors[1] < 1.5 * errors[0] + 1e-5
