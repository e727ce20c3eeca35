"""What every test starts with: its share of the machine, a fixed seed, nothing compiled by another file."""

import gc
import os
import sys

# Before torch loads: the test processes share the cores, and Inductor compiles inside the test's own process.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Trust the CPU's own list of vector instructions: Inductor compiles programs to test each, 8 s in an empty cache.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

# A compile inside an example is slow, not stuck; the same examples on every machine.
settings.register_profile("mla-compile", deadline=None, derandomize=True, database=None)
settings.load_profile("mla-compile")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Freezes what is imported: collecting garbage in it took 6% of the tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def compiled_mixed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines compile steps with prompts from the first one on, also without CUDA graphs.

    Private, here and below: no setting forces one way, as an engine knows which is faster.
    """
    monkeypatch.setattr("mla_compile.engine.steps._compiles_mixed", lambda model, why_not_captured: True)
    monkeypatch.setattr("mla_compile.engine.steps.EAGER_MIXED_STEPS", -1)


@pytest.fixture
def eager_mixed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines run steps with prompts eagerly, for tests of other steps: half as much to compile."""
    monkeypatch.setattr("mla_compile.engine.steps._compiles_mixed", lambda model, why_not_captured: False)


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def lowering(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces Inductor in `backend="mla"` for tests of the graph and its inputs, not of generated code.

    AOTAutograd's graph runs op by op. Dynamo's graph and guards, our passes and writes are as with Inductor, which
    takes ten times as long and runs in `make test-all`.
    """
    if request.param == "inductor":
        return
    from torch._dynamo.backends.registry import lookup_backend

    def lower(gm: Any, example_inputs: Any, settings: Any) -> Any:
        return lookup_backend("aot_eager")(gm, example_inputs)

    monkeypatch.setattr("mla_compile.backend.lower_with_inductor", lower)


@pytest.fixture(params=["passes", pytest.param("inductor", marks=pytest.mark.slow)])
def unlowered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like `lowering`, without AOTAutograd: the graph that our passes leave runs op by op, and writes in place.

    For tests of which graphs an engine compiles and when, in half the time: other tests lower the same graphs.
    """
    if request.param == "passes":
        monkeypatch.setattr("mla_compile.backend.lower_with_inductor", lambda gm, *_: gm.forward)


@pytest.fixture(autouse=True, scope="module")
def own_compiled_code() -> Iterator[None]:
    yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
