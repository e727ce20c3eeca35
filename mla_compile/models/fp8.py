"""Layers with weights in block FP8, as DeepSeek publishes them (arXiv 2412.19437, section 3.3.2)."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mla_compile.batch import MLABatch
from mla_compile.errors import MLAError
from mla_compile.models.layers import KeepsDtype
from mla_compile.models.moe import Experts
from mla_compile.ops.experts.moe import moe_experts
from mla_compile.ops.linear.fp8 import DTYPE, scale_shape
from mla_compile.ops.linear.fp8_linear import fp8_linear

SCALE_SUFFIX = "_scale_inv"
"""Suffix of the name of a weight's scales. Despite the name they multiply the weight: they are the inverse of the
quantisation scales."""
QUANTIZATION = ("quantization_config", "compression_config")
"""The settings of a config.json that may say how weights are quantised."""
_PLAIN = ("kv_b_proj", "lm_head", "weights_proj")
"""Layers that are never FP8 here: the heads of `kv_b_proj`, 192 output features each, straddle blocks, and some models
share `lm_head` with the embedding, and an indexer's weights of heads are computed in float32."""


class FP8Linear(KeepsDtype):
    """A linear layer without bias whose weight is FP8: `weight` `[out, in]`, and a scale for each of its blocks."""

    kept = ("weight", "weight_scale_inv")

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight, self.weight_scale_inv = _empty(out_features, in_features)

    def forward(self, x: Tensor) -> Tensor:
        """`x` `[tokens, in]`, of any float dtype, to `[tokens, out]` in the same."""
        return fp8_linear(x, self.weight, self.weight_scale_inv)


class FP8Experts(KeepsDtype):
    """`Experts` with FP8 weights; gate and up have separate blocks."""

    kept = ("w_gate_up", "w_gate_up_scale_inv", "w_down", "w_down_scale_inv")

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        gate_up, scale = _empty(num_experts, 2, intermediate_size, hidden_size)
        self.w_gate_up, self.w_gate_up_scale_inv = (_frozen(x.flatten(1, 2)) for x in (gate_up, scale))
        self.w_down, self.w_down_scale_inv = _empty(num_experts, hidden_size, intermediate_size)

    def forward(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, batch: MLABatch) -> Tensor:
        return moe_experts(
            *(x, topk_weights, topk_ids, self.w_gate_up, self.w_down, batch),
            gate_up_scale=self.w_gate_up_scale_inv,
            down_scale=self.w_down_scale_inv,
        )


def _empty(*shape: int) -> tuple[nn.Parameter, nn.Parameter]:
    weight, scale = torch.empty(shape, dtype=DTYPE), torch.empty(scale_shape(shape), dtype=torch.float32)
    return _frozen(weight), _frozen(scale)


def _frozen(x: Tensor) -> nn.Parameter:
    return nn.Parameter(x, requires_grad=False)


def put_fp8_layers(model: nn.Module, is_fp8: Callable[[str], bool]) -> None:
    """Replace linear layers and experts of a model by FP8 ones; their values are lost.

    is_fp8: whether a parameter is to be FP8, by its name. Experts are replaced only if both of their weights are.
    """
    for path, module in list(model.named_modules()):
        parent, _, name = path.rpartition(".")
        layer: nn.Module | None = None
        with torch.device(next(module.parameters(), torch.empty(0, device="meta")).device):
            if type(module) is nn.Linear and name not in _PLAIN and is_fp8(f"{path}.weight"):
                layer = FP8Linear(module.in_features, module.out_features)
            elif type(module) is Experts and is_fp8(f"{path}.w_gate_up") and is_fp8(f"{path}.w_down"):
                layer = FP8Experts(*module.w_down.shape)
        if layer is not None:
            setattr(model.get_submodule(parent), name, layer)


def block_size_of(config: Mapping[str, Any], prefix: str) -> tuple[int, int] | None:
    """A checkpoint's FP8 block, `[out, in]` features, from its config.json; None if its weights are not quantised.

    Raises:
        MLAError: any other quantisation, with `prefix` before the setting's name.
    """
    key = next((key for key in QUANTIZATION if config.get(key)), None)
    if key is None:
        return None
    name, quantization = f"{prefix}{key}", config[key]
    expected = "none, or quant_method 'fp8' with weight_block_size [rows, columns]"
    if not isinstance(quantization, dict):
        raise MLAError(name, "an object, or null", f"{quantization!r:.80}")
    method = quantization.get("quant_method")
    if method != "fp8":
        hint = "use a checkpoint with plain or block-FP8 weights"
        raise MLAError(name, expected, f"quant_method {method!r:.80}", hint)
    block = quantization.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n >= 1 for n in block):
        raise MLAError(name, expected, f"weight_block_size {block!r:.80}")
    return block[0], block[1]
