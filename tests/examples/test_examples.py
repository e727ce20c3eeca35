"""Every example runs, in small. `test_docs.py` runs the blocks of README.md and docs/."""

import importlib
import logging
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example as `python examples/NAME.py` sees it: with its own folder on the path.

    Its log settings do not last into later tests.
    """
    torch.compiler.reset()
    monkeypatch.syspath_prepend(EXAMPLES)
    passes = logging.getLogger("mla_compile.passes")
    level = passes.level
    yield importlib.import_module(request.param)
    passes.setLevel(level)


def runs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("example", [name], indirect=True, ids=[""])


def lines_of(captured: pytest.CaptureFixture[str]) -> list[str]:
    return captured.readouterr().out.splitlines()


@pytest.mark.usefixtures("lowering")
@runs("own_module")
def test_own_module_equals_eager_on_every_kind_of_batch(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    example.main(num_layers=1)  # compares each batch with eager itself
    *lines, last = lines_of(capsys)
    assert len(lines) == 10 and last == "10 batches, 3 graphs"


@pytest.mark.usefixtures("lowering")
@runs("own_module_fp8_latents")
def test_a_users_own_module_with_fp8_latents(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    example.main()  # compares results itself
    *lines, last = lines_of(capsys)
    assert len(lines) == 11
    assert last == "bytes of a cached token: 1056 in float32, 280 with FP8 latents"


@pytest.mark.long
@pytest.mark.usefixtures("lowering")
@runs("own_module_sparse")
def test_a_users_own_module_with_an_indexer(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    example.main(num_layers=1)  # compares each batch with eager itself, and short rows with dense attention
    *lines, last = lines_of(capsys)
    assert len(lines) == 10 and last == "10 batches, 3 graphs"
    changes = {int(line.split("up to")[1].split()[0]): float(line.split()[-1]) for line in lines}
    assert all((change > 1e-3) == (keys > example.TOPK) for keys, change in changes.items())


@pytest.mark.long
@runs("own_module_drafter")
def test_a_users_own_module_gives_drafters_the_outputs_of_its_layers(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    example.main(compile=False)  # compares the tokens itself
    found = [re.search(r"(\d+) steps, +(\d+) of them mixed", line) for line in lines_of(capsys)]
    (plain, fitted, drawn), mixed = zip(*((int(each[1]), int(each[2])) for each in found), strict=True)
    assert fitted < 0.8 * plain and fitted < drawn and all(mixed)


@pytest.mark.long
@pytest.mark.usefixtures("lowering")
@runs("add_a_pass")
def test_an_added_pass_changes_decode_segments_and_leaves_prefill_alone(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    example.main(num_layers=1)
    lines = lines_of(capsys)
    segments = [line.split()[1] for line in lines if line.startswith("clamp_decode_queries")]
    assert segments == ["0", "1", "1"]
    prompt, decode, both = (float(line.split()[-1]) for line in lines if "changes" in line)
    assert prompt < 1e-4 < decode and both > 1e-4


@pytest.mark.long
@runs("add_a_drafter")
def test_a_drafter_of_ones_own_takes_fewer_steps_to_the_same_tokens(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    example.main(max_new_tokens=16, compile=False)  # compares the tokens itself
    plain, drafted = (int(line.split()[2]) for line in lines_of(capsys))
    assert plain == 15 and drafted < plain


@runs("split_pass_step_by_step")
def test_the_split_pass_is_shown_step_by_step(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    example.main()
    captured, split = capsys.readouterr().out.split("\n\n    ")[1:3]
    assert "= mla_attention(" in captured and "mla_decode" not in captured
    assert "[12, 2, 8]   mla_decode_default " in split and "mla_attention" not in split.split("\nThe same")[0]


@pytest.mark.long
@runs("mtp_generation")
def test_generation_with_and_without_drafts_prints_the_same_text(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    example.main(max_new_tokens=8, compile=False)  # compares the tokens itself
    out = capsys.readouterr().out
    assert all(prompt in out for prompt in example.PROMPTS)
    assert "steps instead of 7" in out


@runs("requests_over_time")
def test_requests_over_time_are_served_together(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    example.main(max_tokens=8, compile=False)
    out = capsys.readouterr().out
    assert all(f"{prompt} ..." in out for prompt in example.PROMPTS)
    assert "of them mixed" in out


@pytest.mark.long
@pytest.mark.usefixtures("lowering")
@runs("absorb_plain_mla")
def test_plain_mla_gives_the_same_tokens_absorbed(
    example: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other side of its comparison is torch's.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    example.main(num_layers=1, max_len=64, new_tokens=4)
    *steps, ratio = [line for line in lines_of(capsys) if "ms a step" in line or "times as fast" in line]
    assert len(steps) == 3 and all(line.endswith("tokens equal: True") for line in steps)
    assert ratio.startswith('backend="mla" is ')


@pytest.mark.long
@runs("transformers_accelerate")
def test_an_accelerated_model_generates_the_tokens_of_stock(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    example.main(max_new_tokens=12, compile=False)
    results = [line for line in lines_of(capsys) if " drafts " in line]
    assert [line.split()[0] for line in results] == ["0", "3"]
    assert all("same tokens" in line for line in results)


@pytest.mark.long
@pytest.mark.usefixtures("lowering")
@runs("transformers_compile_config")
def test_a_compile_config_alone_keeps_the_tokens(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    example.main(cache_len=64, max_new_tokens=8, backends=("mla",))
    assert lines_of(capsys)[0].endswith("same tokens")
