"""Steps of whole models, for the suites of several passes: graphs, logits and tokens."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn

from mla_compile.caches import allocate
from mla_compile.engine import Engine
from mla_compile.integrations.transformers.target import TransformersTarget
from mla_compile.passes import pipeline
from mla_compile.speculate import DecodeState, SpeculativeDecoder
from tests.integrations.test_logits import Reader
from tests.models_for_tests import tiny_model
from tests.passes.capture import Capture, graph_of


def capture_steps(
    reader: Reader, passes: Sequence[pipeline.Pass], monkeypatch: pytest.MonkeyPatch
) -> Capture:
    """Gives a reader of a transformers model its prompt, and compiles its forwards from then on."""
    reader.prefill([5, 1, 9, 2])
    capture, run = Capture(passes), TransformersTarget.forward
    compiled = torch.compile(lambda *inputs: run(reader.target, *inputs), backend=capture, fullgraph=True)
    monkeypatch.setattr(TransformersTarget, "forward", lambda self, *inputs: compiled(*inputs))
    return capture


def speculative_step() -> tuple[fx.GraphModule, Sequence[Any]]:
    """Dynamo's graph of a step of the tiny model with one draft, on tensors without values."""
    model = tiny_model(torch.bfloat16).to("meta")
    allocate(model.cache_specs(), 9, 4)
    state = DecodeState.allocate(2, 1, max_pages=4, device="meta")
    return graph_of(SpeculativeDecoder(model, 1, page_size=4), state)


def check_greedy_tokens(model: nn.Module, *, batch_invariant: bool = False) -> None:
    """A speculative engine, with steps that mix prompts and drafts, gives the tokens of plain decoding."""
    settings = {"max_rows": 2, "max_model_len": 64, "page_size": 4}
    engine = Engine(
        model, num_speculative_tokens=2, batch_invariant=batch_invariant, compile=True, **settings
    )
    prompts, requests = [[1, 2, 3], [4, 5]], []
    for prompt in prompts:
        requests.append(engine.add(prompt, max_new_tokens=12))
        engine.step()
    while engine.has_work():
        engine.step()
    plain = Engine(model, num_speculative_tokens=0, compile=False, **settings).generate(
        prompts, max_new_tokens=12
    )
    assert [request.completion.token_ids for request in requests] == [c.token_ids for c in plain]
    assert engine.stats.num_mixed_steps
