"""Loading what transformers and DeepSeek write."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from transformers.modeling_layers import MtpModel

from mla_compile import MLAError
from mla_compile.models import load_model, load_tokenizer
from mla_compile.models.names import hugging_face_name
from tests.models.small import add_shard, reference_model, reference_mtp_layer, save, unstack, v3_config

MTP = "model.layers.3."  # the trunk has layers 0 to 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A sharded DeepSeek-V3 checkpoint with an MTP layer."""
    model = reference_model(v3_config())
    return save(model, tmp_path_factory.mktemp("checkpoint"), reference_mtp_layer(model))


@pytest.fixture
def copy(checkpoint, tmp_path) -> Path:
    """The same, to be spoiled."""
    return shutil.copytree(checkpoint, tmp_path / "copy")


@pytest.fixture(scope="module")
def tensors(checkpoint) -> dict[str, torch.Tensor]:
    return {
        name: tensor for file in checkpoint.glob("*.safetensors") for name, tensor in load_file(file).items()
    }


def edit_config(path: Path, **changes) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_mtp_shard(path: Path, change) -> None:
    """Apply `change` to the tensors of the MTP layer's file; the index keeps naming them all."""
    tensors = load_file(path / "mtp.safetensors")
    change(tensors)
    save_file(tensors, path / "mtp.safetensors")


def assert_same_weights(first, second) -> None:
    one, other = first.state_dict(), second.state_dict()
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=0, rtol=0)


def test_one_file_without_an_index_is_enough(checkpoint, tensors, tmp_path):
    save_file(tensors, tmp_path / "weights.safetensors")
    shutil.copy(checkpoint / "config.json", tmp_path)
    assert_same_weights(load_model(tmp_path), load_model(checkpoint))


def test_stacked_experts_load_like_separate_ones(checkpoint, tmp_path):
    model = reference_model(v3_config())
    model.save_pretrained(tmp_path, save_original_format=False)
    assert "model.layers.1.mlp.experts.gate_up_proj" in load_file(tmp_path / "model.safetensors")
    assert_same_weights(load_model(tmp_path), load_model(checkpoint, mtp=False))


def test_the_mtp_layer_is_where_transformers_looks_for_it(checkpoint):
    main = type(reference_model(v3_config())).from_pretrained(checkpoint)
    # transformers knows DeepSeek-V3's MTP layer by its number in the published checkpoint, 61.
    main._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3.*"]
    theirs = unstack(MtpModel.from_pretrained(main).layers[0].state_dict())
    ours = load_model(checkpoint).mtp
    torch.testing.assert_close(ours.norm.weight, theirs["post_norm.weight"])
    torch.testing.assert_close(ours.eh_proj.weight, theirs["eh_proj.weight"])
    torch.testing.assert_close(ours.enorm.weight, theirs["enorm.weight"])
    torch.testing.assert_close(ours.hnorm.weight, theirs["hnorm.weight"])
    expert = ours.layer.mlp.experts.w_gate_up[2, :24]
    torch.testing.assert_close(expert, theirs["mtp_block.mlp.experts.2.gate_proj.weight"])


