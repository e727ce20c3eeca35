"""The package's models of published shapes with random weights, whole or the part of a process, made on their device.

Every weight is drawn as numbers that block FP8 represents exactly. So models in bfloat16 and in FP8, whole and divided,
are the same model, on the same kind of device; no weight is ever on the host or in a file.
"""

import json
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch

from mla_compile.models import MLAForCausalLM
from mla_compile.models.checkpoint import meta_model
from mla_compile.models.fp8 import SCALE_SUFFIX
from mla_compile.models.layout import pack_adjacent
from mla_compile.models.parallel import Parallel
from mla_compile.models.sharding import check_divisible, divide, division
from mla_compile.ops.collectives.peers import connect
from mla_compile.ops.linear.fp8 import DTYPE
from tests.models import published

Weights = Literal["bf16", "fp8"]
SMALL_V3 = {
    "num_hidden_layers": 12,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
"""DeepSeek-V3's architecture in sizes such that one GPU holds 12 layers."""
CONFIGS = {
    "glm": json.loads(published.GLM_4_7_FLASH),
    "v2": json.loads(published.DEEPSEEK_V2),
    "v3": json.loads(published.DEEPSEEK_V3),
    "v3.2": json.loads(published.DEEPSEEK_V32),
    "small-v3": json.loads(published.DEEPSEEK_V3) | SMALL_V3,
}
TINY = {
    "num_hidden_layers": 3,
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
}
"""Sizes such that the parts of two processes end at FP8 blocks."""
STD = 32.0
"""Standard deviation of the drawn numbers; the largest FP8 number is 448."""


def settings_of(name: str, layers: int | None, *, tiny: bool = False) -> dict[str, Any]:
    """A config.json; layers: None for all of its layers."""
    return CONFIGS[name] | (TINY if tiny else {}) | ({} if layers is None else {"num_hidden_layers": layers})


def meta_model_of(settings: dict[str, Any], weights: Weights, *, mtp: bool) -> MLAForCausalLM:
    """The model of a config.json on the meta device, as `mla-compile plan` sees it, in bfloat16 or FP8."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(settings))
        quantize: Literal["fp8"] | None = "fp8" if weights == "fp8" else None
        return meta_model(
            folder, dtype=torch.bfloat16, mtp=mtp, quantize=quantize, dequantize=weights == "bf16"
        )


def random_model(
    settings: dict[str, Any],
    weights: Weights,
    *,
    mtp: bool,
    device: str,
    parallel: Parallel | None = None,
) -> MLAForCausalLM:
    """The model of a config.json, or the part of a process; experts are divided by their width.

    Raises:
        MLAError: an unsupported config, or a number of processes that does not divide the model.
    """
    model = meta_model_of(settings, weights, mtp=mtp)
    whole = {name: parameter.shape for name, parameter in model.named_parameters()}
    if parallel is not None:
        check_divisible(model, parallel.size, expert_parallel=False)
        divide(model, parallel)
    model.to_empty(device=device)
    pack_adjacent(model)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if not name.endswith(SCALE_SUFFIX):
            _draw(model, name, parameter.data, whole[name], generator)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.zero_()
    if parallel is not None:
        connect(model.device)  # before any step is compiled or recorded
    return model.eval()


def _draw(
    model: MLAForCausalLM, name: str, place: torch.Tensor, whole: torch.Size, generator: torch.Generator
) -> None:
    """Fill a parameter such that hidden states keep their size.

    whole: its shape in the whole model. Every process draws the whole, an expert at a time.
    """
    if len(whole) == 1:
        place.fill_(1.0)
        return
    scale = whole[-1] ** -0.5 / STD
    parallel = model.parallel
    how = None if parallel is None else division(name, expert_parallel=False)
    if place.dtype == DTYPE:
        model.get_parameter(name + SCALE_SUFFIX).data.fill_(scale)
    matrix = torch.empty(whole[-2:], device=place.device)
    for at in place if len(whole) == 3 else [place]:
        matrix.normal_(std=STD, generator=generator)
        part = matrix
        if how is not None and parallel is not None:  # a stack's dimensions are one more
            part = how.part(matrix[None] if len(whole) == 3 else matrix, parallel.rank, parallel.size)
        part = part.reshape(at.shape)
        at.copy_(part if place.dtype == DTYPE else part.to(DTYPE).float() * scale)
