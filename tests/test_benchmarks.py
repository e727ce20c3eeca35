"""What benchmarks do besides measuring."""

import sys

import pytest

from benchmarks import transformers_generate


def test_an_unknown_variant_is_refused_before_the_model_is_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transformers_generate, "random_model", lambda *_, **__: pytest.fail("built"))
    monkeypatch.setattr(sys, "argv", ["transformers_generate", "--variants", "ours_k1@8,32", "typo"])
    with pytest.raises(SystemExit) as ended:
        transformers_generate.main()
    assert ended.value.code == 2
    assert "--variants: invalid choice: 'typo' (choose from stock_dynamic, " in capsys.readouterr().err
