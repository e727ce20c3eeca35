"""Short runs of the stress commands."""

import pytest

from stress import ops
from stress.runner import Case, Draw


def run(case: Case, cases: int) -> set[str]:
    return {case(Draw(seed)) for seed in range(cases)}


def test_ops() -> None:
    kinds = run(ops.case_on("cpu"), 400)
    names = {kind.partition(",")[0] for kind in kinds}
    assert len(names) >= 20 and {f"{name}, valid" for name in names} | {f"{name}, refused" for name in names} <= kinds
