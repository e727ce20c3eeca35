"""On a CUDA device: accelerated models replay CUDA graphs and generate what the stock ones do."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from mla_compile.integrations.transformers import accelerate
from tests.counters import compile_counters
from tests.integrations import stock
from tests.integrations.families import FAMILIES, prompts, stock_model
from tests.integrations.mtp import STEPS, with_mtp

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture
def compiled_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first step on, where it would take some eager ones."""
    monkeypatch.setattr("mla_compile.engine.steps.EAGER_MIXED_STEPS", -1)


def on_cuda(model: Any, texts: list[list[int]], **options: Any) -> list[list[int]]:
    ids, mask = (tensor.cuda() for tensor in stock.left_padded(texts))
    out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=STEPS, **options)
    tokens: list[list[int]] = out[:, ids.shape[1] :].tolist()
    return tokens


@pytest.mark.usefixtures("compiled_prompts")
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_captured_steps_are_those_of_stock(family: str) -> None:
    model = stock_model(family).cuda()
    batches = [prompts(), prompts()[:1], prompts()[:2], prompts()]
    expected = [on_cuda(model, texts) for texts in batches]
    accelerate(model, max_rows=4)
    assert [on_cuda(model, texts) for texts in batches] == expected
    buckets = model.mla.capture_report().buckets
    mixed = [bucket for bucket in buckets if bucket.prompt_tokens]
    assert bool(mixed) is not model.mla.target.is_recurrent, "recurrent layers run prompts eagerly"
    assert compile_counters()["graphs"] == (4 if mixed else 3), (
        "a step's parts, the first one with prompts too"
    )
    assert [(b.rows, b.outcome) for b in buckets if not b.prompt_tokens] == [
        (rows, "captured") for rows in (4, 1, 2)
    ]


@pytest.mark.usefixtures("compiled_prompts")
@pytest.mark.parametrize("options", [{}, {"no_repeat_ngram_size": 6}], ids=["in the step", "on the host"])
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite"])
def test_tokens_of_captured_steps_with_drafts_are_those_of_stock(
    family: str, options: dict[str, Any]
) -> None:
    model, mtp, _ = with_mtp(family)
    model.cuda()
    mtp.cuda()
    expected = on_cuda(model, prompts(), **options)
    accelerate(model, num_speculative_tokens=3, mtp=mtp, max_rows=4)
    assert on_cuda(model, prompts(), **options) == expected
    report = model.mla.capture_report()
    assert not any(bucket.why_not for bucket in report.buckets), report
    assert max(c.acceptance_length or 1 for c in model.mla.completions) > 1.2


def test_threads_replay_the_graphs_of_the_first_one() -> None:
    """As with transformers' `TextIteratorStreamer`, for which each call of `generate` is in a thread of its own."""
    model = stock_model("glm4_moe_lite").cuda()
    expected = on_cuda(model, prompts())
    accelerate(model, max_rows=4)
    results = [on_cuda(model, prompts())]
    for _ in range(3):
        with ThreadPoolExecutor(1) as thread:
            results.append(thread.submit(on_cuda, model, prompts()).result())
    assert results == [expected] * 4
    assert compile_counters()["graphs"] == 3, (
        "the target's forward of prompts that come together runs eagerly"
    )
