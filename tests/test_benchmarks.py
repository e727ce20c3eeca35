"""The code of the benchmarks around the measurements."""

import ctypes
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks import (
    age,
    loading,
    peers,
    random_checkpoint,
    reporting,
    serving,
    tables,
    tensor_parallel,
    transformers_generate,
)
from benchmarks.processes import ProcessFailed, run
from benchmarks.random_weights import Weights, random_model, settings_of
from benchmarks.reporting import add_row
from mla_compile import Parallel, load_model, load_tokenizer
from mla_compile.models.safetensor_files import SafetensorFiles
from mla_compile.models.sharding import division
from mla_compile.ops.linear.fp8 import DTYPE, dequantize
from tests.examples.pages import ROOT


def test_the_age_of_a_result_counts_commits_of_the_code_that_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(age, "ROOT", tmp_path)
    monkeypatch.setattr(age, "RESULTS", tmp_path / "benchmarks/results")
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "a")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "a@example.org")

    def commit(*names: str) -> str:
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            with (tmp_path / name).open("a") as file:
                file.write("x")
        age.git("add", "-A")
        age.git("commit", "-qm", "x")
        return age.git("rev-parse", "--short", "HEAD")

    def measured(name: str, *commits: str, others: str = "") -> None:
        path = age.RESULTS / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        of_others = {"system": "vllm"}, {"variant": "stock_dynamic"}, {"stock": "static"}
        rows = [{"commit": one} for one in commits] + [
            row | {"commit": others} for row in of_others if others
        ]
        path.write_text(json.dumps({"rows": rows}))

    age.git("init", "-q")
    first = commit("mla_compile/engine/a.py")
    second = commit("mla_compile/ops/sampling/a.py")
    third = commit("mla_compile/engine/a.py", "docs/a.md")
    measured("sampling", first)
    measured("server", third, first, second)
    measured("decode", third, others=first)
    commit("docs/a.md")
    assert [(name, since, of) for since, name, of, _ in age.ages()] == [
        ("server", 2, first),
        ("sampling", 1, first),
        ("decode", 0, third),
    ]
    age.main()
    assert capsys.readouterr().out.splitlines()[1].startswith("            2  server  ")


def test_every_row_of_the_results_has_its_commit() -> None:
    for path in age.RESULTS.glob("*.json"):
        assert all(row["commit"] for row in json.loads(path.read_text())["rows"]), path


def test_every_named_result_of_the_ages_and_its_code_exist() -> None:
    for name, code in age.CODE.items():
        assert (age.RESULTS / f"{name}.json").exists() and all((age.ROOT / path).exists() for path in code)


def test_the_scheduler_runs_alone() -> None:
    assert 0 < serving.scheduler_us(rows=2, steps=3) < 1e6


def test_an_unknown_variant_is_refused_before_the_model_is_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transformers_generate, "random_model", lambda *_, **__: pytest.fail("built"))
    monkeypatch.setattr(sys, "argv", ["transformers_generate", "--variants", "ours_k1@8,32", "typo"])
    with pytest.raises(SystemExit) as ended:
        transformers_generate.main()
    assert ended.value.code == 2
    assert "--variants: invalid choice: 'typo' (choose from stock_dynamic, " in capsys.readouterr().err


def test_a_row_is_printed_and_is_in_the_file_before_the_next_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, report = tmp_path / "report.json", {"torch": "2.13", "rows": [{"k": -1, "commit": "a"}]}
    monkeypatch.setattr(reporting, "commit", lambda: "b")
    for k in range(3):
        add_row(report, {"k": k}, file)
        known, *rows = json.loads(file.read_text())["rows"]
        assert known == {"k": -1, "commit": "a"} and rows == [{"k": i, "commit": "b"} for i in range(k + 1)]
        assert json.loads(capsys.readouterr().out) == {"k": k}
    add_row(report, {"k": 3}, None)
    assert len(json.loads(file.read_text())["rows"]) == 4, "without a file nothing is written"


def test_a_random_checkpoint_loads_as_any_other(tmp_path: Path) -> None:
    names = ("hidden_size", "intermediate_size", "moe_intermediate_size", "kv_lora_rank", "q_lora_rank")
    settings = dict.fromkeys(names, 32) | {"vocab_size": 50, "n_routed_experts": 8, "num_attention_heads": 2}
    random_checkpoint.write(tmp_path, 2, settings | {"num_key_value_heads": 2})
    model = load_model(tmp_path)
    assert len(model.layers) == 2 and model.has_mtp and load_tokenizer(tmp_path) is not None
    assert 0.9 < model.layers[1].mlp.shared_experts.up_proj.weight.std() * 32**0.5 < 1.1


