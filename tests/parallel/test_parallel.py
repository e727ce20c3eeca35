"""Processes that share a model say what one process says that has all of it, in float32."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_compile import Engine, MLAError, Parallel, load_model
from mla_compile.models.deepseek import MLAForCausalLM
from mla_compile.models.sharding import divide
from mla_compile.ops.collectives import all_gather_op, all_reduce_op
from mla_compile.ops.fp8 import BLOCK, quantize
from mla_compile.ops.rms_norm import add_rms_norm_op, all_reduce_add_rms_norm_op
from tests.examples.pages import ROOT, blocks_of
from tests.models.small import (
    glm_config,
    reference_model,
    reference_mtp_layer,
    save,
    to_fp8,
    v2_config,
    v3_config,
)
from tests.parallel.ranks import run_ranks
from tests.parallel.worker import texts

WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
}
"""FP8 blocks end where the parts of two processes do."""


def checkpoint(folder: Path, config: Any, *, mtp: bool = True) -> Path:
    model = reference_model(config)
    return save(model, folder / "checkpoint", reference_mtp_layer(model) if mtp else None)


def shared(folder: Path, size: int, job: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """What `size` processes say, each for itself."""
    (folder / "job.json").write_text(json.dumps(job))
    run_ranks("tests.parallel.worker", size, folder)
    return [json.loads((folder / f"said.{rank}.json").read_text()) for rank in range(size)]


@pytest.mark.parametrize(
    ("config", "size", "job"),
    [
        pytest.param(v3_config(vocab_size=96), 2, {}, id="v3"),
        pytest.param(v3_config(vocab_size=96), 4, {"expert_parallel": True}, id="v3, 4, experts"),
        pytest.param(
            v3_config(vocab_size=96, first_k_dense_replace=3, tie_word_embeddings=True), 4, {}, id="tied"
        ),
        pytest.param(
            v2_config(vocab_size=96, q_lora_rank=None), 2, {"mtp": False, "expert_parallel": True}, id="v2"
        ),
        pytest.param(glm_config(vocab_size=96), 2, {"k": [3]}, id="glm"),
        pytest.param(v3_config(vocab_size=96, **WIDE), 2, {"load": {"quantize": "fp8"}, "k": [3]}, id="fp8"),
        pytest.param(
            v3_config(vocab_size=96),
            2,
            {"engine": {"batch_invariant": True, "compile": True}, "k": [0]},
            id="exact",
        ),
        pytest.param(
            v3_config(vocab_size=96),
            4,
            {"engine": {"batch_invariant": True, "compile": True}, "k": [0]},
            id="exact, 4",
            marks=pytest.mark.slow,
        ),
        pytest.param(v3_config(vocab_size=96), 2, {"engine": {"compile": True}, "k": [0]}, id="compiled"),
    ],
)
def test_tokens_of_processes_that_share_a_model(
    config: Any, size: int, job: dict[str, Any], tmp_path: Path
) -> None:
    checkpoint(tmp_path, config, mtp=job.get("mtp", True))
    said = shared(tmp_path, size, job)
    alone = texts(None, tmp_path, job | {"engine": {}})
    for each in said:
        assert each == said[0]
        for one, whole in zip(each, alone, strict=True):
            assert one["tokens"] == whole["tokens"]
            assert one["mixed"] > 2 and one["preempted"] and one["reused"]
            assert one["bytes"] < 0.8 * whole["bytes"]


@pytest.mark.parametrize("dequantize", [False, True])
def test_a_checkpoint_in_fp8(dequantize: bool, tmp_path: Path) -> None:
    """Weights and scales are divided alike; dequantised ones after that."""
    to_fp8(checkpoint(tmp_path, v3_config(vocab_size=96, **WIDE)), quantize, (BLOCK, BLOCK))
    job = {"load": {"dequantize": dequantize}, "k": [0]}
    said, (alone,) = shared(tmp_path, 2, job), texts(None, tmp_path, job)
    whole = alone.pop("bytes")
    assert all(one.pop("bytes") < 0.8 * whole for (one,) in said)
    assert said == [[alone], [alone]]


def test_the_page_shows_a_program_that_runs(tmp_path: Path) -> None:
    checkpoint(tmp_path, v3_config(vocab_size=96))
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "checkpoint").symlink_to(tmp_path / "checkpoint")
    (program,) = [each for each in blocks_of(ROOT / "docs" / "parallel.md") if each.mark == "parallel"]
    (tmp_path / "program.py").write_text(program.code)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    said = subprocess.run(
        [*launch, "program.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert said.returncode == 0, said.stderr[-3000:]
    assert re.fullmatch(r"\[\d+(, \d+)*\]\n", said.stdout)


class TestMistakes:
    def test_without_a_process_group(self, tmp_path: Path) -> None:
        with pytest.raises(MLAError, match=r"Parallel: expected a process group.*none.*torchrun"):
            Parallel.of_processes()
        with pytest.raises(MLAError, match="Parallel: expected a process group"):
            load_model(tmp_path, parallel=Parallel(0, 2))

    def test_what_processes_would_not_decide_alike(self) -> None:
        with torch.device("meta"):
            model = MLAForCausalLM(v3_config(vocab_size=96), mtp=True)
        divide(model, Parallel(1, 4))
        for name, value in (
            ("adaptive_draft_length", True),
            ("capture_budget", 2**30),
        ):
            with pytest.raises(MLAError, match=f"{name}: .* for a model that 4 processes share"):
                Engine(model, num_speculative_tokens=1, **{name: value})

    def test_sizes_that_do_not_divide(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        checkpoint(tmp_path, v3_config(vocab_size=97))
        monkeypatch.setattr(Parallel, "check", lambda self: None)
        with pytest.raises(
            MLAError, match=r"parallel.size: expected one of 1, got 2; it does not divide vocab_size = 97"
        ):
            load_model(tmp_path / "checkpoint", parallel=Parallel(0, 2))


def test_collectives_are_sound_ops(tmp_path: Path) -> None:
    """In a group of one process."""
    x, weight = torch.randn(6, 8, device="cpu")[:, ::2], torch.randn(4)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1
    )
    try:
        for rows in (x, x[:0], x.bfloat16()):
            for exact in (False, True):
                torch.library.opcheck(all_reduce_op, (rows, exact))
                scale = weight.to(rows.dtype)
                torch.library.opcheck(all_reduce_add_rms_norm_op, (rows, rows * 2, scale, 1e-5, exact))
                found = all_reduce_add_rms_norm_op(rows, rows * 2, scale, 1e-5, exact)
                assert all(map(torch.equal, found, add_rms_norm_op(rows, rows * 2, scale, 1e-5)))
            torch.library.opcheck(all_gather_op, (rows, 1))
            assert torch.equal(all_reduce_op(rows), rows) and torch.equal(all_gather_op(rows, 1), rows)
    finally:
        torch.distributed.destroy_process_group()
