"""The MTP layer's files are looked for on this machine, inside the checkpoint's directory."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mla_compile import MLAError
from mla_compile.integrations.transformers.mtp import mtp_layer
from tests.integrations.families import stock_model
from tests.integrations.mtp import random_mtp, save_checkpoint

INDEX = "model.safetensors.index.json"


@pytest.fixture(params=["deepseek_v3", "longcat_flash"])
def loaded(request, tmp_path):
    """A model, and the checkpoint that it was loaded from."""
    model = stock_model(request.param)
    path = save_checkpoint(model, random_mtp(model), tmp_path / "checkpoint")
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), path


def test_a_shard_outside_the_directory_is_refused(loaded):
    model, path = loaded
    assert mtp_layer(model, None) is not None
    shutil.copy(path / "mtp.safetensors", path.parent / "outside.safetensors")
    table = json.loads((path / INDEX).read_text())
    names = table["weight_map"]
    names |= {name: "../outside.safetensors" for name, file in names.items() if file == "mtp.safetensors"}
    (path / INDEX).write_text(json.dumps(table))
    with pytest.raises(
        MLAError, match=r"expected plain names of files inside it, got '\.\./outside.safetensors'"
    ):
        mtp_layer(model, None)


def test_a_checkpoint_that_is_gone_is_no_name_on_a_hub(loaded, monkeypatch):
    model, path = loaded
    asked: list[object] = []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.getaddrinfo", lambda *names, **_: asked.append(names))
    shutil.rmtree(path)
    for name in (str(path), "some/repository", "no name"):
        model.config.name_or_path = name
        with pytest.raises(MLAError, match=r"mtp: expected a model whose checkpoint, .* on this machine"):
            mtp_layer(model, None)
        assert model.config.name_or_path == name
    assert asked == []


@pytest.mark.parametrize("change", [lambda t: t[:1], lambda t: t.to(torch.int8)], ids=["shape", "dtype"])
def test_a_tensor_that_does_not_fit_is_refused(tmp_path, change):
    model = stock_model("longcat_flash")
    path = save_checkpoint(model, random_mtp(model), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tensors = load_file(path / "mtp.safetensors")
    name = "model.mtp.norm.weight"
    tensors[name] = change(tensors[name])  # a norm of one weight would be broadcast
    save_file(tensors, path / "mtp.safetensors")
    with pytest.raises(MLAError, match=rf"{name}: expected float \[\d+\], got "):
        mtp_layer(model, None)
