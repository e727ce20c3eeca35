"""How a model's tensors are divided among GPUs."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.nn.functional as F

from mla_compile import MLAError
from mla_compile.models import MLAForCausalLM
from mla_compile.models.checkpoint import meta_model
from mla_compile.models.fp8 import put_fp8_layers
from mla_compile.models.layers import MLP
from mla_compile.models.moe import Experts
from mla_compile.models.sharding import check_divisible, division, numbers_of_gpus
from mla_compile.ops.attention.mla_attention import up_projections
from mla_compile.ops.linear.fp8 import dequantize, quantize
from tests.models import published
from tests.models.small import CONFIGS, randomize, v3_config


@cache
def published_model(name: str, **settings: object) -> MLAForCausalLM:
    with TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(getattr(published, name))
        return meta_model(directory, dtype=torch.bfloat16, **settings)


def part(model: MLAForCausalLM, name: str, rank: int, size: int) -> torch.Tensor:
    how = division(name, expert_parallel=False)
    assert how is not None, name
    return how.part(model.get_parameter(name), rank, size)


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_parts_of_all_gpus_are_the_tensor(name: str, expert_parallel: bool) -> None:
    torch.manual_seed(0)
    model = MLAForCausalLM(CONFIGS[name], mtp=True)
    num_divided = 0
    for tensor_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        how = division(tensor_name, expert_parallel=expert_parallel)
        if how is None:
            continue
        num_divided += 1
        size = 4 if how.of == "num_attention_heads" else 2
        if tensor.shape[how.dim] // how.stacked % size:
            continue  # 97 tokens
        parts = [how.part(tensor, rank, size) for rank in range(size)]
        split = [x.unflatten(how.dim, (how.stacked, -1)) for x in parts]
        assert torch.equal(torch.cat(split, how.dim + 1).flatten(how.dim, how.dim + 1), tensor)
    assert num_divided > 4 * model.arch.num_layers


WHOLE = (
    *("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm", "input_layernorm"),
    *("post_attention_layernorm", "gate", "e_score_correction_bias", "enorm", "hnorm", "eh_proj", "norm"),
    *("inv_freq", "wq_b", "wk", "k_norm", "bias", "weights_proj"),  # the last five: of an indexer
)
"""What every GPU has all of: a new tensor gets a division, or its name comes here."""


def test_every_tensor_is_divided_or_known_to_be_whole() -> None:
    for config in CONFIGS.values():
        model = MLAForCausalLM(config, mtp=True)
        for name, _ in (*model.named_parameters(), *model.named_buffers()):
            last = name.removesuffix(".weight").rpartition(".")[2]
            assert (division(name, expert_parallel=False) is None) == (last in WHOLE), name


def test_the_sum_over_the_parts_of_an_mlp_is_the_mlp() -> None:
    torch.manual_seed(0)
    mlp, x = MLP(16, 24).double(), torch.randn(5, 16).double()
    total = torch.zeros_like(x)
    for rank in range(4):
        w = {}
        for name, weight in mlp.named_parameters():
            how = division(f"layers.0.mlp.{name}", expert_parallel=False)
            assert how is not None
            w[name.split("_")[0]] = how.part(weight, rank, 4)
        total += (F.silu(x @ w["gate"].T) * (x @ w["up"].T)) @ w["down"].T
    torch.testing.assert_close(total, mlp(x))


def test_the_sum_over_the_parts_of_an_expert_is_the_expert() -> None:
    torch.manual_seed(0)
    experts, x = Experts(3, 16, 24).double(), torch.randn(16).double()

    def outputs(gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gate, up = (gate_up @ x).chunk(2, dim=1)
        return (down @ (F.silu(gate) * up)[..., None])[..., 0]

    total = torch.zeros(3, 16).double()
    for rank in range(2):
        parts = []
        for name, weight in experts.named_parameters():
            how = division(f"mtp.layer.mlp.experts.{name}", expert_parallel=False)
            assert how is not None
            parts.append(how.part(weight, rank, 2))
        total += outputs(*parts)
    torch.testing.assert_close(total, outputs(experts.w_gate_up, experts.w_down))


def test_a_part_of_attention_has_whole_heads() -> None:
    model = MLAForCausalLM(v3_config(), mtp=False)
    randomize(model)
    arch, prefix = model.arch, "layers.1.self_attn."
    w_uk, w_uv = model.layers[1].self_attn.up_projections()
    for rank in range(2):
        heads = slice(2 * rank, 2 * rank + 2)
        kv_b = part(model, prefix + "kv_b_proj.weight", rank, 2)
        for ours, whole in zip(up_projections(kv_b, 2, arch.qk_nope_head_dim), (w_uk, w_uv), strict=True):
            assert torch.equal(ours, whole[heads])
        o = model.get_parameter(prefix + "o_proj.weight").unflatten(1, (4, arch.v_head_dim))
        assert torch.equal(part(model, prefix + "o_proj.weight", rank, 2), o[:, heads].flatten(1))
        q = model.get_parameter(prefix + "q_b_proj.weight").unflatten(0, (4, -1))
        assert torch.equal(part(model, prefix + "q_b_proj.weight", rank, 2), q[heads].flatten(0, 1))


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_scales_of_fp8_weights_are_divided_as_the_weights_are(expert_parallel: bool) -> None:
    torch.manual_seed(0)
    for name, shape in {
        "layers.1.mlp.experts.w_gate_up": (4, 2, 256, 200),
        "layers.1.mlp.experts.w_down": (4, 1, 200, 256),
        "layers.0.mlp.gate_proj.weight": (512, 200),
        "layers.0.self_attn.o_proj.weight": (200, 256),
    }.items():
        values, scale = quantize(torch.randn(shape))
        if len(shape) == 4:
            values, scale = values.flatten(1, 2), scale.flatten(1, 2)
        how, of_scale = (division(x, expert_parallel=expert_parallel) for x in (name, f"{name}_scale_inv"))
        assert how is not None
        assert how == of_scale
        for rank in range(2):
            ours = dequantize(how.part(values, rank, 2), how.part(scale, rank, 2))
            assert torch.equal(ours, how.part(dequantize(values, scale), rank, 2))


@pytest.mark.parametrize(
    ("name", "expert_parallel", "numbers"),
    [
        ("DEEPSEEK_V3", False, [1, 2, 4, 8, 16]),
        ("DEEPSEEK_V3", True, [1, 2, 4, 8, 16]),
        ("KIMI_K2", False, [1, 2, 4, 8, 16]),
        ("DEEPSEEK_V2", False, [1, 2, 4, 8, 16, 32, 64, 128]),
        ("DEEPSEEK_V2", True, [1, 2, 4, 8, 16, 32]),
        ("GLM_4_7_FLASH", False, [1, 2, 4]),
        ("GLM_4_7_FLASH", True, [1, 2, 4]),
    ],
)
def test_published_models_can_be_divided_among_so_many(
    name: str, expert_parallel: bool, numbers: list[int]
) -> None:
    model = published_model(name)
    assert numbers_of_gpus(model, expert_parallel=expert_parallel) == numbers
    for size in numbers:
        check_divisible(model, size, expert_parallel=expert_parallel)
    for size in {-1, 0, 3, 6, 7, 10, 24, 32, 64, 128, 256} - {*numbers}:
        with pytest.raises(
            MLAError, match=f"size: expected one of {', '.join(map(str, numbers))}, got {size};"
        ):
            check_divisible(model, size, expert_parallel=expert_parallel)


def test_what_a_number_does_not_divide_is_named() -> None:
    glm = published_model("GLM_4_7_FLASH")
    with pytest.raises(
        MLAError,
        match=r"--gpus: expected one of 1, 2, 4, got 8; it does not divide num_attention_heads = 20$",
    ):
        check_divisible(glm, 8, expert_parallel=False, argument="--gpus")
    with pytest.raises(MLAError, match="moe_intermediate_size = 1536; n_shared_experts"):
        check_divisible(glm, 5, expert_parallel=False)
    by_expert = "it does not divide n_routed_experts = 64; n_shared_experts"
    with pytest.raises(MLAError, match=by_expert):
        check_divisible(glm, 5, expert_parallel=True)


def test_fp8_shards_end_at_blocks() -> None:
    v3 = published_model("DEEPSEEK_V3")
    expected = "144 FP8 blocks of intermediate_size; 16 FP8 blocks of moe_intermediate_size"
    with pytest.raises(MLAError, match=expected):
        check_divisible(v3, 32, expert_parallel=False)
    plain = published_model("DEEPSEEK_V3", dequantize=True)
    check_divisible(plain, 32, expert_parallel=False)
    cut = MLAForCausalLM(v3_config(moe_intermediate_size=192, vocab_size=96), mtp=False)
    check_divisible(cut, 2, expert_parallel=False)
    put_fp8_layers(cut, lambda name: "experts.w_" in name)
    with pytest.raises(
        MLAError, match="one of 1, got 2; it does not divide moe_intermediate_size in FP8, as 192 is no"
    ):
        check_divisible(cut, 2, expert_parallel=False)
    check_divisible(cut, 2, expert_parallel=True)


def test_a_meta_model_is_what_a_config_names(tmp_path: Path) -> None:
    assert published_model("KIMI_K2").mtp is None
    assert published_model("DEEPSEEK_V3").mtp is not None
    assert published_model("DEEPSEEK_V3", mtp=False).mtp is None
    other = json.loads(published.DEEPSEEK_V3)
    other["quantization_config"]["weight_block_size"] = [64, 64]
    (tmp_path / "config.json").write_text(json.dumps(other))
    dtypes = {parameter.dtype for parameter in meta_model(tmp_path).parameters()}
    assert dtypes == {torch.float32}, "other blocks are dequantised"
    with pytest.raises(MLAError, match=r"^quantize: .*FP8 in blocks of 128 x 128"):
        meta_model(tmp_path, quantize="fp8")
