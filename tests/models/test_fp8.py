"""Block-FP8 checkpoints, as DeepSeek publishes them."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mla_compile import MLAError
from mla_compile.models import load_model
from mla_compile.ops.linear.fp8 import dequantize
from tests.models.small import reference_model, reference_mtp_layer, save, set_quantization, to_fp8, v3_config

BLOCK = (16, 32)  # divides few of the small model's widths: border blocks are cut on both sides


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Float8 weights and what multiplies each block of them, block by block."""
    rows, columns = weight.shape
    grid = torch.zeros(-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
    quantized = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            place = slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1])
            grid[i, j] = weight[place].abs().max() / 448
            quantized[place] = (weight[place] / grid[i, j]).to(torch.float8_e4m3fn)
    return quantized, grid


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """Every projection in FP8, norms, embedding, head and router plain; scales in a file of their own."""
    model = reference_model(v3_config())
    path = save(model, tmp_path_factory.mktemp("fp8"), reference_mtp_layer(model))
    to_fp8(path, quantize, BLOCK)
    return path


@pytest.fixture
def copy(checkpoint, tmp_path) -> Path:
    return shutil.copytree(checkpoint, tmp_path / "copy")


def test_each_block_is_multiplied_by_its_own_scale():
    weight = torch.randn(35, 70)
    quantized, scale = quantize(weight)
    expected = torch.empty(35, 70)
    for row in range(35):
        for column in range(70):
            expected[row, column] = (
                quantized[row, column].float() * scale[row // BLOCK[0], column // BLOCK[1]]
            )
    torch.testing.assert_close(dequantize(quantized, scale, BLOCK), expected, atol=0, rtol=0)
    torch.testing.assert_close(expected, weight, atol=0.3, rtol=0.07)
    stacked = dequantize(torch.stack([quantized] * 2), torch.stack([scale, 2 * scale]), BLOCK)
    torch.testing.assert_close(stacked[1], 2 * expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_fp8_checkpoint_loads_dequantised(checkpoint, dtype):
    model = load_model(checkpoint, dtype=dtype)
    plain, scales = (
        load_file(checkpoint / "weights.safetensors"),
        load_file(checkpoint / "scales.safetensors"),
    )

    def stored(name: str) -> Tensor:
        return dequantize(plain[name], scales[name + "_scale_inv"], BLOCK).to(dtype)

    attention, experts = model.layers[0].self_attn, model.mtp.layer.mlp.experts
    torch.testing.assert_close(
        attention.kv_b_proj.weight, stored("model.layers.0.self_attn.kv_b_proj.weight")
    )
    expert = "model.layers.3.mlp.experts.5."
    torch.testing.assert_close(experts.w_gate_up[5, 24:], stored(expert + "up_proj.weight"))
    torch.testing.assert_close(experts.w_down[5], stored(expert + "down_proj.weight"))
    torch.testing.assert_close(model.norm.weight, plain["model.norm.weight"].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn])
def test_float8_of_another_kind_or_of_a_vector_is_refused(copy, dtype):
    weights = load_file(copy / "weights.safetensors")
    name = "model.norm.weight" if dtype == torch.float8_e4m3fn else "lm_head.weight"
    weights[name] = weights[name].to(dtype)
    save_file(weights, copy / "weights.safetensors")
    with pytest.raises(MLAError, match=name):
        load_model(copy)


def test_a_missing_or_misshapen_scale_is_listed(copy):
    scales = load_file(copy / "scales.safetensors")
    del scales["model.layers.0.self_attn.o_proj.weight_scale_inv"]
    scales["model.layers.0.mlp.up_proj.weight_scale_inv"] = torch.zeros(1, 1)
    scales["model.norm.weight_scale_inv"] = torch.zeros(1, 1)
    save_file(scales, copy / "scales.safetensors")
    with pytest.raises(MLAError) as caught:
        load_model(copy)
    message = str(caught.value)
    assert "1 missing: model.layers.0.self_attn.o_proj.weight_scale_inv [3, 3]" in message
    assert "1 extra: model.norm.weight_scale_inv F32 [1, 1]" in message
    assert "1 misshapen: model.layers.0.mlp.up_proj.weight_scale_inv" in message


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "compressed-tensors"},
        {"bits": 8},
        {"quant_method": "fp8"},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "weight_block_size": [0, 128]},
    ],
    ids=str,
)
def test_any_other_quantisation_is_one_named_error(copy, quantization):
    set_quantization(copy, **quantization)
    with pytest.raises(
        MLAError, match=r"config\.json: quantization_config: expected none, or quant_method 'fp8'"
    ):
        load_model(copy)


def test_float8_weights_without_a_quantization_config_are_refused(copy):
    set_quantization(copy)
    with pytest.raises(MLAError, match=r"config\.json: expected quantization_config with weight_block_size"):
        load_model(copy)
