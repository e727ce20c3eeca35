"""Block-FP8 weights, as DeepSeek publishes them (arXiv 2412.19437, section 3.3.2): read, not computed in."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mla_compile.errors import MLAError

SCALE_SUFFIX = "_scale_inv"


def block_size_of(config: Mapping[str, Any], prefix: str) -> tuple[int, int] | None:
    """A checkpoint's FP8 block, rows by columns, from its config.json; None where its weights are plain.

    Raises:
        MLAError: any other quantisation, `prefix` before the setting's name.
    """
    key = next((key for key in ("quantization_config", "compression_config") if config.get(key)), None)
    if key is None:
        return None
    name, quantization = f"{prefix}{key}", config[key]
    expected = "none, or quant_method 'fp8' with weight_block_size [rows, columns]"
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method != "fp8":
        mend = "use a checkpoint with plain or block-FP8 weights"
        raise MLAError(name, expected, f"quant_method {method!r:.80}", mend)
    block = quantization.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n >= 1 for n in block):
        raise MLAError(name, expected, f"weight_block_size {block!r:.80}")
    return block[0], block[1]


def scale_shape(weight_shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of a matrix's scales, or a stack's: one for each block of the last two dimensions, cut ones included."""
    blocks = [-(-size // step) for size, step in zip(weight_shape[-2:], block)]
    return (*weight_shape[:-2], *blocks)


def dequantize(weight: Tensor, scale_inv: Tensor, block: tuple[int, int]) -> Tensor:
    """`weight * scale_inv` of each weight's block, float32.

    weight: float8 `[..., rows, columns]`; scale_inv: float `[..., ceil(rows / block rows), ceil(columns / block
    columns)]`. Despite its name `scale_inv` multiplies: it is the inverse of the scale that quantised.
    """
    rows, columns = weight.shape[-2:]
    # A block larger than the matrix is no larger than the matrix here: a config may say anything.
    scale = scale_inv.float().repeat_interleave(min(block[0], rows), dim=-2)[..., :rows, :]
    return weight.float() * scale.repeat_interleave(min(block[1], columns), dim=-1)[..., :columns]
