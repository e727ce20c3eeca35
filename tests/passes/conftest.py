"""What every test of a pass starts from."""

import pytest
import torch


@pytest.fixture(autouse=True)
def nothing_is_compiled_yet() -> None:
    torch.compiler.reset()  # recompiles are counted per function
