"""EAGLE-3 heads: what they draft, beside the definition, and that no token depends on it; on tiny random models."""

import copy
import itertools
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.start import start
from mla_compile import Grammar, MLABatch, MLAError, SamplingParams, decode_segment
from mla_compile.caches import allocate
from mla_compile.defaults import DEVICE_DEFAULTS
from mla_compile.engine import Completion, Engine, EngineConfig
from mla_compile.engine.memory import plan_memory
from mla_compile.models import MLAForCausalLM
from mla_compile.models.eagle3 import load_head
from mla_compile.speculate.drafter import cache_specs
from mla_compile.speculate.state import FIRST_TOKEN
from mla_compile.testing import check_batch_invariance, shadow_check
from tests.counters import compile_counters
from tests.engine.engines import engine, finish
from tests.engine.test_grammar import EOS, REGEX, SCHEMA, SMALL, WITH_LOGPROBS
from tests.engine.watching import Watch
from tests.models_for_tests import VOCAB, tiny_model
from tests.speculate.eagle3_heads import (
    DRAFTED,
    DefinedHead,
    SpeculatorsHead,
    config_of,
    llama_config,
    outputs_of,
    speculators_head,
    weights_of,
    write_head,
)
from tests.speculate.from_scratch import FromScratch, greedy, sampler

K = 3
SHARED = [7, 8, 9, 10, 11, 12, 13, 14, 15]
PROMPTS = [[*SHARED, 1], [2, 3], [*SHARED, 4, 5], [*SHARED[:8], 6], [16, 17, 18, 19, 20, 21, 22]]
SAMPLED = SamplingParams(temperature=1.1, seed=5, top_p=0.9)
VERSIONS: dict[str, dict[str, Any]] = {
    "3": {},
    "3, reduced": {"draft_vocab_size": DRAFTED},
    "3.1": {"fc_norm": True, "norm_output": True, "draft_vocab_size": DRAFTED},
    "residual": {"norm_before_residual": True},
    "llama": {"draft_vocab_size": DRAFTED},
    "llama 3.1": {"fc_norm": True, "norm_output": True, "num_key_value_heads": 4},
    "speculators": {"norm_before_fc": True, "norm_before_residual": True},
    "speculators 3.1": {"fc_norm": True, "norm_output": True},
}


Heads = Callable[[str], Path]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Heads:
    """From one of `VERSIONS` to a head, which is written once."""

    @cache
    def head(version: str) -> Path:
        directory, settings = tmp_path_factory.mktemp("head"), VERSIONS[version]
        if version.startswith("speculators"):
            kind = "qwen3" if version.endswith("3.1") else "llama"
            return speculators_head(directory, kind, 32, [1, 2, 2], **settings)
        config = (llama_config if version.startswith("llama") else config_of)(32, [0, 1, 1], **settings)
        return write_head(directory, config, weights_of(config, seed=list(VERSIONS).index(version)))

    return head


def definition_of(head: Path, target: MLAForCausalLM) -> DefinedHead:
    config = json.loads((head / "config.json").read_text())
    kind = DefinedHead if config["architectures"][0].startswith("Eagle3Deepseek") else SpeculatorsHead
    return kind(head, outputs_of(target), target.embed_tokens.weight)


@pytest.fixture(scope="module")
def model() -> MLAForCausalLM:
    return tiny_model()


@pytest.fixture(scope="module")
def copied(model: MLAForCausalLM) -> MLAForCausalLM:
    return copy.deepcopy(model)


@cache
def plain(params: SamplingParams) -> list[Completion]:
    return engine(0, tiny_model()).generate(PROMPTS, params, max_new_tokens=24)


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def eagle(model: MLAForCausalLM, head: Path, k: int = K, **settings: Any) -> Engine:
    return engine(k, model, drafter_model=head, **settings)


