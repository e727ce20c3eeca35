"""`mla-compile tune`: what is measured and which table is written, with times that are made up."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mla_compile.cli import tune as tuning
from mla_compile.cli.tune import MARGIN, Product, Times, lines_of, products_of, report
from mla_compile.ops import tuned
from mla_compile.ops.library import tables
from mla_compile.ops.tuned import read

LINEAR = Product("fused_linear", 1, 64, 96)
EXACT = Product("batch_invariant_matmul", 4, 16, 32)


def us(**rows: float) -> dict[str, float]:
    return rows


def said_of(product: Product, measured: Times) -> list[tuple[object, str]]:
    """Of each line the tokens, and who serves."""
    return [(line.takes.get("tokens"), line.row) for line in lines_of(product, measured)]


def test_a_line_is_written_where_another_row_is_faster() -> None:
    measured = {1: us(triton=5, reference=7), 2: us(triton=9, reference=8), 8: us(reference=8)}
    assert said_of(LINEAR, measured) == [(range(2, 3), "reference")]
    (line,) = lines_of(LINEAR, measured)
    assert line.takes == {"k": range(64, 65), "columns": range(96, 97), "tokens": range(2, 3)}
    assert (line.op, line.batch_invariant) == ("fused_linear", False)


def test_numbers_between_are_served_as_the_next_greater_one_and_beyond_as_without() -> None:
    faster, slower = us(triton=9, reference=8), us(triton=8, reference=9)
    measured = dict.fromkeys((2, 4, 8), faster) | {16: slower, 64: faster}
    assert said_of(LINEAR, measured) == [(range(2, 9), "reference"), (range(17, 65), "reference")]
    assert said_of(LINEAR, {16: slower, 4: faster, 2: faster}) == [(range(2, 5), "reference")], "in any order"


def test_what_may_be_noise_changes_nothing() -> None:
    assert said_of(LINEAR, {1: us(triton=8 * MARGIN - 0.01, reference=8)}) == []
    assert said_of(LINEAR, {1: us(triton=8 * MARGIN + 0.01, reference=8)}) == [(range(1, 2), "reference")]


def test_a_batch_invariant_product_has_one_line_for_all_numbers_of_tokens() -> None:
    measured = {1: us(cublas=4, triton=3), 64: us(cublas=9, triton=3), 128: us(cublas=4, triton=5)}
    (line,) = lines_of(EXACT, measured)
    assert (line.batch_invariant, line.row) == (True, "triton")
    assert line.takes == {"groups": range(4, 5), "k": range(16, 17), "n": range(32, 33)}
    assert said_of(EXACT, measured | {256: us(cublas=2, triton=9)}) == [], "slower over all"
    assert said_of(EXACT, measured | {256: us(cublas=2)}) == [], "it does not take all"


def test_the_report_marks_who_serves() -> None:
    measured = {1: us(triton=5, reference=7), 2: us(triton=9, reference=8)}
    assert report(LINEAR, measured, lines_of(LINEAR, measured)).splitlines() == [
        "fused_linear k 64, columns 96",
        "      1 tokens  triton* 5.0  reference 7.0",
        "      2 tokens  triton 9.0  reference* 8.0",
    ]


def test_the_products_of_a_checkpoint_by_its_config_alone(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    config = json.loads((checkpoint / "config.json").read_text())
    hidden, heads, rank = (config[f"{x}"] for x in ("hidden_size", "num_attention_heads", "kv_lora_rank"))
    found = list(products_of(tmp_path))
    exact = {(p.groups, p.k, p.n) for p in found if p.batch_invariant}
    plain = {(p.k, p.n) for p in found if not p.batch_invariant}
    down = config["q_lora_rank"] + rank + config["qk_rope_head_dim"]
    assert (hidden, down) in plain and (1, hidden, down) not in exact, "two weights side by side"
    assert (hidden, 2 * config["intermediate_size"]) in plain, "gate and up"
    for k, n in (
        (hidden, config["vocab_size"]),
        (heads * config["v_head_dim"], hidden),
        (config["intermediate_size"], hidden),
        (2 * hidden, hidden),  # of the MTP layer
    ):
        assert (k, n) in plain and (1, k, n) in exact
    assert {(heads, config["qk_nope_head_dim"], rank), (heads, rank, config["v_head_dim"])} <= exact
    assert (rank, heads * (config["qk_nope_head_dim"] + config["v_head_dim"])) not in plain


@pytest.mark.parametrize("product", [LINEAR, EXACT, Product("batch_invariant_matmul", 4, 16, 32, False)])
def test_what_is_timed_is_the_product(product: Product) -> None:
    w = product.draw(torch.device("cpu"))
    assert w.shape == (product.groups, product.k, product.n)
    assert w.stride(1 if product.by_columns else 2) == 1
    x = torch.randn(3, product.groups, product.k).bfloat16()
    expected = torch.einsum("tgk,gkn->tgn", x.double(), w.double())
    for row in tables[product.op]:
        if row.device_types is None:
            tuning._check(row.name, row.load()(*product.arguments(x, w)), expected)
    with pytest.raises(ValueError, match=r"a row: expected an error of at most 0.02 .*; report it as a bug"):
        tuning._check("a row", torch.zeros_like(expected), expected)


@pytest.mark.parametrize(("cache", "weights"), [(0, 2), (2 * 96 * 64 * 4, 9), (2**40, 101)])
def test_a_time_is_that_of_one_product_and_weights_are_too_many_for_the_cache(
    monkeypatch: pytest.MonkeyPatch, cache: int, weights: int
) -> None:
    pytest.importorskip("triton")

    def milliseconds(run: Callable[[], list[torch.Tensor]], return_mode: str) -> float:
        return 0.005 * len(run())

    monkeypatch.setattr("triton.testing.do_bench_cudagraph", milliseconds)
    properties = SimpleNamespace(L2_cache_size=cache)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    drawn: list[torch.Tensor] = []
    draw = Product.draw
    monkeypatch.setattr(Product, "draw", lambda *args: drawn.append(draw(*args)) or drawn[-1])
    found = tuning.times(LINEAR, [1, 8], torch.device("cpu"))
    assert found == {n: {"reference": pytest.approx(5)} for n in (1, 8)}
    assert len(drawn) == weights


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A working directory, on a machine with "A GPU" whose times are made up: `reference` is faster at two tokens."""

    def times(product: Product, tokens: list[int], device: torch.device) -> Times:
        if product.batch_invariant:
            return {n: us(cublas=5, triton=6) for n in tokens}
        return {n: us(triton=5, reference=6 - n) for n in tokens}

    monkeypatch.setattr(tuning, "gpu_name", lambda device: "A GPU")
    monkeypatch.setattr(tuning, "describe_device", lambda device: ("cuda", (9, 0)))
    monkeypatch.setattr(tuning, "times", times)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_tune_writes_a_table_that_serves(run, gpu, checkpoint) -> None:
    pytest.importorskip("triton")
    result = run("tune", checkpoint, checkpoint, "--tokens", "2,1,2")
    assert (result.exit_code, result.stderr) == (0, "")
    first, *_, last = result.stdout.splitlines()
    assert first.startswith(f"A GPU, torch {torch.__version__}, triton ") and "* serves" in first
    table = read(gpu / "a_gpu.json")
    plain = {(p.k, p.n) for p in products_of(checkpoint) if not p.batch_invariant}
    assert last == f"a_gpu.json: {len(plain)} lines; {tuned.VARIABLE}=a_gpu.json has models served by it"
    assert [line.row for line in table.lines] == ["reference"] * len(plain)
    for k, n in plain:
        facts = {"k": k, "columns": n}
        assert table.row_of("fused_linear", False, facts | {"tokens": 2}) == "reference"
        assert table.row_of("fused_linear", False, facts | {"tokens": 1}) is None


