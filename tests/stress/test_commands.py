"""Short runs of the stress commands."""

import argparse

import pytest

from mla_compile import SamplingParams
from stress import checkpoints, engines, faults, ops, passes, requests, soak
from stress.runner import Case, Draw


def run(case: Case, seeds: range) -> set[str]:
    return {case(Draw(seed)) for seed in seeds}


def test_ops() -> None:
    kinds = run(ops.case_on("cpu"), range(600))
    names = {kind.partition(",")[0] for kind in kinds}
    assert len(names) >= 20
    assert {f"{name}, valid" for name in names} <= kinds
    assert sum(kind.endswith("refused") for kind in kinds) >= 15


@pytest.mark.gpu
def test_ops_on_a_gpu() -> None:
    kinds = run(ops.case_on("cuda"), range(200))
    assert len({kind.partition(",")[0] for kind in kinds}) >= 15


@pytest.mark.long
def test_passes() -> None:
    assert run(passes.run, range(24)) >= {
        "plain MLA, absorbed",
        "program, all passes",
        "layers, compiled once",
    }


@pytest.mark.long
def test_checkpoints() -> None:
    kinds = run(checkpoints.case(), range(100))
    assert {kind.partition(",")[0] for kind in kinds} >= {"config", "index", "safetensors", "tokenizer"}


def test_requests() -> None:
    kinds = run(requests.case(), range(300))
    assert kinds >= {"body, refused", "body, understood", "parameters, valid", "grammar, a whole text"}


@pytest.mark.long
def test_engines() -> None:
    assert len(run(engines.run, range(12))) > 3


@pytest.mark.long
def test_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("STEPS", 60), ("SCHEDULER_STEPS", 300), ("WARM_UP", 1)):
        monkeypatch.setattr(soak, name, value)
    assert len(run(soak.make(argparse.Namespace(device="cpu")), range(3))) == 1


def test_soak_fails_if_objects_of_the_package_stay_alive() -> None:
    flat, kept = soak.Flat({"objects": (soak.num_objects, 50)}), []
    for _ in range(soak.WARM_UP + 1):
        flat.check()
    kept += [SamplingParams() for _ in range(60)]
    with pytest.raises(AssertionError, match="objects: "):
        flat.check()


@pytest.mark.long
def test_faults() -> None:
    kinds = run(faults.run, range(20))
    assert {kind.partition(":")[2] for kind in kinds} >= {" requests ended by name", " all went on"}
