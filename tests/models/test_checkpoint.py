"""Loading what transformers and DeepSeek write."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from mla_compile import MLAError
from mla_compile.models import load_model
from mla_compile.models.checkpoint import meta_model
from mla_compile.models.names import hugging_face_name
from tests.models.small import YARN, add_shard, reference_model, save, unstack, v3_config

MTP = "model.layers.3."  # the trunk has layers 0 to 2


@pytest.fixture(scope="module")
def tensors(checkpoint) -> dict[str, torch.Tensor]:
    return {
        name: tensor for file in checkpoint.glob("*.safetensors") for name, tensor in load_file(file).items()
    }


def assert_same_weights(first, second) -> None:
    one, other = first.state_dict(), second.state_dict()
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=0, rtol=0)


def test_one_file_without_an_index_is_enough(checkpoint, tensors, tmp_path):
    save_file(tensors, tmp_path / "weights.safetensors")
    (tmp_path / "._weights.safetensors").write_bytes(b"written by macOS")
    shutil.copy(checkpoint / "config.json", tmp_path)
    assert_same_weights(load_model(tmp_path), load_model(checkpoint))


def test_a_kimi_k2_checkpoint_loads_as_a_deepseek_v3_one(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "kimi_k2"}))
    assert_same_weights(load_model(tmp_path), load_model(checkpoint))


@pytest.fixture
def wrapped(tensors, checkpoint, tmp_path) -> Path:
    """As Kimi-K2.5 is published: the text model beside others, its config in `text_config`."""
    named = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file(named | {"vision_tower.patch_embed.proj.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    text = json.loads((checkpoint / "config.json").read_text()) | {"model_type": "kimi_k2"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": text}))
    return tmp_path


def test_the_text_model_of_a_kimi_k25_checkpoint_loads(wrapped, checkpoint):
    assert_same_weights(load_model(wrapped), load_model(checkpoint))
    assert meta_model(wrapped).arch == load_model(checkpoint).arch


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"text_config": None}, "config.json: text_config: expected an object"),
        ({"text_config": {"model_type": "kimi_k25"}}, "text_config.model_type: expected one of deepseek_v2"),
        ({"quantization_config": {"quant_method": "int4"}}, "quantization_config: expected none, or"),
    ],
)
def test_a_bad_config_of_a_wrapper_is_named(changes, named, wrapped):
    config = wrapped / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(MLAError, match=re.escape(named)):
        load_model(wrapped)


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
    config = json.loads((without / "config.json").read_text())
    assert config.pop("num_nextn_predict_layers") == 1
    assert load_model(without).mtp is None
    assert meta_model(without).mtp is not None
    (without / "config.json").write_text(json.dumps(config))
    assert meta_model(without).mtp is load_model(without).mtp is None


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
    # Another head is read, as by transformers 5, whatever the config says.
    other = torch.randn(97, 48)
    add_shard(path, "head.safetensors", {"lm_head.weight": other})
    torch.testing.assert_close(load_model(path).logits(hidden), hidden @ other.T)
    add_shard(path, "head.safetensors", {"lm_head.weight": other[1:]})
    with pytest.raises(MLAError, match=r"1 misshapen: lm_head.weight \(float \[97, 48\] expected"):
        load_model(path)


def test_positions_of_yarn_outside_of_its_table_have_precedence(copy):
    """As in transformers, which moves them into the table when a model is built."""
    file = copy / "config.json"
    config = json.loads(file.read_text()) | {"rope_parameters": YARN, "original_max_position_embeddings": 64}
    file.write_text(json.dumps(config))
    theirs = AutoModelForCausalLM.from_pretrained(copy).model.rotary_emb.inv_freq
    torch.testing.assert_close(load_model(copy).rotary.inv_freq, theirs)
    assert YARN["original_max_position_embeddings"] != 64


@pytest.mark.parametrize("has_shards", [False, True])
def test_an_index_of_an_earlier_save_is_ignored(copy, has_shards):
    """Beside a model.safetensors that it does not name, as by transformers."""
    model = reference_model(v3_config())
    model.model.norm.weight.fill_(7)
    model.save_pretrained(copy)
    if not has_shards:
        for shard in [*copy.glob("model-*.safetensors"), copy / "mtp.safetensors"]:
            shard.unlink()
    assert (load_model(copy).norm.weight == 7).all()
    assert (AutoModelForCausalLM.from_pretrained(copy).model.norm.weight == 7).all()


def test_weights_take_the_dtype_asked_for_and_correction_biases_stay_float32(checkpoint):
    model = load_model(checkpoint, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.layers[1].mlp.gate.e_score_correction_bias.dtype == torch.float32
    assert model.rotary.inv_freq.dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", torch.int8),
        *(("device", device) for device in ("mars", "cuda:97", None, 1.5, [1])),
    ],
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
