"""Models whose weights stay in FP8: what is loaded, their logits, and the tokens of an engine."""

import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mla_compile import Engine, MLAError, SamplingParams
from mla_compile.models import MLAForCausalLM, load_model
from mla_compile.models.fp8 import FP8Experts, FP8Linear
from mla_compile.ops.adjacent import lies_before
from mla_compile.ops.linear.fp8 import quantize
from tests.engine.test_batch_invariance import Unfused
from tests.fp8_cases import values_of
from tests.models.small import (
    Session,
    reference_model,
    reference_mtp_layer,
    relative_error,
    save,
    set_quantization,
    to_fp8,
    v3_config,
    v32_config,
)

PROMPTS = [[5, 9, 1, 30, 7], [2, 2, 8], [60, 4, 33, 21, 9, 11, 3]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """A checkpoint in float32, of widths that no block divides, and of some that it does."""
    config = v3_config(
        hidden_size=136,
        intermediate_size=256,
        moe_intermediate_size=128,
        q_lora_rank=128,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        n_shared_experts=2,
    )
    model = reference_model(config)
    return save(model, tmp_path_factory.mktemp("plain"), reference_mtp_layer(model))


@pytest.fixture(scope="module")
def checkpoint(plain, tmp_path_factory) -> Path:
    path = shutil.copytree(plain, tmp_path_factory.mktemp("fp8") / "copy")
    to_fp8(path, quantize, (128, 128))
    return path


def logits(model: MLAForCausalLM) -> Tensor:
    """Of the trunk and of the MTP layer, for a prompt, then decode rows."""
    session, found = Session(model, 2), []
    for batch, positions in (session.prefill([7, 5], [0, 0]), session.decode([7, 5], 2)):
        ids = positions * 7 % 90
        hidden = model(ids, positions, batch).hidden
        found += [model.logits(hidden), model.logits(model.forward_mtp(ids + 1, hidden, positions, batch))]
    return torch.cat(found)


def test_weights_in_fp8_stay_so_but_for_those_whose_heads_straddle_blocks(checkpoint: Path) -> None:
    model = load_model(checkpoint, dtype=torch.bfloat16)
    kinds = Counter(type(module).__name__ for module in model.modules())
    # q_a, kv_a, q_b, o of three layers; an MLP, and the shared experts of two.
    assert kinds["FP8Linear"] == 3 * 4 + 3 * 3 and kinds["FP8Experts"] == 2 and kinds["Experts"] == 0
    dtypes = {name.split(".")[-2]: p.dtype for name, p in model.named_parameters() if name.endswith("weight")}
    assert dtypes["o_proj"] == torch.float8_e4m3fn and dtypes["kv_b_proj"] == torch.bfloat16
    assert dtypes["lm_head"] == dtypes["eh_proj"] == dtypes["norm"] == torch.bfloat16
    scales = [p for name, p in model.named_parameters() if name.endswith("_scale_inv")]
    assert scales and all(scale.dtype == torch.float32 for scale in scales)
    assert not any(p.requires_grad for p in model.parameters())

    stored = {n: t for file in checkpoint.glob("*.safetensors") for n, t in load_file(file).items()}
    experts, expert = model.mtp.layer.mlp.experts, "model.layers.2.mlp.experts.3."
    for name, weight, scale in (
        ("gate_proj", experts.w_gate_up[3, :128], experts.w_gate_up_scale_inv[3, :1]),
        ("up_proj", experts.w_gate_up[3, 128:], experts.w_gate_up_scale_inv[3, 1:]),
        ("down_proj", experts.w_down[3], experts.w_down_scale_inv[3]),
    ):
        assert torch.equal(weight.float(), stored[f"{expert}{name}.weight"].float())
        assert torch.equal(scale, stored[f"{expert}{name}.weight_scale_inv"])


def test_weights_that_read_one_input_lie_side_by_side_with_their_scales(checkpoint: Path) -> None:
    model = load_model(checkpoint)
    attention, mlp = model.layers[0].self_attn, model.layers[0].mlp
    for one, other in (
        (attention.q_a_proj, attention.kv_a_proj_with_mqa),
        (mlp.gate_proj, mlp.up_proj),
    ):
        assert lies_before(one.weight, other.weight)
        assert lies_before(one.weight_scale_inv, other.weight_scale_inv)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_logits_are_those_of_the_dequantised_model(
    checkpoint: Path, dtype: torch.dtype, bound: float
) -> None:
    kept = logits(load_model(checkpoint, dtype=dtype))
    dequantised = load_model(checkpoint, dtype=dtype, dequantize=True)
    assert all(p.dtype == dtype for name, p in dequantised.named_parameters())
    assert relative_error(kept.float(), logits(dequantised).float()) < bound


def test_a_plain_checkpoint_is_quantised_as_it_is_loaded(plain: Path, checkpoint: Path) -> None:
    made, kept = load_model(plain, quantize="fp8"), load_model(checkpoint)
    values, others = made.state_dict(), kept.state_dict()
    assert values.keys() == others.keys()
    for name, value in values.items():
        # `kv_b_proj` has been FP8 in the other one.
        assert "kv_b_proj" in name or torch.equal(value.float(), others[name].float()), name
    assert {type(m) for m in made.modules()} == {type(m) for m in kept.modules()}
    # A weight is off by 2^-4 of itself at most, and errors of many weights cancel in part.
    assert relative_error(logits(made), logits(load_model(plain))) < 2**-3
    again = load_model(checkpoint, quantize="fp8").state_dict()
    assert all(torch.equal(again[name].float(), value.float()) for name, value in others.items())


def test_the_projections_of_an_indexer_stay_in_fp8_and_its_weights_of_heads_do_not(tmp_path: Path) -> None:
    config = v32_config(index_head_dim=128, index_n_heads=4, q_lora_rank=128)
    model = reference_model(config)
    path = save(model, tmp_path, reference_mtp_layer(model))
    to_fp8(path, quantize, (128, 128))
    kept = load_model(path)
    for layer in (*kept.layers, kept.mtp.layer):
        indexer = layer.self_attn.indexer
        assert type(indexer.wq_b) is type(indexer.wk) is FP8Linear
        assert indexer.weights_proj.weight.dtype == torch.float32
    assert relative_error(logits(kept), logits(load_model(path, dequantize=True))) < 1e-5


@pytest.mark.parametrize("intermediate", [128, 40])
def test_stacked_experts_stay_in_fp8_unless_a_block_has_rows_of_gate_and_up(
    intermediate: int, tmp_path: Path
) -> None:
    config = v3_config(num_hidden_layers=1, first_k_dense_replace=0, moe_intermediate_size=intermediate)
    model = reference_model(config)
    path = save(model, tmp_path)
    to_fp8(path, quantize, (128, 128))
    tensors = load_file(path / "weights.safetensors")
    scales = load_file(path / "scales.safetensors")
    name = "model.layers.0.mlp.experts."
    for table in (tensors, scales):
        for key in [key for key in table if key.startswith(name)]:
            del table[key]
    experts = model.model.layers[0].mlp.experts
    for kind in ("gate_up_proj", "down_proj"):
        tensors[name + kind], scales[f"{name}{kind}_scale_inv"] = quantize(getattr(experts, kind).data)
    save_file(tensors, path / "weights.safetensors")
    save_file(scales, path / "scales.safetensors")

    kept, dequantised = load_model(path), load_model(path, dequantize=True)
    assert type(kept.layers[0].mlp.experts) is (
        FP8Experts if intermediate == 128 else type(dequantised.layers[0].mlp.experts)
    )
    assert type(kept.layers[0].self_attn.o_proj) is FP8Linear
    found = dequantised.layers[0].mlp.experts.w_gate_up
    expected = values_of(
        tensors[name + "gate_up_proj"], scales[name + "gate_up_proj_scale_inv"], torch.float32
    )
    assert torch.equal(found.double(), expected)
    session = Session(kept, 1), Session(dequantised, 1)
    (batch, positions), _ = (each.prefill([7], [0]) for each in session)
    torch.testing.assert_close(kept(positions, positions, batch), dequantised(positions, positions, batch))


@pytest.fixture
def inductor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its parameter: whether Inductor compiles what our passes made of a graph, or it runs node by node."""
    if not request.param:
        monkeypatch.setattr("mla_compile.backend.lower_with_inductor", lambda gm, *_: Unfused(gm).run)


@pytest.mark.long
@pytest.mark.parametrize(
    ("k", "inductor"),
    [(0, True), (3, False), pytest.param(3, True, marks=pytest.mark.slow)],
    indirect=["inductor"],
)
@pytest.mark.usefixtures("inductor")
def test_an_engines_tokens_are_those_of_the_dequantised_model(checkpoint: Path, k: int) -> None:
    engine = Engine(
        load_model(checkpoint), num_speculative_tokens=k, max_rows=2, max_model_len=64, compile=True
    )
    plain = Engine(
        load_model(checkpoint, dequantize=True),
        num_speculative_tokens=0,
        max_rows=2,
        max_model_len=64,
        compile=False,
    )
    found, expected = (
        [each.token_ids for each in one.generate(PROMPTS, max_new_tokens=12)] for one in (engine, plain)
    )
    assert found == expected


@pytest.mark.long
@pytest.mark.parametrize("inductor", [False, pytest.param(True, marks=pytest.mark.slow)], indirect=True)
@pytest.mark.usefixtures("inductor")
def test_exact_tokens_and_logprobs_do_not_depend_on_the_batch(checkpoint: Path) -> None:
    model = load_model(checkpoint)
    engine = Engine(model, max_rows=3, max_model_len=64, batch_invariant=True, num_speculative_tokens=0)
    sampling = SamplingParams(logprobs=1)
    together = engine.generate(PROMPTS, max_new_tokens=6, sampling=sampling)
    alone = [engine.generate([prompt], max_new_tokens=6, sampling=sampling)[0] for prompt in PROMPTS]
    assert [(c.token_ids, c.logprobs) for c in together] == [(c.token_ids, c.logprobs) for c in alone]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "int8"}, "^quantize: expected 'fp8' or None, got 'int8'"),
        ({"dequantize": "no"}, "^dequantize: expected True or False, got 'no'"),
        ({"mtp": 0}, "^mtp: expected True, False or None, got 0"),
        ({"mtp": "no"}, "^mtp: expected True, False or None, got 'no'"),
        ({"dtype": "bfloat16"}, "^dtype: expected a float dtype: .*, got .bfloat16.; .*torch.bfloat16"),
        ({"path": 3}, "^path: expected a checkpoint's directory, got 3"),
        ({"path": None}, "^path: expected a checkpoint's directory, got None"),
        ({"path": ""}, "^path: expected a checkpoint's directory, got an empty path"),
        ({"quantize": "fp8", "dequantize": True}, "^quantize, dequantize: expected one of the two, got both"),
    ],
    ids=str,
)
def test_wrong_options_are_named(plain: Path, options: dict, message: str) -> None:
    with pytest.raises(MLAError, match=message):
        load_model(**{"path": plain} | options)


def test_other_blocks_are_dequantised_and_not_quantised_again(checkpoint: Path, tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint, tmp_path / "copy")
    set_quantization(path, quant_method="fp8", weight_block_size=[128, 64])
    with pytest.raises(MLAError, match=r"^quantize: .*FP8 in blocks of 128 x 128.*got \(128, 64\)"):
        load_model(path, quantize="fp8")
    with pytest.raises(MLAError, match="misshapen"):  # the scales are those of other blocks
        load_model(path)


def test_a_misshapen_scale_is_named(checkpoint: Path, tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint, tmp_path / "copy")
    add = load_file(path / "scales.safetensors")
    add["model.layers.0.self_attn.o_proj.weight_scale_inv"] = torch.ones(3, 3)
    save_file(add, path / "scales.safetensors")
    with pytest.raises(MLAError, match=r"1 misshapen: model\.layers\.0\.self_attn\.o_proj\.weight_scale_inv"):
        load_model(path)


def test_another_dtype_converts_all_but_the_weights_in_fp8(checkpoint: Path) -> None:
    model = load_model(checkpoint).to(torch.bfloat16)
    expected = load_model(checkpoint, dtype=torch.bfloat16)
    for (name, value), other in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        assert value.dtype == other.dtype and torch.equal(value.float(), other.float()), name
    assert logits(model).isfinite().all()


def test_what_a_checkpoint_has_plain_beside_fp8_is_quantised_too(plain: Path, tmp_path: Path) -> None:
    path = shutil.copytree(plain, tmp_path / "copy")
    set_quantization(path, quant_method="fp8", fmt="e4m3", weight_block_size=[128, 128])
    made, expected = (load_model(source, quantize="fp8").state_dict() for source in (path, plain))
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[name].float(), value.float()) for name, value in expected.items())


def test_a_norm_in_fp8_and_a_model_of_fp8_numbers_are_refused_by_name(
    checkpoint: Path, tmp_path: Path
) -> None:
    path = shutil.copytree(checkpoint, tmp_path / "copy")
    name = "model.layers.0.input_layernorm.weight"
    tensors, scales = load_file(path / "weights.safetensors"), load_file(path / "scales.safetensors")
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    scales[f"{name}_scale_inv"] = torch.ones(2)
    save_file(tensors, path / "weights.safetensors")
    save_file(scales, path / "scales.safetensors")
    with pytest.raises(MLAError, match=f"misshapen: {re.escape(name)}"):
        load_model(path)
    with pytest.raises(MLAError, match=r"^dtype: expected a float dtype"):
        load_model(checkpoint, dtype=torch.float8_e4m3fn)