def test_tensors_decide_whether_there_is_an_mtp_layer(checkpoint, tmp_path):
    assert load_model(checkpoint).mtp is not None
    without = save(reference_model(v3_config()), tmp_path)
    assert json.loads((without / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert load_model(without).mtp is None


def test_an_mtp_layer_may_be_left_out_but_not_made_up(checkpoint, tmp_path):
    assert load_model(checkpoint, mtp=False).mtp is None
    without = save(reference_model(v3_config()), tmp_path)
    with pytest.raises(MLAError, match=r"expected an MTP layer \(tensors model\.layers\.3\.\*\), got none"):
        load_model(without, mtp=True)


def test_a_tied_head_is_the_embedding_whether_or_not_it_is_stored(tmp_path):
    path = save(reference_model(v3_config(tie_word_embeddings=True)), tmp_path)
    model = load_model(path)
    assert model.lm_head is None
    hidden = torch.randn(2, 48)
    torch.testing.assert_close(model.logits(hidden), hidden @ model.embed_tokens.weight.T)
    add_shard(path, "head.safetensors", {"lm_head.weight": model.embed_tokens.weight})
    assert_same_weights(load_model(path), model)


def test_weights_take_the_dtype_asked_for_and_correction_biases_stay_float32(checkpoint):
    model = load_model(checkpoint, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.layers[1].mlp.gate.e_score_correction_bias.dtype == torch.float32
    assert model.rotary.inv_freq.dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "value"), [("dtype", torch.int8), ("device", "mars"), ("device", "cuda:97")]
)
def test_weights_go_to_floats_on_a_device_of_this_machine(checkpoint, name, value):
    with pytest.raises(MLAError, match=f"^{name}: expected a "):
        load_model(checkpoint, **{name: value})


def test_old_rotary_buffers_are_passed_over(copy):
    add_shard(copy, "old.safetensors", {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})
    load_model(copy)


def test_names_of_our_tensors_are_hugging_face_ones():
    assert hugging_face_name("lm_head.weight", 3) == "lm_head.weight"
    assert hugging_face_name("norm.weight", 3) == "model.norm.weight"
    assert hugging_face_name("mtp.norm.weight", 3) == MTP + "shared_head.norm.weight"
    assert hugging_face_name("mtp.enorm.weight", 3) == MTP + "enorm.weight"
    assert hugging_face_name("mtp.layer.mlp.gate.weight", 3) == MTP + "mlp.gate.weight"


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
    return "config.json: expected readable JSON"


def binary_config(path: Path) -> str:
    (path / "config.json").write_bytes(b"\xff\xfe\x00")
    return "config.json: expected readable JSON"


def config_of_another_model(path: Path) -> str:
    edit_config(path, model_type="llama")
    return "config.json: expected a model_type of deepseek_v2, deepseek_v3, glm4_moe_lite, got llama"


def config_with_a_text_for_a_number(path: Path) -> str:
    edit_config(path, hidden_size="wide")
    return "config.json: expected values that transformers accepts"


def config_is_a_list(path: Path) -> str:
    (path / "config.json").write_text("[]")
    return "config.json: expected a model_type"


def no_weights(path: Path) -> str:
    for file in path.glob("*.safetensors*"):
        file.unlink()
    return "expected at least one .safetensors file, got none"


def missing_shard(path: Path) -> str:
    (path / "mtp.safetensors").unlink()
    return "mtp.safetensors: expected the file that model.safetensors.index.json names, got none"


def truncated_shard(path: Path) -> str:
    content = (path / "mtp.safetensors").read_bytes()
    (path / "mtp.safetensors").write_bytes(content[: len(content) // 2])
    return "mtp.safetensors: expected a readable safetensors file"


def empty_shard(path: Path) -> str:
    (path / "mtp.safetensors").write_bytes(b"")
    return "mtp.safetensors: expected a readable safetensors file"


def broken_index(path: Path) -> str:
    (path / "model.safetensors.index.json").write_text("{}")
    return "model.safetensors.index.json: expected JSON with a weight_map"


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
        truncated_shard,
        empty_shard,
        broken_index,
        tensor_in_two_files,
    ],
)
def test_an_unreadable_checkpoint_is_one_named_error(spoil, copy):
    expected = spoil(copy)
    with pytest.raises(MLAError) as caught:
        load_model(copy)
    message = str(caught.value)
    assert expected in message
    assert str(copy) in message
    assert "\n" not in message


def test_a_tokenizer_is_loaded_where_there_is_one(copy):
    assert load_tokenizer(copy) is None
    words = Tokenizer(WordLevel({"<unk>": 0, "mla": 1, "mtp": 2}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(copy)
    tokenizer = load_tokenizer(copy)
    assert tokenizer("mtp mla what")["input_ids"] == [2, 1, 0]


def test_a_broken_tokenizer_is_a_named_error(copy):
    (copy / "tokenizer.json").write_text("{")
    with pytest.raises(MLAError, match="expected a tokenizer that transformers can read"):
        load_tokenizer(copy)
