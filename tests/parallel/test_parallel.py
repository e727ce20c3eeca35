"""Processes that share a model give the tokens of one process with the whole model, in float32."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mla_compile import Engine, MLAError, Parallel, follow, load_model
from mla_compile.engine.text import Checkpoint
from mla_compile.models.deepseek import MLAForCausalLM
from mla_compile.models.sharding import divide
from mla_compile.ops.collectives.collectives import all_gather_op, all_reduce_op
from mla_compile.ops.linear.fp8 import BLOCK, quantize
from mla_compile.ops.norm.rms_norm import add_rms_norm_op, all_reduce_add_rms_norm_op
from mla_compile.ranks import Ranks
from tests.examples.pages import ROOT, blocks_of
from tests.models.small import (
    glm5_config,
    glm_config,
    reference_model,
    reference_mtp_layer,
    save,
    to_fp8,
    v2_config,
    v3_config,
    v32_config,
)
from tests.parallel.lost_rank import PHASES
from tests.parallel.ranks import exit_statuses, log_of, run_ranks
from tests.parallel.worker import loaded, texts

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
SMALL = v3_config(vocab_size=96, num_hidden_layers=2, first_k_dense_replace=1)
"""A layer of each kind: each process compiles all of them."""
EXACT = {"engine": {"batch_invariant": True, "compile": True}, "k": [0], "greedy": True}


def checkpoint(folder: Path, config: Any, *, mtp: bool = True) -> Path:
    model = reference_model(config)
    return save(model, folder / "checkpoint", reference_mtp_layer(model) if mtp else None)


def shared(folder: Path, size: int, job: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of rank 0 of `size` processes, whose steps have all reported the same."""
    (folder / "job.json").write_text(json.dumps(job))
    run_ranks("tests.parallel.worker", size, folder)
    first, *others = sorted(folder.glob("reports.*.txt"))
    assert len(others) == size - 1 and all(first.read_text() == other.read_text() for other in others)
    results: list[dict[str, Any]] = json.loads((folder / "results.json").read_text())
    return results


