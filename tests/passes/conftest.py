"""What every test of a pass starts from."""

import logging
from collections.abc import Callable

import pytest
import torch


@pytest.fixture(autouse=True)
def nothing_is_compiled_yet() -> None:
    torch.compiler.reset()  # recompiles are counted per function


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """Reads what the passes, or one of them, logged since the last reading."""
    caplog.set_level(logging.INFO, logger="mla_compile.passes")

    def read(name: str = "") -> list[str]:
        logger = f"mla_compile.passes.{name}"
        messages = [record.getMessage() for record in caplog.records if record.name.startswith(logger)]
        caplog.clear()
        return messages

    return read
