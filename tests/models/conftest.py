"""A small checkpoint on disk."""

import shutil
from pathlib import Path

import pytest

from tests.models.small import reference_model, reference_mtp_layer, save, v3_config


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A sharded DeepSeek-V3 checkpoint with an MTP layer."""
    model = reference_model(v3_config())
    return save(model, tmp_path_factory.mktemp("checkpoint"), reference_mtp_layer(model))


@pytest.fixture
def copy(checkpoint, tmp_path) -> Path:
    """The same, to be spoiled."""
    return shutil.copytree(checkpoint, tmp_path / "copy")