@pytest.mark.long
def test_loading_keeps_no_copy_on_the_host_and_one_would_be_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"hidden_size": 1024, "vocab_size": 20_000, "n_routed_experts": 16}
    random_checkpoint.write(tmp_path, 1, settings)
    load_model(tmp_path)  # imports do not count
    row = loading.measure(tmp_path, "cpu", None)
    allowed = 1.2 * row["largest_tensor_mb"] + 32
    assert row["same_values"] and row["anonymous_mb"] < allowed < 1000 * row["gb_asked_for"] / 2
    ctypes.CDLL(None).malloc_trim(0)  # or the copies would take memory that earlier tests have freed
    kept, read = [], SafetensorFiles.read
    monkeypatch.setattr(SafetensorFiles, "read", lambda *args: kept.append(read(*args).clone()) or kept[-1])
    assert loading.measure(tmp_path, "cpu", None)["anonymous_mb"] > allowed


def test_random_weights_are_one_model_in_bfloat16_in_fp8_and_divided() -> None:
    settings = settings_of("v3", None, tiny=True)
    kinds: tuple[Weights, ...] = ("bf16", "fp8")
    plain, in_fp8 = (random_model(settings, kind, mtp=True, device="cpu") for kind in kinds)
    for name, parameter in plain.named_parameters():
        other = in_fp8.get_parameter(name).data
        if other.dtype == DTYPE:
            other = dequantize(other, in_fp8.get_parameter(f"{name}_scale_inv").data).to(torch.bfloat16)
        assert torch.equal(parameter, other), name
    for kind, whole in zip(kinds, (plain, in_fp8), strict=True):
        for rank in range(2):
            part = random_model(settings, kind, mtp=True, device="cpu", parallel=Parallel(rank, 2))
            for name, parameter in whole.named_parameters():
                how = division(name, expert_parallel=False)
                expected = parameter.data if how is None else how.part(parameter.data, rank, 2)
                assert torch.equal(part.get_parameter(name).float(), expected.float()), name


@pytest.mark.long
def test_a_failed_process_ends_the_others_and_its_log_is_in_the_error() -> None:
    began = time.perf_counter()
    commands = [[sys.executable, "-c", code] for code in ("import time; time.sleep(60)", "exit('broken')")]
    with pytest.raises(ProcessFailed, match=r"(?s)exit code 1.*broken"):
        run(commands, lambda row: pytest.fail("a row"))
    assert time.perf_counter() - began < 30


def command(monkeypatch: pytest.MonkeyPatch, module: ModuleType, options: str) -> None:
    """Runs a benchmark as its command does, with its measuring processes, but in this one: imports take seconds."""
    with monkeypatch.context() as patched, patch.dict(os.environ):
        patched.chdir(ROOT)
        patched.setattr(sys, "argv", [module.__name__, *options.split()])
        module.main()


@pytest.mark.long
def test_two_processes_that_share_a_model_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uncompiled, which is enough for the rows and their tables."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    file, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    options = "--tiny --parts glm v2 --weights fp8 --batches 1 2 --drafts 0 --layers 2 --judged-layers 2"
    options += f" --output {file} --plot {picture}"
    command(monkeypatch, tensor_parallel, options)
    report = json.loads(file.read_text())
    engines = [row for row in report["rows"] if row["what"] == "engine"]
    found = [(row["shape"], row["gpus"], row["same_latents"]) for row in engines]
    assert sorted(found) == [  # engines of one shape end at the same time
        ("glm", 1, True),
        ("glm", 2, True),
        ("v2", 2, True),
    ]
    assert picture.stat().st_size > 0
    monkeypatch.setattr(tables, "result", lambda name: report)
    assert tables.tensor_parallel_steps().count("DeepSeek-V2's, 2 layers, FP8") == 2
    assert tables.tensor_parallel_memory().count("\n| ") == 1 + 1 + len(engines)
    assert "In 2 of 2 engines on two GPUs both" in tables.tensor_parallel_tokens()


@pytest.mark.long
def test_steps_and_prompts_are_measured_with_checks_of_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # uncompiled is enough for the rows
    file = tmp_path / "peers.json"
    for options in ("--parts steps --drafts 1", "--parts prompts"):
        options += f" --systems ours --weights fp8 --tiny --layers 2 --rows 1 2 --output {file}"
        command(monkeypatch, peers, options)
    *of_steps, alone, both = json.loads(file.read_text())["rows"]
    assert len(of_steps) == 2 and [alone["tokens_per_step"], both["tokens_per_step"]] == [40, 80]
    for row in of_steps:
        assert 0 < row["floor_ms"] < row["ms_per_step"] and 1 <= row["tokens_per_step"] <= 2
        assert 2 <= row["experts"] <= min(4 * row["rows"], 8), "2 of 8 experts for a token, 2 tokens a row"
    assert alone["experts"] == 8
    vllm = [row | {"system": "vllm", "ms_per_step": 3 * row["ms_per_step"]} for row in of_steps]
    monkeypatch.setattr(tables, "result", lambda name: {"rows": [*of_steps, *vllm, both]})
    assert tables.peers().count("| 3.00 |") == 2 and "| FP8 | 0 | 2 | cpu | - | - |" in tables.peers()


