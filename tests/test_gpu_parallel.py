"""Processes that share GPU memory: collectives on one or two devices, engines that share a model on two."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.small import v3_config
from tests.parallel.gpu_worker import CHECKS
from tests.parallel.ranks import run_ranks
from tests.parallel.test_parallel import WIDE, alone, checkpoint, shared

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.parametrize(
    "check", [pytest.param(name, marks=() if name == "kernels" else two_gpus) for name in CHECKS]
)
def test_collectives(check: str, tmp_path: Path) -> None:
    """See `gpu_worker.py`. On one GPU two processes share it."""
    run_ranks("tests.parallel.gpu_worker", 2, tmp_path, check)


@two_gpus
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("exact", [False, True], ids=["", "exact"])
def test_engines_give_the_same_tokens_on_both_gpus(dtype: str, exact: bool, tmp_path: Path) -> None:
    """With one CUDA graph a step, tokens in float32 are those of one GPU with the whole model."""
    checkpoint(tmp_path, v3_config(vocab_size=96, **WIDE))
    job: dict[str, Any] = {
        "load": {"device": "cuda", "dtype": dtype},
        "engine": {"compile": True, "batch_invariant": exact},
        "k": [0, 3] if exact else [3],
        "greedy": True,
        "warm_up": True,
    }
    results = shared(tmp_path, 2, job)
    for result in results:
        assert result["captured"] and all(result["captured"])
        assert result["mixed"] > 2 and result["reused"]
        assert bool(result["preempted"]) != exact
    if exact:  # whatever the drafts
        assert results[0]["tokens"] == results[1]["tokens"]
    if dtype == "float32":
        whole = alone(tmp_path, job | {"engine": {}})
        assert [result["tokens"] for result in results] == [result["tokens"] for result in whole]


@two_gpus
def test_rank_0_decides_what_is_recorded(tmp_path: Path) -> None:
    """With a budget that each rank would exhaust at another time."""
    checkpoint(tmp_path, v3_config(vocab_size=96, **WIDE))
    job: dict[str, Any] = {
        "load": {"device": "cuda", "dtype": "bfloat16"},
        "engine": {"compile": True, "capture_budget": 2**21},
        "k": [2],
        "greedy": True,
    }
    (result,) = shared(tmp_path, 2, job)
    assert True in result["captured"] and False in result["captured"]
