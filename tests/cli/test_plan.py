"""`mla-compile plan`."""

from pathlib import Path

import pytest
import torch

from mla_compile.defaults import SHIPPED_MODEL
from tests.cli.conftest import Run
from tests.models import published


@pytest.fixture(params=["KIMI_K2"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / request.param
    path.mkdir()
    (path / "config.json").write_text(getattr(published, request.param))
    return path


def of(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("directory", [name], indirect=True)


@of("DEEPSEEK_V3")
def test_deepseek_v3_fits_eight_h200(run: Run, directory: Path) -> None:
    result = run("plan", directory, "--gpus", 8, "--gpu-memory", "141GB")
    assert (result.exit_code, result.stderr) == (0, "")
    page = (Path(__file__).parents[2] / "docs" / "command.md").read_text(encoding="utf-8")
    assert f"```text\n{result.stdout.replace('DEEPSEEK_V3', 'DeepSeek-V3')}```" in page


@pytest.mark.parametrize(
    ("flags", "remedies"),
    [
        (["--gpu-memory", "1gb"], ["--capture-budget"]),
        (["--gpu-memory", "10GB", "--num-pages", "1000000"], ["--num-pages"]),
        (["--gpu-memory", "10GB", "--num-pages", "1000000", "--max-rows", "1"], ["--num-pages"]),
    ],
)
def test_remedies_of_a_small_model_make_it_fit(run: Run, flags: list[str], remedies: list[str]) -> None:
    result = run("plan", SHIPPED_MODEL, *flags)
    assert result.exit_code == 1 and "11.4 million parameters" in result.stdout
    given = [
        line.partition(":")[0].split() for line in result.stdout.partition("What fits:\n")[2].splitlines()
    ]
    assert [remedy[0] for remedy in given] == remedies
    for remedy in given:
        assert run("plan", SHIPPED_MODEL, *flags, *remedy).exit_code == 0, remedy


@pytest.mark.long
@of("DEEPSEEK_V3")
@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--dequantize",),
        ("--max-rows", 900),
        ("--max-model-len", 163840),
        ("--max-model-len", 163840, "--gpu-memory", "100GB"),
    ],
)
def test_every_remedy_makes_it_fit(run: Run, directory: Path, more: tuple[object, ...]) -> None:
    flags = ["--gpus", 4 if not more else 8, "--gpu-memory", "131.3 GiB", *more]
    result = run("plan", directory, *flags)
    assert result.exit_code == 1
    head, _, rest = result.stdout.partition("It does not fit: ")
    assert head
    remedies = [line.partition(":")[0].split() for line in rest.splitlines()[1:]]
    assert remedies
    for remedy in remedies:
        if remedy[0] == "without":
            changed = [flag for flag in flags if flag != remedy[1]]
        else:
            changed = [*flags, *remedy]
        assert run("plan", directory, *changed).exit_code == 0, remedy


def test_requests_are_no_longer_than_the_model_and_the_directory_has_its_name(
    run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoint)
    lines = run("plan", ".").stdout.splitlines()
    assert lines[0].startswith(f"{checkpoint.name}: ")
    assert "8 rows x 256 tokens" in lines[3]


@pytest.mark.long
def test_a_model_that_no_single_change_makes_fit(run: Run, directory: Path) -> None:
    result = run("plan", directory, "--gpu-memory", "24GB")
    assert result.exit_code == 1
    assert result.stdout.endswith("no single change is enough\n")


@pytest.mark.long
@of("GLM_4_7_FLASH")
def test_flags_change_the_plan(run: Run, directory: Path) -> None:
    def weights(*flags: object) -> float:
        result = run("plan", directory, "--gpu-memory", "141GB", *flags)
        assert result.exit_code == 0, result.output
        (line,) = (line for line in result.stdout.splitlines() if line.startswith("  weights"))
        return float(line.split()[1])

    whole = weights()
    assert whole == 61.2
    assert weights("--num-speculative-tokens", 0) < whole
    assert weights("--quantize", "fp8") == pytest.approx(whole / 2, rel=0.06)
    assert weights("--dtype", "float32") == pytest.approx(2 * whole, rel=0.01)
    assert weights("--gpus", 4, "--expert-parallel") == pytest.approx(weights("--gpus", 4), abs=0.1)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--gpus", 7), "--gpus: expected one of 1, 2, 4, 8, 16, got 7; it does not divide vocab_size"),
        (
            ("--gpu-memory", "0.2PB"),
            "--gpu-memory: expected a number > 0 and a unit of TB, GB, GiB, MB, MiB, B",
        ),
        (("--gpu-memory", "141"), "--gpu-memory: expected a number > 0 and a unit"),
        (("--expert-parallel",), "--expert-parallel: expected more than one GPU, got --gpus 1"),
        (("--gpu-memory", "0GB"), "--gpu-memory: expected a number > 0"),
        (("--gpu-memory", "nan"), "--gpu-memory: expected a number > 0"),
        (("--num-pages", 3), "--num-pages: expected at least 129, for one row of --max-model-len = 2048"),
        (("--quantize", "fp8", "--dequantize"), "--quantize, --dequantize: expected one of the two"),
        (("--gpus", 0), "--gpus"),
        (("--max-rows", 10**9), "--max-rows, --max-model-len, --page-size: expected fewer than 2**31 pages"),
        (("--max-model-len", 10**9), "--max-model-len: expected at most the model's 131072 positions"),
        (
            ("--max-tokens-per-step", 4),
            "--max-tokens-per-step: expected at least --max-rows * (1 + --num-speculative-tokens) = 8, got 4",
        ),
    ],
)
def test_mistakes_are_named(run: Run, directory: Path, flags: tuple[object, ...], expected: str) -> None:
    result = run("plan", directory, *flags)
    assert (result.exit_code, result.stdout) == (2, "")
    assert expected in result.stderr


def test_no_directory_and_no_config_are_named(run: Run, tmp_path: Path) -> None:
    assert f"MODEL_DIR {tmp_path / 'none'}: expected" in run("plan", tmp_path / "none").stderr
    assert "config.json: expected a checkpoint's config, got none" in run("plan", tmp_path).stderr


@of("GLM_4_7_FLASH")
def test_it_plans_for_this_machine_unless_flags_describe_gpus(
    run: Run, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr("mla_compile.cli.plan.usable_memory", lambda device: 700 * 10**9)
    here = run("plan", directory).stdout
    assert "On the CPU of this machine, in float32:" in here and "pages of 16\n" in here
    assert "of 700.0 GB" in here and "graphs" not in here
    there = run("plan", directory, "--gpus", 1).stdout
    assert "On one GPU, in bfloat16:" in there and "pages of 64\n" in there and "of 141.0 GB" in there
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    properties = type("Properties", (), {"total_memory": 24 * 10**9})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert "of 24.0 GB" in run("plan", directory).stdout