def alone(folder: Path, job: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of one process with the whole model."""
    return texts(loaded(None, folder, job), job)


def test_with_a_gpu_ranks_are_new_interpreters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    lines = (
        "import os, sys",
        "def main():",
        "    print(os.getppid(), *sys.argv[1:])",
        "    sys.exit(int(sys.argv[1]))",
    )
    (tmp_path / "counts.py").write_text("\n".join(lines))
    assert exit_statuses("counts", 2, tmp_path, "a") == [0, 1]
    for rank in (0, 1):
        assert log_of(tmp_path, rank).read_text() == f"{os.getpid()} {rank} 2 {tmp_path} a\n"


@pytest.mark.parametrize(
    ("config", "size", "job"),
    [
        pytest.param(v3_config(vocab_size=96), 2, {}, id="v3"),
        pytest.param(v3_config(vocab_size=96), 4, {"expert_parallel": True}, id="v3, 4, experts"),
        pytest.param(
            v3_config(vocab_size=96, first_k_dense_replace=3, tie_word_embeddings=True), 2, {}, id="tied"
        ),
        pytest.param(
            v2_config(vocab_size=96, q_lora_rank=None), 2, {"mtp": False, "expert_parallel": True}, id="v2"
        ),
        pytest.param(glm_config(vocab_size=96), 2, {"k": [3], "chooses": True}, id="glm, host"),
        pytest.param(v32_config(vocab_size=96), 2, {"k": [2]}, id="v3.2"),
        pytest.param(glm5_config(vocab_size=96), 2, {"k": [2]}, id="glm 5"),
        pytest.param(v3_config(vocab_size=96, **WIDE), 2, {"load": {"quantize": "fp8"}, "k": [3]}, id="fp8"),
        pytest.param(SMALL, 2, EXACT | {"lowering": "aot_eager"}, id="exact"),
        pytest.param(SMALL, 2, EXACT, id="exact, inductor", marks=pytest.mark.slow),
        pytest.param(v3_config(vocab_size=96), 4, EXACT, id="exact, 4", marks=pytest.mark.slow),
        pytest.param(SMALL, 2, {"engine": {"compile": True}, "k": [0], "greedy": True}, id="compiled"),
        pytest.param(
            SMALL,
            2,
            {"engine": {"compile": None}, "k": [0], "lowering": "eager", "slow_to_compile": [1]},
            id="compiled at different speeds",
        ),
    ],
)
def test_tokens_of_processes_that_share_a_model(
    config: Any, size: int, job: dict[str, Any], tmp_path: Path
) -> None:
    checkpoint(tmp_path, config, mtp=job.get("mtp", True))
    results = shared(tmp_path, size, job)
    for one, whole in zip(results, alone(tmp_path, job | {"engine": {}}), strict=True):
        assert one["tokens"] == whole["tokens"]
        assert one.get("chosen") == whole.get("chosen")
        assert one["mixed"] > 2 and one["reused"]
        assert bool(one["preempted"]) != job.get("engine", {}).get("batch_invariant", False)
        assert one["bytes"] < 0.8 * whole["bytes"]


@pytest.mark.parametrize("dequantize", [False, True])
def test_a_checkpoint_in_fp8(dequantize: bool, tmp_path: Path) -> None:
    """Weights and scales are divided in the same way; weights are dequantised after that."""
    to_fp8(checkpoint(tmp_path, v3_config(vocab_size=96, **WIDE)), quantize, (BLOCK, BLOCK))
    job = {"load": {"dequantize": dequantize}, "k": [0]}
    (divided,), (whole,) = shared(tmp_path, 2, job), alone(tmp_path, job)
    assert divided.pop("bytes") < 0.8 * whole.pop("bytes")
    assert divided == whole


def test_the_page_shows_a_program_that_runs(tmp_path: Path) -> None:
    checkpoint(tmp_path, v3_config(vocab_size=96))
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "checkpoint").symlink_to(tmp_path / "checkpoint")
    (program,) = [each for each in blocks_of(ROOT / "docs" / "parallel.md") if each.mark == "parallel"]
    (tmp_path / "program.py").write_text(program.code)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, "program.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TORCHDYNAMO_DISABLE": "1"},  # "compiled" compiles
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.fullmatch(r"\[\d+(, \d+)*\]\n", done.stdout)


class TestEngines:
    @pytest.mark.parametrize("case", ["several", "left_open", "busy", "invariance", "eagle3"])
    def test_of_one_model_keep_the_ranks_in_step(self, case: str, tmp_path: Path) -> None:
        checkpoint(tmp_path, v3_config(vocab_size=96))
        run_ranks("tests.parallel.engines", 2, tmp_path, case)

    @pytest.mark.parametrize("case", ["step", "warm_up"])
    def test_an_error_of_rank_0_alone_is_raised_there_and_ends_the_others(
        self, case: str, tmp_path: Path
    ) -> None:
        checkpoint(tmp_path, v3_config(vocab_size=96))
        with pytest.raises(AssertionError) as failed:
            run_ranks("tests.parallel.engines", 2, tmp_path, case)
        assert "raised" in str(failed.value)
        assert re.search(r"\brank 0\b.*\brank 1\b", str(failed.value))


@pytest.mark.parametrize("name", ["SIGKILL", pytest.param("SIGSTOP", marks=pytest.mark.long)])
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("phase", [*PHASES, "idle"])
def test_a_rank_that_is_lost_in_any_phase_is_named_and_ends_the_other(
    phase: str, lost: int, name: str, tmp_path: Path
) -> None:
    """Within seconds; a program's patience is seven times the one here."""
    checkpoint(tmp_path, SMALL)
    begin = time.monotonic()
    statuses = exit_statuses("tests.parallel.lost_rank", 2, tmp_path, str(lost), phase, name)
    log = log_of(tmp_path, 1 - lost).read_text()
    assert time.monotonic() - begin < 30 and statuses[lost] == -signal.SIGKILL, log
    is_named = f"rank {lost} of 2 is gone; rank {1 - lost} ends with it\n" in log
    # A rank that leaves may have announced it before it is lost.
    assert (statuses[1 - lost], is_named) in [(1, True), *[(0, False)] * (phase == "ending")], log


class TestMistakes:
    def test_without_a_process_group(self, tmp_path: Path) -> None:
        with pytest.raises(MLAError, match=r"^Parallel: .*process group.*none.*torchrun"):
            Parallel.of_processes()
        with pytest.raises(MLAError, match=r"^parallel: .*Parallel.of_processes\(\)"):
            load_model(tmp_path, parallel=Parallel(0, 2))

    @pytest.mark.parametrize("parallel", [2, True, "2", Parallel(0, 2)])
    def test_a_value_that_is_no_place_of_this_process(self, parallel: Any, tmp_path: Path) -> None:
        with pytest.raises(MLAError, match=r"^parallel: .*Parallel.of_processes\(\).*None"):
            load_model(tmp_path, parallel=parallel)

    @pytest.mark.parametrize("size", [0, -1, True, 2.0, "2"])
    def test_a_value_that_is_no_number_of_processes(self, size: Any, tmp_path: Path) -> None:
        with pytest.raises(MLAError, match=rf"^tensor_parallel_size: .*\b1\b.*got {size!r}"):
            Checkpoint.load(tmp_path, tensor_parallel_size=size)

    def test_requests_are_for_the_engine_of_rank_0(self) -> None:
        with torch.device("meta"):
            model = MLAForCausalLM(v3_config(vocab_size=96), mtp=True)
        with pytest.raises(MLAError, match=r"^model: .*; .*Engine"):
            follow(model)
        ranks = cast("Ranks", SimpleNamespace(rank=1))
        divide(model, Parallel(1, 2, ranks=ranks))
        with pytest.raises(MLAError, match=r"^model: .*rank 1\b.*; .*`mla_compile.follow"):
            Engine(model)

    def test_of_loading_end_it_in_all_processes_without_a_wait(self, tmp_path: Path) -> None:
        whole = checkpoint(tmp_path, v3_config(vocab_size=96))
        save(reference_model(v3_config(vocab_size=97)), tmp_path / "odd")
        for name in ("missing", "cut", "missing in one of 0", "missing in one of 1"):
            shutil.copytree(whole, tmp_path / name)
        size = (whole / "mtp.safetensors").stat().st_size
        os.truncate(tmp_path / "cut" / "mtp.safetensors", size // 2)
        for name in ("missing", "missing in one of 1"):
            (tmp_path / name / "mtp.safetensors").unlink()
        names = ["checkpoint", "missing", "cut", "missing in one", "odd", "checkpoint"]
        (tmp_path / "job.json").write_text(json.dumps({"checkpoints": names}))
        run_ranks("tests.parallel.loads", 2, tmp_path)
        outcomes = [json.loads((tmp_path / f"outcomes.{rank}.json").read_text()) for rank in range(2)]
        missing = r"mtp\.safetensors: .*model\.safetensors\.index\.json.*none"
        expected = {
            1: missing,
            2: r"mtp\.safetensors: .*safetensors file",
            4: r"^parallel\.size: .*\b1\b.*\b2\b.*; .*vocab_size = 97",
        }
        for each in outcomes:
            assert each[0] == each[5] == "", "earlier failures leave nothing behind"
            for place, words in expected.items():
                assert re.search(words, each[place])
        first, second = outcomes
        assert re.search(missing, second[3]) and second[6] == "the disk is gone"
        assert second[7].startswith("device: ")
        for place in (3, 6, 7):
            assert re.search(rf"process 1\b.*{re.escape(second[place])}$", first[place])


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
