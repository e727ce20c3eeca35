"""All mistakes of a checkpoint are in one named error."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mla_compile import MLAError
from mla_compile.models import MLAForCausalLM, load_model
from tests.models.small import add_shard

MTP = "model.layers.3."  # the trunk has layers 0 to 2


def edit_config(path: Path, **changes) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_mtp_shard(path: Path, change) -> None:
    """Apply `change` to the tensors of the MTP layer's file; the index keeps naming them all."""
    tensors = load_file(path / "mtp.safetensors")
    change(tensors)
    save_file(tensors, path / "mtp.safetensors")


def test_missing_extra_and_misshapen_tensors_are_listed_in_one_error(copy):
    def spoil(tensors):
        del tensors[MTP + "eh_proj.weight"], tensors[MTP + "mlp.experts.3.up_proj.weight"]
        tensors[MTP + "mlp.experts.8.up_proj.weight"] = torch.zeros(2)
        tensors[MTP + "enorm.weight"] = torch.zeros(7)
        tensors[MTP + "shared_head.head.weight"] = torch.zeros(96, 48)

    edit_mtp_shard(copy, spoil)
    with pytest.raises(MLAError) as caught:
        load_model(copy)
    message = str(caught.value)
    assert "\n" not in message
    assert f"2 missing: {MTP}eh_proj.weight [48, 96], {MTP}mlp.experts.3.up_proj.weight [24, 48]" in message
    assert f"1 extra: {MTP}mlp.experts.8.up_proj.weight F32 [2]" in message
    assert f"2 misshapen: {MTP}enorm.weight (float [48] expected, F32 [7] found)" in message
    assert f"{MTP}shared_head.head.weight (float [97, 48] expected, F32 [96, 48] found)" in message


def test_a_long_list_of_missing_tensors_is_cut(copy):
    edit_mtp_shard(copy, lambda tensors: [tensors.pop(name) for name in list(tensors) if "experts" in name])
    with pytest.raises(MLAError, match=r"27 missing: (model\S+ \[\d+, \d+\], ){8}and 19 more$"):
        load_model(copy)


def test_an_integer_tensor_is_no_weight(copy):
    edit_mtp_shard(copy, lambda t: t.update({MTP + "enorm.weight": torch.zeros(48, dtype=torch.int8)}))
    with pytest.raises(
        MLAError, match=r"1 misshapen: .*enorm.weight \(float \[48\] expected, I8 \[48\] found\)"
    ):
        load_model(copy)


def test_two_mtp_layers_are_refused_unless_left_out(copy):
    add_shard(copy, "second.safetensors", {"model.layers.4.enorm.weight": torch.zeros(48)})
    with pytest.raises(MLAError, match="expected at most one MTP layer, got 2: layers 3 to 4"):
        load_model(copy)
    assert load_model(copy, mtp=False).mtp is None


def no_directory(path: Path) -> str:
    shutil.rmtree(path)
    return "config.json: expected a checkpoint's config, got no such directory"


def no_config(path: Path) -> str:
    (path / "config.json").unlink()
    return "config.json: expected a checkpoint's config, got none"


def broken_config(path: Path) -> str:
    (path / "config.json").write_text('{"model_type": ')
    return "config.json: expected a readable JSON object"


def binary_config(path: Path) -> str:
    (path / "config.json").write_bytes(b"\xff\xfe\x00")
    return "config.json: expected a readable file in UTF-8"


def config_of_another_model(path: Path) -> str:
    edit_config(path, model_type="llama")
    known = "deepseek_v2, deepseek_v3, deepseek_v32, glm4_moe_lite, glm_moe_dsa, kimi_k2, kimi_k25"
    return f"config.json: model_type: expected one of {known}, got 'llama'"


def config_with_a_text_for_a_number(path: Path) -> str:
    edit_config(path, hidden_size="wide")
    return "config.json: hidden_size: expected an integer in [1, 1048576], got 'wide'"


def config_is_a_list(path: Path) -> str:
    (path / "config.json").write_text("[]")
    return "config.json: expected a readable JSON object, got list"


def no_weights(path: Path) -> str:
    for file in path.glob("*.safetensors*"):
        file.unlink()
    return "expected at least one .safetensors file, got none"


