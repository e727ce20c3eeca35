"""Rotary position embedding (arXiv 2104.09864), also with YaRN (arXiv 2309.00071)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from mla_compile.errors import MLAError
from mla_compile.models.settings import ROPE_SETTINGS, check_settings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Rope:
    """The rotation of one model.

    inv_freq: radians per position of each pair of dimensions, float32 values.
    attention_factor: multiplies cos and sin.
    softmax_factor: multiplies the softmax scale: DeepSeek's `mscale ** 2` under YaRN with `mscale_all_dim`, else 1.
    interleave: pairs in a checkpoint's projections are `(0, 1), (2, 3), ...`, instead of `(i, i + size / 2)`.
    """

    inv_freq: tuple[float, ...]
    attention_factor: float
    softmax_factor: float
    interleave: bool

    @classmethod
    def from_config(cls, config: "PreTrainedConfig", prefix: str = "config.") -> "Rope":
        """Read a config's `rope_parameters`.

        prefix: precedes a setting's name in an error.

        Raises:
            MLAError: a type other than "default" and "yarn", or a setting out of its limits, named.
        """
        prefix = f"{prefix}rope_parameters"
        parameters: Any = config.rope_parameters
        if not isinstance(parameters, dict):
            raise MLAError(prefix, "a table", repr(parameters))
        prefix = f"{prefix}."
        check_settings(parameters, ROPE_SETTINGS, prefix)
        rope_type = parameters.get("rope_type")
        for name in ("rope_theta", "factor") if rope_type == "yarn" else ("rope_theta",):
            if name not in parameters:
                raise MLAError(f"{prefix}{name}", ROPE_SETTINGS[name].expected, "none")
        if parameters.get("partial_rotary_factor", 1.0) != 1.0:
            raise MLAError(f"{prefix}partial_rotary_factor", "1.0", parameters["partial_rotary_factor"])
        # transformers' DeepSeek-V2 has no rope_interleave: it always interleaves. Layers of Llama do not read it.
        interleave = bool(getattr(config, "rope_interleave", True))
        if rope_type == "default":
            size = getattr(config, "qk_rope_head_dim", None) or config.head_dim
            exponents = torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size
            inv_freq = 1.0 / (parameters["rope_theta"] ** exponents)
            return cls(tuple(inv_freq.tolist()), 1.0, 1.0, interleave)
        if rope_type == "yarn":
            fast, slow = parameters.get("beta_fast") or 32, parameters.get("beta_slow") or 1
            if fast < slow:
                raise MLAError(f"{prefix}beta_fast", f"at least beta_slow = {slow}", fast)
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            with torch.device("cpu"):
                inv_freq, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config)
            return cls(tuple(inv_freq.tolist()), attention_factor, _softmax_factor(parameters), interleave)
        raise MLAError(f"{prefix}rope_type", "'default' or 'yarn'", repr(rope_type))


def _softmax_factor(parameters: dict[str, Any]) -> float:
    """The temperature of scores under YaRN, from DeepSeek-V2's modelling code, without YaRN's `attention_factor`."""
    scale, mscale = parameters["factor"], parameters.get("mscale_all_dim")
    if not mscale or scale <= 1:
        return 1.0
    return float((0.1 * mscale * math.log(scale) + 1.0) ** 2)


class RotaryEmbedding(nn.Module):
    """Positions to angles."""

    inv_freq: Tensor

    def __init__(self, rope: Rope) -> None:
        super().__init__()
        self.rope = rope
        self.register_buffer("inv_freq", torch.tensor(rope.inv_freq, dtype=torch.float32), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # `to_empty` loses the values, and conversions their precision.
        self.inv_freq = torch.tensor(self.rope.inv_freq, dtype=torch.float32, device=self.inv_freq.device)
        return self

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions `[tokens]` to cos and sin `[tokens, qk_rope_head_dim / 2]`, float32.

        Computed, not looked up: a table would bound the positions and add a gather.
        """
        angles = positions.to(torch.float32).unsqueeze(-1) * self.inv_freq
        return angles.cos() * self.rope.attention_factor, angles.sin() * self.rope.attention_factor
