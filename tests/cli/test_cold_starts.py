"""In 16-bit types no token depends on how soon a step is compiled."""

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

COMMAND = "from mla_compile.cli import main; main()"
NUM_STARTS = int(os.environ.get("COLD_STARTS", "2"))


def spin() -> None:
    while True:
        pass


@pytest.fixture
def busy_machine() -> Iterator[None]:
    processes = [multiprocessing.get_context("spawn").Process(target=spin, daemon=True) for _ in range(2)]
    for process in processes:
        process.start()
    yield
    for process in processes:
        process.kill()


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.usefixtures("busy_machine")
def test_cold_starts_in_bfloat16_on_a_busy_machine_give_equal_tokens(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Processes with empty compile caches; requests outnumber rows, so that prompts come beside rows that decode."""
    asked = [{"prompt": "to be " * (1 + i % 4), "temperature": 0.8 * (i % 2), "seed": i} for i in range(12)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(each) + "\n" for each in asked))
    texts = []
    for i in range(NUM_STARTS):
        folder = tmp_path / str(i)
        folder.mkdir()
        flags = ["--model", checkpoint, "--dtype", "bfloat16", "--max-new-tokens", "48"]
        files = ["--input", tmp_path / "in.jsonl", "--output", folder / "out.jsonl"]
        subprocess.run(
            [sys.executable, "-c", COMMAND, "generate", *flags, *files],
            env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")},
            check=True,
        )
        texts.append((folder / "out.jsonl").read_text())
    assert len(texts[0].splitlines()) == len(asked)
    assert all(text == texts[0] for text in texts)
