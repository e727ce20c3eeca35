"""What benchmarks do besides measuring."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import transformers_generate
from benchmarks.reporting import add_row


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
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, report = tmp_path / "report.json", {"torch": "2.13", "rows": []}
    for k in range(3):
        add_row(report, {"k": k}, file)
        assert json.loads(file.read_text()) == {"torch": "2.13", "rows": [{"k": i} for i in range(k + 1)]}
        assert json.loads(capsys.readouterr().out) == {"k": k}
    add_row(report, {"k": 3}, None)
    assert len(json.loads(file.read_text())["rows"]) == 3, "without a file nothing is written"
