"""A process's part of a checkpoint: its values, and that no more of the files is read."""

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mla_compile import MLAError, Parallel, load_model
from mla_compile.models import MLAForCausalLM
from mla_compile.models.safetensor_files import SafetensorFiles
from mla_compile.models.sharding import division
from mla_compile.ops.linear import fp8
from tests.models.small import reference_model, reference_mtp_layer, save, set_quantization, to_fp8, v3_config
from tests.models.test_fp8 import BLOCK, quantize

CONFIG = v3_config(vocab_size=96)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = reference_model(CONFIG)
    return save(model, tmp_path_factory.mktemp("plain"), reference_mtp_layer(model))


@pytest.fixture(scope="module")
def in_fp8(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In blocks that end where few parts do."""
    path = shutil.copytree(plain, tmp_path_factory.mktemp("fp8") / "checkpoint")
    to_fp8(path, quantize, BLOCK)
    return path


@pytest.fixture(scope="module")
def stacked_in_fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts as transformers 5 has them in memory. One block in three has rows of both gate and up."""
    path = tmp_path_factory.mktemp("stacked")
    reference_model(CONFIG).save_pretrained(path, save_original_format=False)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        values, scales = zip(*map(quantize, tensors[name]), strict=True)
        tensors |= {name: torch.stack(values), f"{name}_scale_inv": torch.stack(scales)}
    save_file(tensors, path / "model.safetensors")
    set_quantization(path, quant_method="fp8", fmt="e4m3", weight_block_size=list(BLOCK))
    return path


@pytest.fixture(scope="module")
def stacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stacked")
    reference_model(CONFIG).save_pretrained(path, save_original_format=False)
    return path


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many numbers of each tensor are read, each time that it is looked at."""
    found: dict[str, int] = {}

    def counted(method: Any) -> Any:
        def call(files: SafetensorFiles, name: str, *args: Any) -> Tensor:
            tensor: Tensor = method(files, name, *args)
            found[name] = found.get(name, 0) + tensor.numel()
            return tensor

        return call

    for method in ("read", "read_range"):
        monkeypatch.setattr(SafetensorFiles, method, counted(getattr(SafetensorFiles, method)))
    return found


@pytest.fixture
def load_part(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`load_model` of one of several processes, without the others."""
    monkeypatch.setattr("mla_compile.models.checkpoint.check_parallel", lambda parallel: None)
    monkeypatch.setattr(Parallel, "failing_together", lambda self: nullcontext())

    def load(path: Path, rank: int, size: int, *, expert_parallel: bool, **settings: Any) -> MLAForCausalLM:
        return load_model(path, parallel=Parallel(rank, size, expert_parallel), **settings)

    return load


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("kind", ["plain", "in_fp8", "stacked", "stacked_in_fp8"])
def test_each_process_has_its_part_of_every_weight(
    kind: str, expert_parallel: bool, load_part: Any, read: dict[str, int], request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(kind)
    whole = load_model(path)
    shapes = {name: torch.Size(entry.shape) for name, entry in SafetensorFiles(path).entries.items()}
    for rank in range(4):
        read.clear()
        part = load_part(path, rank, 4, expert_parallel=expert_parallel).state_dict()
        for name, tensor in whole.state_dict().items():
            how = division(name, expert_parallel=expert_parallel)
            expected = tensor if how is None else how.part(tensor, rank, 4)
            torch.testing.assert_close(part[name], expected, rtol=0, atol=0, msg=f"{name} of {rank}")
        assert not [name for name, number in read.items() if number > shapes[name].numel()], (
            "read more than once"
        )
        if kind == "plain":
            for name in ("lm_head", "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj"):
                assert read[f"{name}.weight"] == shapes[f"{name}.weight"].numel() // 4


def test_of_weights_that_are_dequantised_the_blocks_are_read_that_a_part_lies_in(
    in_fp8: Path, load_part: Any, read: dict[str, int]
) -> None:
    """Blocks of 16 rows and 32 columns."""
    # Of 64 rows of gate each process has 16. Of the 24 rows of an expert it has 6: 0 to 6, 6 to 12, 12 to 18, 18 to 24.
    for rank, rows, blocks in ((0, 16, 1), (1, 16, 1), (2, 24, 2), (3, 8, 1)):
        read.clear()
        load_part(in_fp8, rank, 4, expert_parallel=False)
        gate, up = "model.layers.0.mlp.gate_proj.weight", "model.layers.1.mlp.experts.3.up_proj.weight"
        assert (read[gate], read[f"{gate}_scale_inv"]) == (16 * 48, 1 * 2)
        assert (read[up], read[f"{up}_scale_inv"]) == (rows * 48, blocks * 2)
        down = "model.layers.0.mlp.down_proj.weight"  # 48 rows; of 64 columns each process has 16
        assert (read[down], read[f"{down}_scale_inv"]) == (48 * 32, 3 * 1)


def test_experts_of_others_are_not_read(plain: Path, load_part: Any, read: dict[str, int]) -> None:
    load_part(plain, 1, 4, expert_parallel=True)
    experts = {name.split(".experts.")[1].split(".")[0] for name in read if ".experts." in name}
    assert experts == {"2", "3"}


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_parts_that_are_quantised_are_those_of_the_quantised_model(
    expert_parallel: bool, tmp_path: Path, load_part: Any
) -> None:
    widths = dict.fromkeys(("hidden_size", "moe_intermediate_size", "intermediate_size", "v_head_dim"), 256)
    config = v3_config(
        vocab_size=96, num_hidden_layers=2, n_routed_experts=2, num_experts_per_tok=1, n_group=1
    )
    config.update(
        widths | {"topk_group": 1, "q_lora_rank": 128, "qk_nope_head_dim": 120, "kv_lora_rank": 120}
    )
    path = tmp_path / "checkpoint"
    reference_model(config).save_pretrained(path, save_original_format=False)
    whole = load_model(path, quantize="fp8")
    for rank in range(2):
        part = load_part(path, rank, 2, expert_parallel=expert_parallel, quantize="fp8").state_dict()
        for name, tensor in whole.state_dict().items():
            how = division(name, expert_parallel=expert_parallel)
            expected = tensor if how is None else how.part(tensor, rank, 2)
            assert torch.equal(part[name].float(), expected.float()), name


def test_blocks_of_fp8_that_a_number_of_processes_would_cut_are_named(
    plain: Path, tmp_path: Path, load_part: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is allocated, with the numbers that work."""
    path = shutil.copytree(plain, tmp_path / "checkpoint")
    to_fp8(path, fp8.quantize, (fp8.BLOCK, fp8.BLOCK))
    with monkeypatch.context() as patch:
        patch.setattr(MLAForCausalLM, "to_empty", lambda *_, **__: pytest.fail("allocated"))
        with pytest.raises(MLAError) as caught:
            load_part(path, 0, 2, expert_parallel=False)
    assert str(caught.value).startswith("parallel.size: expected one of 1, got 2; it does not divide ")
    assert "intermediate_size in FP8, as 64 is not a multiple of 128" in str(caught.value)
    load_part(path, 0, 2, expert_parallel=False, dequantize=True)


def test_stacks_in_fp8_are_dequantised_whole(stacked_in_fp8: Path) -> None:
    files = load_file(stacked_in_fp8 / "model.safetensors")
    experts = load_model(stacked_in_fp8).layers[1].mlp.experts
    for ours, theirs in (("w_gate_up", "gate_up_proj"), ("w_down", "down_proj")):
        name = f"model.layers.1.mlp.experts.{theirs}"
        expected = fp8.dequantize(files[name], files[f"{name}_scale_inv"], BLOCK)
        assert torch.equal(getattr(experts, ours), expected)
