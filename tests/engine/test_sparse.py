"""Engines of models with indexers: DeepSeek-V3.2 and GLM-5."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedConfig

from mla_compile import Engine, MLAError, load_model
from mla_compile.models import MLAForCausalLM
from tests.engine import engine_traces
from tests.engine.engine_traces import run
from tests.engine.engines import engine
from tests.engine.toy_engine import check_traces
from tests.models.small import (
    TOPK,
    glm5_config,
    randomize,
    reference_model,
    reference_mtp_layer,
    save,
    v3_config,
    v32_config,
)
from tests.models_for_tests import VOCAB

FAMILIES = {"v3.2": v32_config(), "glm 5": glm5_config()}
LENGTHS = (1, TOPK // 2, TOPK, TOPK + 1, 2 * TOPK, 4 * TOPK)
NEW = 2 * TOPK


class Sample:
    """A model, prompts, and the texts that transformers generates."""

    def __init__(self, config: PreTrainedConfig, path: Path) -> None:
        theirs = reference_model(config)
        g = torch.Generator().manual_seed(1)
        self.prompts = [torch.randint(1, 97, (n,), generator=g).tolist() for n in LENGTHS]
        settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        self.texts = [
            theirs.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist()
            for prompt in self.prompts
        ]
        self.model = load_model(save(theirs, path, reference_mtp_layer(theirs)))

    def check(self, of: Engine) -> None:
        found = of.generate(self.prompts, max_new_tokens=NEW, stop_ids=[])
        assert [completion.token_ids for completion in found] == self.texts


@pytest.fixture(scope="module", params=FAMILIES)
def sample(request, tmp_path_factory) -> Sample:
    return Sample(FAMILIES[request.param], tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize("k", range(4))
def test_tokens_are_those_of_transformers_across_the_border_of_topk(sample: Sample, k: int) -> None:
    sample.check(engine(k, sample.model))


@pytest.mark.long
@pytest.mark.parametrize("k", [0, 2])
def test_tokens_are_the_same_in_mixed_steps_with_preemption_and_shared_prefixes(
    sample: Sample, k: int
) -> None:
    tight = engine(k, sample.model, num_pages=14, max_model_len=48, max_tokens_per_step=4 * (1 + k) + 3)
    sample.check(tight)
    assert tight.stats.num_preemptions > 0
    sample.check(tight)
    roomy = engine(k, sample.model)
    sample.check(roomy)
    sample.check(roomy)
    assert roomy.stats.num_reused_tokens > 0


@pytest.mark.long
def test_compiled_steps_give_the_same_tokens(sample: Sample) -> None:
    sample.check(engine(1, sample.model, compile=True))


def sparse_one_layer_model() -> MLAForCausalLM:
    """As `one_layer_model`, with an indexer."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "index_topk": 4}
    model = MLAForCausalLM(v32_config(vocab_size=VOCAB, first_k_dense_replace=9, **sizes), mtp=True)
    randomize(model, 0)
    model.lm_head.weight.mul_(3)
    model.layers[0].self_attn.o_proj.weight.mul_(4)
    return model.to(torch.float64)


@pytest.mark.long
def test_a_requests_tokens_are_the_same_alone_and_in_any_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sparse_one_layer_model()
    monkeypatch.setattr(engine_traces, "model", lambda: model)
    monkeypatch.setattr(engine_traces, "_TEXTS", {})
    met = check_traces(run, 20)
    met_all = "num_mixed_steps", "num_preemptions", "num_reused_tokens", "num_accepted"
    assert all(met[name] for name in met_all), met


@pytest.mark.parametrize("k", [0, 2])
def test_with_fp8_latents_all_keys_selected_are_dense_attention_and_few_keys_are_not(k: int) -> None:
    sizes = {"num_hidden_layers": 2, "first_k_dense_replace": 9, "kv_lora_rank": 128}
    dense = MLAForCausalLM(v3_config(**sizes), mtp=True)
    randomize(dense)
    found = {}
    for topk in (None, 64, TOPK):
        model = dense
        if topk is not None:
            model = MLAForCausalLM(v32_config(**sizes, index_topk=topk), mtp=True)
            randomize(model)
            model.load_state_dict(dense.state_dict(), strict=False)
        of = engine(k, model, kv_cache_dtype="fp8")
        prompts = [list(range(1, 1 + n)) for n in LENGTHS]
        found[topk] = [c.token_ids for c in of.generate(prompts, max_new_tokens=NEW, stop_ids=[])]
        assert [spec.dtype for spec in of._caches.specs].count(torch.uint8) == 2 + (k > 0)
    assert found[64] == found[None] != found[TOPK]


@pytest.mark.parametrize(("name", "value"), [("batch_invariant", True), ("decode_backend", "reference")])
def test_what_selected_keys_rule_out_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(MLAError, match=f"{name}: expected .* for a model with indexers"):
        Engine(sparse_one_layer_model(), **{name: value})


def test_the_indexers_caches_are_counted() -> None:
    specs = {spec.name: spec for spec in sparse_one_layer_model().cache_specs()}
    names = ["layers.0.self_attn", "mtp.layer.self_attn"]
    assert list(specs) == [each for name in names for each in (name, f"{name}.indexer")]
    assert [specs[f"{name}.indexer"].width for name in names] == [20, 20]
    assert [specs[f"{name}.indexer"].owner for name in names] == ["target", "drafter"]
