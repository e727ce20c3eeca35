"""The step under `torch.compile(backend="mla")`: one graph for all buckets, the tokens of eager decoding."""

import re

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from mla_compile import MLABatch, decode_segment
from mla_compile.caches import allocate
from mla_compile.engine import Engine
from mla_compile.passes import pipeline
from mla_compile.speculate import DecodeState, SpeculativeDecoder
from mla_compile.torch_internals import capture_graph, mark_varying, with_own_code
from tests.counters import compile_counters
from tests.models_for_tests import one_layer_model, tiny_model
from tests.passes.capture import HIDDEN, PAGE_SIZE, Stack, nodes_of


@pytest.mark.long
@pytest.mark.parametrize("k", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_one_compiled_step_serves_every_row_bucket_with_the_tokens_of_plain_decoding(k: int) -> None:
    torch._dynamo.utils.counters.clear()
    settings = {"max_rows": 8, "max_model_len": 64, "page_size": 4}
    engine = Engine(one_layer_model(torch.float32), num_speculative_tokens=k, compile=True, **settings)
    plain = Engine(one_layer_model(torch.float32), num_speculative_tokens=0, compile=False, **settings)
    for rows in (2, 1, 4, 8, 3):
        prompts = [list(range(1, 2 + row)) for row in range(rows)]
        compiled, expected = (e.generate(prompts, max_new_tokens=24) for e in (engine, plain))
        assert [c.token_ids for c in compiled] == [c.token_ids for c in expected], f"{rows} rows"
    poison = expected[0].token_ids[6]
    for e in (engine, plain):
        e.reset_prefix_cache()
        e.model.embed_tokens.weight[poison] = torch.nan
    poisoned, healthy = engine.generate(prompts, max_new_tokens=24), expected
    for completion, whole in zip(poisoned, healthy):
        fails = poison in whole.token_ids[:-1]
        end = whole.token_ids.index(poison) + 1 if fails else 24
        assert completion.token_ids == whole.token_ids[:end], "also where a neighbour's logits are NaN"
        assert (completion.error is not None) == fails
    assert any(c.error for c in poisoned)
    assert compile_counters()["graphs"] == 2, "the first and the last part of a step"
    report = engine.capture_report()
    assert report.why_not == "the device is cpu"
    assert [bucket.rows for bucket in report.buckets] == [2, 1, 4, 8]
    assert [bucket.compile_seconds > 0 for bucket in report.buckets] == [True, *[False] * 3]
    assert (report.num_bytes, report.capture_seconds) == (0, 0)


@pytest.mark.long
def test_a_step_computes_the_metadata_of_each_forward_once() -> None:
    k, model = 2, tiny_model(torch.float32)
    allocate(model.cache_specs(), 9, 4)
    found = capture_graph(
        SpeculativeDecoder(model, k, page_size=4), (DecodeState.allocate(2, k, max_pages=4),), {}
    )
    assert found is not None
    gm = pipeline.run(*found)
    metadata = nodes_of(gm, "mla_decode_metadata")
    assert [node.args[3] for node in metadata] == [k + 1, k + 1, 1], "verify; the MTP layer, then its drafts"
    sources = [node.args[3].all_input_nodes[0] for node in nodes_of(gm, "mla_append")]
    assert sources == [metadata[0]] * 2 + metadata[1:], "two trunk layers share theirs"


@pytest.mark.long
def test_compiled_layers_read_the_same_metadata() -> None:
    """In plain torch, Inductor computed it again for every layer."""

    class Rows(Stack):
        def forward(self, x: Tensor, cached: Tensor, table: Tensor, wanted: Tensor) -> Tensor:
            for tensor in (x, table, wanted):
                torch._check(tensor.shape[0] == cached.shape[0])
            segment, _ = decode_segment(
                cached, table, q_len=1, page_size=PAGE_SIZE, q_lens=torch.where(wanted, 1, 0).int()
            )
            return super().forward(x, MLABatch(segment))

    inputs = torch.randn(2, HIDDEN), torch.tensor([5, 2]).int(), torch.tensor([[1, 2], [3, 4]]).int()
    inputs = (*inputs, torch.tensor([True, False]))
    for tensor in inputs:
        mark_varying(tensor)
    model = Rows(2)
    _, codes = run_and_get_code(torch.compile(model, backend="mla", fullgraph=True), *inputs)
    code = "\n".join(codes)
    appends = re.findall(r"mla_append\.default\(.+, (\w+)\)", code)
    decodes = re.findall(r"mla_decode\.default\(.+, (\w+, \w+, \w+), 1, 0\.3[,)]", code)
    assert (len(appends), len(decodes)) == (2, 2)
    assert len(set(appends)) == len(set(decodes)) == 1


def test_any_number_of_engines_may_compile_their_steps() -> None:
    class Adds(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.number

    limit = torch._dynamo.config.recompile_limit
    for number in range(limit + 2):
        compiled = torch.compile(with_own_code(Adds(number).forward), backend="eager", fullgraph=True)
        assert compiled(torch.zeros(())) == number
