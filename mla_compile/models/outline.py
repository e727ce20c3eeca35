"""A checkpoint's model without its weights, as the config alone tells."""

from pathlib import Path
from typing import Literal

import torch

from mla_compile.models.checkpoint import check_quantize, names_mtp, read_config
from mla_compile.models.deepseek import MLAForCausalLM
from mla_compile.models.fp8 import put_fp8_layers
from mla_compile.ops.fp8 import BLOCK


def outline(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    mtp: bool | None = None,
    quantize: Literal["fp8"] | None = None,
    dequantize: bool = False,
) -> MLAForCausalLM:
    """The model that `load_model` makes, on the meta device; of the directory only config.json is read.

    Of FP8 checkpoints the same weights are taken to be FP8 as of all published ones.

    path, dtype, quantize, dequantize: see `load_model`. mtp: None: where the config names an MTP layer.

    Raises:
        MLAError: what `load_model` says of a config and of these arguments.
    """
    config, block = read_config(Path(path))
    check_quantize(quantize, dequantize, block)
    with torch.device("meta"):
        model = MLAForCausalLM(config, mtp=names_mtp(config) if mtp is None else mtp).to(dtype)
    if quantize is not None or (block == (BLOCK, BLOCK) and not dequantize):
        put_fp8_layers(model, lambda name: "eh_proj" not in name)
    return model
