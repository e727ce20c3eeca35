"""The step under `torch.compile(backend="mla")`: one graph for all buckets, the tokens of eager decoding."""

import torch
from torch import nn

from mla_compile.engine import Engine
from mla_compile.torch_internals import compile_counters, with_own_code
from tests.models_for_tests import tiny_model


def test_one_compiled_step_serves_every_row_bucket_with_the_tokens_of_plain_decoding() -> None:
    torch._dynamo.utils.counters.clear()
    settings = {"max_rows": 8, "max_model_len": 64, "page_size": 4}
    engine = Engine(tiny_model(torch.float32), num_speculative_tokens=2, **settings)
    plain = Engine(tiny_model(torch.float32), compile=False, **settings)
    for rows in (2, 1, 4, 8, 3):
        prompts = [list(range(1, 2 + row)) for row in range(rows)]
        compiled, expected = (e.generate(prompts, max_new_tokens=24) for e in (engine, plain))
        assert [c.token_ids for c in compiled] == [c.token_ids for c in expected], f"{rows} rows"
    assert compile_counters()["graphs"] == 1
    report = engine.capture_report()
    assert report.why_not == "the device is cpu"
    assert [bucket.rows for bucket in report.buckets] == [2, 1, 4, 8]
    assert [bucket.compile_seconds > 0 for bucket in report.buckets] == [True, False, False, False]
    assert (report.num_bytes, report.capture_seconds) == (0, 0)


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
