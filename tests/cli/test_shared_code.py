"""Commands and calls that differ in nothing else compile the same graphs, so each finds what another has compiled."""

import json
from collections.abc import Iterator

import pytest
import torch

import mla_compile
from mla_compile import Engine, SamplingParams, backend

Key = tuple[str, str, str]


@pytest.fixture
def long(copy):
    """The tiny checkpoint, with as many positions as real ones have at least."""
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    return copy


@pytest.fixture
def compiled(monkeypatch) -> list[Key]:
    """What Inductor's cache knows a graph by: code, inputs, settings. What is compiled then runs as it is."""
    seen: list[Key] = []

    def lower(gm, example_inputs, settings):
        values = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
        inputs = [(x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x for x in values]
        assert settings["cpp.dynamic_threads"], (
            "else the number of threads is part of the key, and of the code"
        )
        seen.append((gm.code, str(inputs), str(sorted(settings.items()))))
        return gm.forward

    monkeypatch.setattr(backend, "lower_with_inductor", lower)
    monkeypatch.setattr("mla_compile.cli.machine.cpp_compiler", lambda: "c++")
    return seen


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)  # the demo takes one


@pytest.mark.long
def test_every_caller_gets_the_same_graph(run, long, compiled, tmp_path, monkeypatch):
    for module in ("mla_compile.engine.config", "mla_compile.cli.demo"):
        monkeypatch.setattr(f"{module}.DEFAULT_DRAFTS", 1)  # a graph of three takes twice as long to trace
    assert run("demo", "--model", long, "--max-new-tokens", 4).exit_code == 0
    assert len(compiled) == 4, "two parts of a step without drafts, and of one with drafts"
    plain, drafting = set(compiled[:2]), set(compiled[2:])
    assert not plain & drafting

    def asked(work) -> set[Key]:
        compiled.clear()
        torch.compiler.reset()
        work()
        return set(compiled)

    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "hello"}\n{"prompt": "to be", "n": 2, "max_tokens": 5}\n')
    model = mla_compile.load_model(long)
    short = ("generate", "--compile", "--model", long, "--max-new-tokens", 6)
    assert asked(lambda: run(*short, "--input", file)) == drafting
    assert (
        asked(lambda: mla_compile.generate(["to be"] * 3, model=long, max_new_tokens=100, compile=True))
        == drafting
    )
    assert asked(lambda: Engine(model, compile=True).warm_up(sampling=SamplingParams())) == drafting
    plainly = Engine(model, num_speculative_tokens=0, compile=True)
    assert asked(lambda: plainly.warm_up(sampling=SamplingParams())) == plain
    sampled = asked(lambda: run(*short, "--prompt", "to be", "--temperature", 1))
    assert len(sampled) == 2 and len(sampled & drafting) == 1, "they share the part with the target"