def missing_shard(path: Path) -> str:
    (path / "mtp.safetensors").unlink()
    return "mtp.safetensors: expected the file that model.safetensors.index.json names, got none; download it again"


def missing_shards(path: Path) -> str:
    shards = sorted(path.glob("*.safetensors"))
    for shard in shards[1:4]:
        shard.unlink()
    return (
        f"{shards[1].name}: expected the file that model.safetensors.index.json names, got none; download it again; "
        f"files that are missing: 3 of {len(shards)}"
    )


def cut_shard(path: Path) -> str:
    content = (path / "mtp.safetensors").read_bytes()
    (path / "mtp.safetensors").write_bytes(content[:-1])
    return "mtp.safetensors: expected a readable safetensors file, got "


def shard_cut_in_its_header(path: Path) -> str:
    content = (path / "mtp.safetensors").read_bytes()
    (path / "mtp.safetensors").write_bytes(content[:100])
    return "mtp.safetensors: expected a readable safetensors file, got "


def shard_with_more_than_its_tensors(path: Path) -> str:
    with (path / "mtp.safetensors").open("ab") as file:
        file.write(b"\0")
    return "mtp.safetensors: expected a readable safetensors file, got "


def empty_shard(path: Path) -> str:
    (path / "mtp.safetensors").write_bytes(b"")
    return "mtp.safetensors: expected a readable safetensors file"


def broken_index(path: Path) -> str:
    (path / "model.safetensors.index.json").write_text("{}")
    return "model.safetensors.index.json: expected a weight_map of tensors to files"


def tensor_in_two_files(path: Path) -> str:
    add_shard(path, "again.safetensors", {"model.norm.weight": torch.zeros(48)})
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"]["x"] = index["weight_map"]["lm_head.weight"]
    return "expected each tensor in one file, got a second model.norm.weight"


@pytest.mark.parametrize(
    "spoil",
    [
        no_directory,
        no_config,
        broken_config,
        binary_config,
        config_of_another_model,
        config_with_a_text_for_a_number,
        config_is_a_list,
        no_weights,
        missing_shard,
        missing_shards,
        cut_shard,
        shard_cut_in_its_header,
        shard_with_more_than_its_tensors,
        empty_shard,
        broken_index,
        tensor_in_two_files,
    ],
)
def test_an_unreadable_checkpoint_is_one_named_error(spoil, copy, monkeypatch):
    """Before anything is allocated: neither the model, nor a place for its weights on the device."""
    expected = spoil(copy)
    for method in ("__init__", "to_empty"):
        monkeypatch.setattr(MLAForCausalLM, method, lambda *_, **__: pytest.fail("allocated"))
    with pytest.raises(MLAError) as caught:
        load_model(copy)
    message = str(caught.value)
    assert expected in message
    assert str(copy) in message
    assert "\n" not in message


def test_a_config_without_a_number_of_key_heads_has_those_of_mla(copy):
    expected = load_model(copy).state_dict()
    file = copy / "config.json"
    for value in ({}, {"num_key_value_heads": None}):
        content = json.loads(file.read_text())
        content.pop("num_key_value_heads", None)
        file.write_text(json.dumps(content | value))
        assert all(
            torch.equal(expected[name], tensor) for name, tensor in load_model(copy).state_dict().items()
        )


PREFIXES = (
    "language_model.",
    "model.language_model.",
    "module.",
    "_orig_mod.",
    "base_model.model.",
    "a.b_2.c.",
    "",
)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("inner", ["model.", ""])
def test_names_of_a_larger_model_are_refused(checkpoint, tmp_path, prefix, inner):
    if prefix + inner == "model.":
        return
    names = ["layers.0.input_layernorm.weight", "layers.11.mlp.gate.weight"]
    save_file({f"{prefix}{inner}{name}": torch.zeros(2) for name in names}, tmp_path / "model.safetensors")
    shutil.copy(checkpoint / "config.json", tmp_path)
    got = f"got '{re.escape(prefix + inner)}layers\\.\\S+; save the language model itself"
    with pytest.raises(MLAError, match=rf"named model\.layers\.0\..*, {got}"):
        load_model(tmp_path)
