"""What an engine takes is planned to the byte, where it is no estimate."""

from pathlib import Path

import pytest
import torch

from mla_compile import Engine
from mla_compile.engine import EngineConfig
from mla_compile.engine.memory import plan_memory
from mla_compile.models import load_model
from mla_compile.models.checkpoint import meta_model
from tests.models import published
from tests.models.small import glm_config, reference_model, reference_mtp_layer, save, v2_config, v3_config
from tests.models_for_tests import caches_of

CONFIGS = {
    "v3": v3_config(moe_intermediate_size=128, q_lora_rank=128, num_nextn_predict_layers=1),
    "v3 tied": v3_config(tie_word_embeddings=True, num_nextn_predict_layers=1),
    "v2": v2_config(q_lora_rank=None),
    "glm": glm_config(num_nextn_predict_layers=1),
}


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = CONFIGS[request.param]
    model = reference_model(config)
    has_mtp = bool(getattr(config, "num_nextn_predict_layers", 0))
    mtp = reference_mtp_layer(model) if has_mtp and model.lm_head is not None else None
    return save(model, tmp_path_factory.mktemp("checkpoint"), mtp)


@pytest.mark.parametrize("quantize", [None, "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_and_cache_of_a_loaded_model_are_as_planned(
    checkpoint: Path, dtype: torch.dtype, quantize: str | None
) -> None:
    model = load_model(checkpoint, dtype=dtype, quantize=quantize)
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in _tensors(model)}
    config = EngineConfig(max_rows=3, max_model_len=50, page_size=4, compile=False)
    sketch = meta_model(checkpoint, dtype=dtype, mtp=model.has_mtp, quantize=quantize)
    plan = plan_memory(sketch, config)
    assert plan.weights == sum(storages.values())
    engine = Engine(model, config)
    assert (plan.config.num_pages, plan.config.page_size) == (engine.config.num_pages, 4)
    assert plan.cache == sum(cache.nbytes for cache in caches_of(model))
    engine.generate([[1, 2, 3]], max_new_tokens=2)
    assert plan.weights + plan.cache == sum(x.untyped_storage().nbytes() for x in _whole(model))


def _tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _whole(model: torch.nn.Module) -> list[torch.Tensor]:
    """A tensor of each piece of memory; two weights may share one."""
    return list({x.untyped_storage().data_ptr(): x for x in _tensors(model)}.values())


@pytest.mark.parametrize(
    ("name", "trunk", "mtp"),
    [
        ("DEEPSEEK_V2", 236, 0),
        ("DEEPSEEK_V3", 671, 11.6),
        ("KIMI_K2", 1026, 0),
        ("GLM_4_7_FLASH", 29.9, 0.64),
    ],
)
def test_parameters_are_as_many_as_published(name: str, trunk: float, mtp: float, tmp_path: Path) -> None:
    """Billions. DeepSeek speaks of 671 and of 11.5, embedding and head not counted twice: 685 in the files."""
    (tmp_path / "config.json").write_text(getattr(published, name))
    model = meta_model(tmp_path, dtype=torch.bfloat16)
    counts = {name: x.numel() / 1e9 for name, x in model.named_parameters() if "scale" not in name}
    of_mtp = sum(count for name, count in counts.items() if name.startswith("mtp."))
    assert sum(counts.values()) - of_mtp == pytest.approx(trunk, rel=2e-3)
    assert of_mtp == pytest.approx(mtp, rel=2e-2)
    copies = counts["embed_tokens.weight"] + counts["lm_head.weight"]
    if name == "DEEPSEEK_V3":
        assert sum(counts.values()) + copies == pytest.approx(685, abs=0.6)


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("name", ["DEEPSEEK_V3", "GLM_4_7_FLASH"])
def test_what_is_divided_adds_up_to_what_one_gpu_would_hold(
    name: str, expert_parallel: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(getattr(published, name))
    model = meta_model(tmp_path, dtype=torch.bfloat16)
    one, *others = (
        plan_memory(model, EngineConfig(num_speculative_tokens=0), size, expert_parallel=expert_parallel)
        for size in (1, 2, 4)
    )
    drafting = plan_memory(model, EngineConfig(num_speculative_tokens=1))
    for plan in others:
        assert plan.alike == one.alike
        assert (plan.weights - plan.alike) * plan.num_gpus == one.weights - one.alike
        assert plan.cache == one.cache, "every GPU has all latents"
    assert one.alike < 0.06 * one.weights
    for plan, layers in ((one, model.arch.num_layers), (drafting, model.arch.num_layers + 1)):
        assert plan.cache == plan.config.num_pages * plan.config.page_size * layers * (512 + 64) * 2


def test_the_pages_that_fit_are_the_most_that_do(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(published.GLM_4_7_FLASH)
    model = meta_model(tmp_path, dtype=torch.bfloat16)
    memory = 80 * 10**9
    most = plan_memory(model, EngineConfig()).most_pages(memory)
    for pages in (most, most + 1):
        plan = plan_memory(model, EngineConfig(num_pages=pages))
        assert plan.fits(memory) == (pages == most)
        assert plan.most_pages(memory) == most
    assert plan.most_rows(memory, 100) == (most - 1) // 7
    assert plan.most_rows(10**9, 100) == 0


def test_graphs_are_counted_as_their_budget_and_steps_by_their_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(published.GLM_4_7_FLASH)
    model = meta_model(tmp_path, dtype=torch.bfloat16)
    plain, bounded, long = (
        plan_memory(model, EngineConfig(num_speculative_tokens=0, **given))
        for given in ({}, {"capture_budget": 2**30}, {"max_tokens_per_step": 16384})
    )
    assert (plain.graphs, bounded.graphs) == (0, 2**30)
    assert bounded.total - plain.total == 2**30
    assert long.steps > 1.5 * plain.steps
