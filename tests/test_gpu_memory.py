"""On a CUDA device: a model and its engine ask the allocator for the bytes of the plan."""

import gc
from pathlib import Path

import pytest
import torch

from mla_compile import Engine, load_model
from mla_compile.engine import EngineConfig
from mla_compile.engine.memory import plan_memory
from mla_compile.models.checkpoint import meta_model
from tests.models.small import reference_model, reference_mtp_layer, save, v3_config

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = v3_config(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=2048,
        moe_intermediate_size=512,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=384,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        max_position_embeddings=4096,
        num_nextn_predict_layers=1,
    )
    model = reference_model(config)
    path = tmp_path_factory.mktemp("checkpoint")
    return save(model, path, reference_mtp_layer(model))


def requested(what: str) -> int:
    """Bytes that tensors asked of the allocator: a cached block may be larger than the tensor in it."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{what}"]


@pytest.mark.parametrize("quantize", [None, "fp8"])
def test_tensors_take_what_was_planned(checkpoint: Path, quantize: str | None) -> None:
    config = EngineConfig(num_speculative_tokens=1, max_rows=8, max_model_len=4096, capture_budget=2**28)
    torch.compiler.reset()
    gc.collect()  # memory of other tests would be freed meanwhile
    plan = plan_memory(meta_model(checkpoint, dtype=torch.bfloat16, quantize=quantize), config)
    torch.cuda.synchronize()
    before = requested("current")
    model = load_model(checkpoint, dtype=torch.bfloat16, device="cuda", quantize=quantize)
    weights = requested("current") - before
    assert weights == pytest.approx(plan.weights, rel=0.02)
    engine = Engine(model, config)
    both = requested("current") - before
    assert both == pytest.approx(plan.weights + plan.cache, rel=0.02)
    torch.cuda.reset_peak_memory_stats()
    prompts = [[row + 1] * 3000 for row in range(8)]
    engine.generate(prompts, max_new_tokens=8)
    torch.cuda.synchronize()
    used = requested("peak") - before
    print(
        f"planned {plan}, weights {weights}, with cache {both}, at most {used}, graphs {engine.capture_report()}"
    )
    assert used <= plan.total