def peer_rows() -> list[dict[str, Any]]:
    """Made-up rows of `benchmarks.peers`, each part's for two cases; the last one has no rival."""
    machine = {"device": "H100", "torch": "2.11", "version": "1", "commit": "a"}
    checks = {"tokens_per_step": 1, "experts": 9.5}
    steps = {"floor_ms": 1.0, **checks}
    seconds = dict.fromkeys(("p50_ms", "p99_ms", "first_token_p50_ms", "first_token_p99_ms"), 7.5)
    return [
        {"part": part, "system": system, "weights": weights, "drafts": drafts, "rows": rows} | found | machine
        for part, system, weights, drafts, rows, found in (
            ("servers", "vllm", "fp8", 0, 8, {"tokens_per_s": 100, **seconds}),
            ("servers", "ours", "fp8", 0, 8, {"tokens_per_s": 80, **seconds}),
            ("steps", "ours", "bf16", 3, 1, {"ms_per_step": 2.0, **steps}),
            ("steps", "vllm", "bf16", 3, 1, {"ms_per_step": 5.0, **steps}),
            ("prompts", "vllm", "bf16", 0, 1, {"ms": 9.0, "first_ms": 10.0, **checks}),
            ("prompts", "ours", "bf16", 0, 1, {"ms": 10.0, "first_ms": 10.0, **checks}),
            ("prompts", "ours", "bf16", 0, 8, {"ms": 11.0, "first_ms": 10.0, **checks}),
        )
    ]


def test_ratios_beside_vllm_mark_the_cases_that_it_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "result", lambda name: {"rows": peer_rows()})
    text = tables.peers_ratios()
    assert "is faster in 2 of 4 cases" in " ".join(text.split())
    assert text[text.index("\n|") :] == (
        "\n| rows | 1 | 8 |\n| --- | --- | --- |\n"
        "| a step, bfloat16, 3 drafts, H100 | 2.50 | - |\n"
        "| first tokens of prompts, bfloat16, H100 | **0.90** | - |\n"
        "| a server: tokens/s, 99th percentile between tokens, FP8, H100 | - | **0.80**, 1.00 |\n"
    )
    whole = tables.peers()
    assert "| bfloat16 | 0 | 8 | H100 | - | - | - | - | - | 11.0 | 10.0 | 1 | 9.5 |" in whole
    assert "| FP8 | 0 | 8 | H100 | 0.80 | 100 | 7.5 | 7.5 | 7.5 | 7.5 | 80 |" in whole


def test_rows_of_different_cards_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row | {"device": f"NVIDIA H{200 if row['system'] == 'ours' else 100} SXM"} for row in peer_rows()]
    monkeypatch.setattr(tables, "result", lambda name: {"rows": rows})
    assert "in 0 of 0 cases" in " ".join(tables.peers_ratios().split())
    assert "| FP8 | 0 | 8 | H100 | - | 100 |" in tables.peers()


@pytest.mark.long
def test_files_of_cards_are_merged_into_one_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, report = peer_rows(), {"layers": 47}
    output, cards = tmp_path / "peers.json", [tmp_path / "card0.json", tmp_path / "card1.json"]
    stale = [rows[0] | {"tokens_per_s": 1}]
    for file, own in zip([output, *cards], [stale, rows[:2], rows[2:]], strict=True):
        file.write_text(json.dumps(report | {"rows": own}))
    options = f"--merge {output} {cards[0]} {cards[1]} --plot {tmp_path / 'peers.svg'}"
    command(monkeypatch, peers, options)
    assert json.loads(output.read_text()) == report | {"rows": rows}
    assert "<svg" in (tmp_path / "peers.svg").read_text()


def test_the_faster_runner_is_kept_with_the_figure_of_the_other() -> None:
    report: dict[str, Any] = {"rows": []}
    row = {"part": "steps", "system": "vllm", "weights": "fp8", "drafts": 3, "rows": 8, "device": "cpu"}
    slow, fast = row | {"runner": "0", "ms_per_step": 2.0}, row | {"runner": "1", "ms_per_step": 1.0}
    for first, second in ((slow, fast), (fast, slow)):
        peers.keep(report, None, dict(second), peers.keep(report, None, dict(first), None))
        assert report["rows"] == [fast | {"other_runner": {"ms_per_step": 2.0, "runner": "0"}}]


def test_a_vllm_that_is_not_installed_is_an_error_that_names_the_argument(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["peers", "--systems", "ours", "vllm"])
    with pytest.raises(SystemExit):
        peers.main()
    assert "--systems: expected an installed vllm, got none; install it" in capsys.readouterr().err