@pytest.mark.parametrize(
    ("params", "few_pages"), [(SamplingParams(), False), (SAMPLED, True)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("version", VERSIONS)
def test_drafts_are_those_of_the_definition_and_tokens_plain_ones(
    model: MLAForCausalLM,
    copied: MLAForCausalLM,
    heads: Heads,
    version: str,
    params: SamplingParams,
    few_pages: bool,
) -> None:
    """Requests come one after the other: with prompts in chunks beside rows that decode, pages that prompts share, rows
    that move to other states and, where there are few pages, preemption."""
    defined, watch = definition_of(heads(version), copied), Watch()
    pages = 19 if few_pages else None
    of = eagle(
        model,
        heads(version),
        drafter=watch.kind("eagle3"),
        num_pages=pages,
        max_tokens_per_step=4 * (1 + K) + 3,
    )
    choose = greedy if params.temperature == 0 else sampler(params)
    requests, num_checked = [], 0
    while of.has_work() or len(requests) < len(PROMPTS):
        if len(requests) < len(PROMPTS) and of.stats.num_steps >= 3 * len(requests):
            requests.append(of.add(PROMPTS[len(requests)], params, max_new_tokens=24))
        of.step()
        for request, row in watch.rows(requests):
            if not request.completion.token_ids or not watch.state.active[row]:
                continue
            text = [*request.prompt, *request.completion.token_ids]
            count = min(K, request.max_len - len(text))  # what is behind the row's end is not drafted
            drafts = watch.state.drafts[row, :count].tolist()
            assert drafts == defined.drafts(text, count, choose), (len(text), count)
            num_checked += 1
    assert num_checked > 60 and of.stats.num_reused_tokens > 0
    assert (of.stats.num_preemptions > 0) == few_pages
    assert [request.completion.token_ids for request in requests] == tokens(plain(params))


@pytest.mark.parametrize("version", ["3, reduced", "3.1", "llama", "llama 3.1", "speculators 3.1"])
def test_drafts_are_right_after_every_number_of_accepted_ones(
    model: MLAForCausalLM, copied: MLAForCausalLM, heads: Heads, version: str
) -> None:
    defined, k = definition_of(heads(version), copied), 3
    prompts = PROMPTS[1:]
    continuations = [FromScratch(copied).continuation(prompt, 40) for prompt in prompts]
    step, state = start(eagle(model, heads(version), k), prompts, 40, [SamplingParams()] * len(prompts), [])
    texts = [[*p, t] for p, t in zip(prompts, state.last_token.tolist(), strict=True)]
    orders = list(itertools.permutations(range(k + 1)))
    plan = [orders[row * 5 % len(orders)] * 2 for row in range(len(prompts))]
    for counts in zip(*plan, strict=True):
        for row, count in enumerate(counts):
            done = len(texts[row]) - len(prompts[row])
            true = continuations[row][done : done + k]
            state.drafts[row] = torch.tensor([*true[:count], *((t + 1) % VOCAB for t in true[count:])])
        step(state)
        for text, report in zip(texts, state.report.tolist(), strict=True):
            text += report[FIRST_TOKEN : FIRST_TOKEN + report[0]]
        for text, drafts, count in zip(texts, state.drafts.tolist(), counts, strict=True):
            assert drafts == defined.drafts(text, k), f"after accepting {count}"


@pytest.mark.parametrize("version", ["3.1", "llama"])
def test_requests_of_every_kind_have_their_tokens_of_plain_decoding(
    model: MLAForCausalLM, heads: Heads, version: str
) -> None:
    """Grammars, penalties, biases, log-probabilities and requests with fewer drafts, beside each other."""
    kinds = [*WITH_LOGPROBS, SamplingParams(), SAMPLED]
    grammars = [None, Grammar.from_regex(REGEX, SMALL), None, Grammar.from_json_schema(SCHEMA, SMALL), None]

    def completions(of: Engine) -> list[Completion]:
        requests = [
            of.add(
                prompt,
                params,
                max_new_tokens=24,
                stop_ids=[EOS],
                grammar=grammar,
                **({"max_drafts": 1} if i == 2 else {}),
            )
            for i, (prompt, params, grammar) in enumerate(zip(PROMPTS, kinds, grammars, strict=True))
        ]
        finish(of)
        return [request.completion for request in requests]

    mine, expected = completions(eagle(model, heads(version))), completions(engine(0, tiny_model()))
    assert tokens(mine) == tokens(expected)
    assert all(completion.error is None for completion in mine)
    for got, want in zip(mine, expected, strict=True):
        assert (got.logprobs is None) == (want.logprobs is None)
        if got.logprobs is not None and want.logprobs is not None:
            assert got.cumulative_logprob == pytest.approx(want.cumulative_logprob, abs=1e-6)


@pytest.mark.parametrize("version", VERSIONS)
def test_logits_in_float32_are_those_of_the_definition(
    copied: MLAForCausalLM, heads: Heads, version: str
) -> None:
    target, count = tiny_model(torch.float32), 11
    head, layers = load_head(heads(version), target)
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randint(VOCAB, (count,), generator=generator)
    aux = [torch.randn(count, 32, generator=generator) for _ in layers]
    allocate(head.cache_specs(), 4, 4)
    table, cached = torch.tensor([[3, 1, 2]], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    segment, positions = decode_segment(cached, table, q_len=count, page_size=4)
    embedded = (head.embed_tokens or target.embed)(inputs)
    logits = head.logits(head(embedded, head.join(aux), positions, MLABatch(decode=segment)))
    expected = definition_of(heads(version), copied).logits(inputs.tolist(), [each.double() for each in aux])
    torch.testing.assert_close(logits.double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_no_token_depends_on_the_number_of_drafts(
    model: MLAForCausalLM, heads: Heads, k: int, params: SamplingParams
) -> None:
    assert tokens(eagle(model, heads("3.1"), k).generate(PROMPTS, params, max_new_tokens=24)) == tokens(
        plain(params)
    )


@pytest.mark.long
@pytest.mark.usefixtures("unlowered", "compiled_mixed_steps")
@pytest.mark.parametrize("version", ["3.1", "llama"])
def test_compiled_steps_give_the_tokens_of_eager_ones(heads: Heads, version: str) -> None:
    torch._dynamo.utils.counters.clear()
    compiled = eagle(tiny_model(torch.float32), heads(version), 2, compile=True)
    expected = engine(0, tiny_model(torch.float32)).generate(PROMPTS, max_new_tokens=20)
    for rows in (2, 4):
        got = compiled.generate(PROMPTS[:rows], max_new_tokens=20)
        assert tokens(got) == tokens(expected[:rows]), f"{rows} rows"
    assert compile_counters()["graphs"] == 3


def test_steps_are_checked_by_their_eager_run(heads: Heads) -> None:
    checked = eagle(tiny_model(), heads("3.1"))
    with shadow_check(checked):
        assert tokens(checked.generate(PROMPTS, max_new_tokens=12)) == [
            t[:12] for t in tokens(plain(SamplingParams()))
        ]


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.1", "llama 3.1"])
def test_batch_invariant_tokens_do_not_depend_on_drafts_nor_on_the_mix(heads: Heads, version: str) -> None:
    model = tiny_model(torch.float32)
    report = check_batch_invariance(
        model, PROMPTS, drafts=(K,), drafter_model=heads(version), max_new_tokens=16, rounds=1
    )
    assert report.num_latents > 100 and not report.num_different, report


@pytest.mark.gpu
@pytest.mark.parametrize("version", ["3.1", "llama", "llama 3.1"])
@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_captured_steps_draft_what_eager_ones_draft(
    heads: Heads, version: str, params: SamplingParams
) -> None:
    """float64 rounds so little that tokens and accepted drafts are equal."""
    torch.compiler.reset()
    outcomes = []
    for compile_ in (True, False):
        of = eagle(tiny_model().cuda(), heads(version), compile=compile_, page_size=16, max_model_len=256)
        completions = of.generate(PROMPTS, params, max_new_tokens=100)
        outcomes.append((tokens(completions), of.stats.num_drafts, of.stats.num_verified_tokens))
        if compile_:
            buckets = [bucket for bucket in of.capture_report().buckets if not bucket.prompt_tokens]
            assert {bucket.outcome for bucket in buckets} == {"captured"}
    assert outcomes[0] == outcomes[1]
    plain = engine(0, tiny_model().cuda(), max_model_len=256).generate(PROMPTS, params, max_new_tokens=100)
    assert outcomes[0][0] == tokens(plain)


@pytest.mark.gpu
@pytest.mark.parametrize("version", ["3.1", "llama 3.1"])
def test_batch_invariant_tokens_on_a_gpu(heads: Heads, version: str) -> None:
    torch.compiler.reset()
    model = tiny_model(torch.bfloat16).cuda()
    report = check_batch_invariance(model, PROMPTS, drafts=(K,), drafter_model=heads(version), rounds=2)
    assert report.num_latents > 500 and not report.num_different, report


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            "architectures: expected one of Eagle3DeepseekV2ForCausalLM",
        ),
        ({"hidden_size": 16}, "hidden_size: expected that of the target, 32, got 16"),
        ({"vocab_size": 41}, "vocab_size: expected that of the target, 40, got 41"),
        ({"kv_lora_rank": None}, "kv_lora_rank: expected an integer"),
        ({"fc_norm": True}, r"3 missing: fc_norm\.0\.weight \[32\]"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}},
            "expected layers of the target, which has 2",
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}},
            "expected a list of 1 to 16 layers, or null",
        ),
        ({"eagle_config": None}, "expected a list, as a target of 2 layers has no default, got none"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1]}, "expected the ids in eagle_config"),
        ({"draft_vocab_size": 41}, "draft_vocab_size: expected at most vocab_size = 40, got 41"),
        ({"mlp_bias": True}, "mlp_bias: expected False, got True"),
        ({"draft_vocab_size": 20}, "expected a tensor d2t, as its vocabulary is reduced, got none"),
        ({"target_hidden_size": 64}, "target_hidden_size: expected hidden_size = 32, got 64"),
    ],
    ids=str,
)
def test_a_head_that_does_not_fit_is_refused_by_name(
    model: MLAForCausalLM, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    config = config_of(32, [0, 1, 1])
    before = [spec.layer.kv_cache for spec in model.cache_specs()]
    with pytest.raises(MLAError, match=message):
        eagle(model, write_head(tmp_path, {**config, **change}, weights_of(config)))
    after = [spec.layer.kv_cache for spec in model.cache_specs()]
    assert all(x is y for x, y in zip(before, after, strict=True)), "nothing is allocated"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_key_value_heads": 3},
            "num_key_value_heads: expected a divisor of num_attention_heads = 4, got 3",
        ),
        ({"head_dim": 7}, "head_dim: expected an even number, as pairs are rotated, got 7"),
        ({"attention_bias": True}, "attention_bias: expected False, got True"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu', got 'gelu'"),
        ({"sliding_window": 512}, "sliding_window: expected null, as all keys are attended, got 512"),
        ({"layer_types": ["sliding_attention"]}, "layer_types: expected only 'full_attention'"),
        (
            {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": None},
            "num_attention_heads: expected a divisor of hidden_size = 32",
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_type: expected 'default' or 'yarn'",
        ),
        (
            {"norm_before_fc": True, "fc_norm": True},
            "norm_before_fc, fc_norm: expected one of the two, got both",
        ),
        ({"speculators_model_type": "dflash"}, "speculators_model_type: expected 'eagle3', got 'dflash'"),
        (
            {"speculators_model_type": "eagle3"},
            "transformer_layer_config: expected an object with model_type",
        ),
        ({"num_attention_heads": 8}, r"2 misshapen: midlayer\.self_attn\.o_proj\.weight"),
    ],
    ids=str,
)
def test_a_head_of_llama_with_other_settings_is_refused_by_name(
    model: MLAForCausalLM, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    config = llama_config(32, [0, 1, 1])
    with pytest.raises(MLAError, match=message):
        eagle(model, write_head(tmp_path, {**config, **change}, weights_of(config)))


def test_the_embedding_is_no_layer_whose_output_a_head_of_speculators_can_read(
    model: MLAForCausalLM, tmp_path: Path
) -> None:
    head = speculators_head(tmp_path, "llama", 32, [0, 1])
    with pytest.raises(MLAError, match="eagle_aux_hidden_state_layer_ids: expected inputs of layers >= 1"):
        eagle(model, head)


@pytest.mark.parametrize("version", ["3.1", "llama"])
def test_the_memory_plan_counts_weights_and_cache_of_a_head(heads: Heads, version: str) -> None:
    model, settings = tiny_model(torch.bfloat16), {"max_rows": 4, "max_model_len": 64, "page_size": 4}
    plans = [
        plan_memory(
            model, EngineConfig(num_speculative_tokens=K, drafter=kind, drafter_model=path, **settings)
        )
        for kind, path in (("ngram", None), ("eagle3", heads(version)))
    ]
    of = eagle(model, heads(version))
    head, specs = of._caches._drafter.head, cache_specs(model, of._caches._drafter)
    of_head = sum(x.nbytes for x in head.parameters())
    assert of_head <= plans[1].weights - plans[0].weights < of_head + 1000, "and the places of ids, angles"
    config = of.config
    assert config.num_pages == plans[1].config.num_pages
    assert plans[1].cache == sum(spec.cache.nbytes for spec in specs)
    width = {"3.1": 20, "llama": 2 * 2 * 6}[version]
    assert plans[1].cache - plans[0].cache == config.num_pages * config.page_size * width * 2


def test_a_default_length_leaves_memory_for_a_head(heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights and its cache count as those of the target do: memory for exactly 8,192 tokens is not enough."""
    model, on = tiny_model(), DEVICE_DEFAULTS["cuda"]
    of_token = 2 * sum(spec.bytes_per_token for spec in model.cache_specs())
    left = on.kept_bytes + int(8192 * of_token / on.cache_share)
    monkeypatch.setattr(MLAForCausalLM, "max_position_embeddings", 2**20)
    without, with_head = (
        EngineConfig(max_rows=2, num_speculative_tokens=K, drafter=kind, drafter_model=path).fitted_to(
            model, device_type="cuda", left=left
        )
        for kind, path in (("ngram", None), ("eagle3", heads("llama")))
    )
    assert (without.max_model_len, with_head.max_model_len) == (8192, 4096)


@pytest.mark.parametrize("offsets", [[0] * 29 + [-30], [0] * 29 + [11], [1] + [0] * 29])
def test_ids_outside_the_vocabulary_or_twice_are_refused(
    model: MLAForCausalLM, tmp_path: Path, offsets: list[int]
) -> None:
    config = config_of(32, [0, 1, 1], draft_vocab_size=30)
    weights = weights_of(config) | {"d2t": torch.tensor(offsets)}
    with pytest.raises(MLAError, match=r"d2t: expected offsets to different ids in \[0, 40\)"):
        eagle(model, write_head(tmp_path, config, weights))


def test_settings_that_contradict_each_other_are_refused(model: MLAForCausalLM, heads: Heads) -> None:
    with pytest.raises(
        MLAError, match=r"drafter_model: expected the directory of the head, for drafter='eagle3'"
    ):
        engine(3, model, drafter="eagle3")
    with pytest.raises(MLAError, match="drafter_model: expected None, as drafter 'ngram' has no weights"):
        eagle(model, heads("3"), drafter="ngram")
    with pytest.raises(
        MLAError,
        match="drafter_model: expected a directory with an EAGLE-3 head, got nowhere, which does not exist",
    ):
        eagle(model, Path("nowhere"))
    assert eagle(model, heads("3")).config.drafter.name == "eagle3"
    assert eagle(model, heads("3"), 0).config.drafter_model is None
