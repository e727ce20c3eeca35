"""Short runs of the stress commands."""

import pytest

from stress import checkpoints, engines, faults, ops, passes, requests
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
    assert run(passes.run, range(24)) >= {"plain MLA, absorbed", "program, all passes"}


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
def test_faults() -> None:
    kinds = run(faults.run, range(20))
    assert {kind.partition(":")[2] for kind in kinds} >= {" requests ended by name", " all went on"}