def test_the_output_goes_where_it_is_told_and_a_mistake_costs_no_time(run, gpu, checkpoint) -> None:
    pytest.importorskip("triton")
    assert run("tune", checkpoint, "--tokens", "1", "--output", "mine.json").exit_code == 0
    assert read(gpu / "mine.json").lines == ()
    for output in (gpu, gpu / "none" / "mine.json"):
        result = run("tune", checkpoint, "--output", output)
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"--output: expected a file in a directory that is there, got {output}" in result.stderr


@pytest.mark.parametrize("tokens", ["", "0", "1,,2", "1;2", "-1", "x", "²", "100000", "1, 2"])
def test_numbers_of_tokens_are_checked(run, tokens) -> None:
    result = run("tune", "--tokens", tokens)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"--tokens: expected numbers from 1 to 99999, as 1,2,4, got {tokens!r}" in result.stderr


def test_a_directory_that_is_not_there_is_named(run, tmp_path) -> None:
    result = run("tune", tmp_path / "none")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "none: expected a checkpoint's directory, got no such directory" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="it has a GPU")
def test_a_machine_without_a_gpu_cannot_tune(run) -> None:
    result = run("tune")
    expected = "mla-compile: tune: expected a machine with an NVIDIA GPU, got none; run it where models run\n"
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", expected)


def test_a_gpu_without_a_choice_is_told_so(run, gpu, monkeypatch) -> None:
    monkeypatch.setattr(tuning, "describe_device", lambda device: ("cuda", (7, 5)))
    result = run("tune")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "got A GPU, where that for few tokens runs on SM 80 and newer, got SM 75" in result.stderr


def test_env_names_the_table_and_says_what_is_wrong_with_it(run, monkeypatch, tmp_path) -> None:
    def shown() -> str:
        lines = run("env").stdout.replace("\n" + " " * 15, " ").splitlines()
        return next(line for line in lines if line.startswith("tuned table"))[15:]

    monkeypatch.delenv(tuned.VARIABLE, raising=False)
    if not torch.cuda.is_available():
        assert shown() == "none: rules choose who serves"
    monkeypatch.setattr(tuned, "gpu_name", lambda device: "NVIDIA H200")
    tuned.table_of.cache_clear()
    file = Path(tuned.__file__).with_name("nvidia_h200.json")
    assert shown() == f"{file} (measured by {read(file).versions})"
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path / "none.json"))
    tuned.table_of.cache_clear()
    assert shown().startswith(f"unusable: {tmp_path / 'none.json'}: expected a table that ")
    tuned.table_of.cache_clear()
