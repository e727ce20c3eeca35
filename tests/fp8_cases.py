"""Weights in block FP8 for tests, and the definition of products by them."""

import torch
from torch import Tensor

from mla_compile.ops.linear.fp8 import DTYPE, scale_shape


def fp8_weight(*shape: int, seed: int = 0, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """A weight, or a stack, of about 1 / sqrt(columns), and scales that differ by block up to four times."""
    g = torch.Generator(device).manual_seed(seed)
    weight = (torch.randn(shape, generator=g, device=device) * 64).clamp(-448, 448).to(DTYPE)
    scale = torch.rand(scale_shape(shape), generator=g, device=device) * 1.5 + 0.5
    return weight, scale * (shape[-1] ** -0.5 / 64)


def values_of(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight that a product in `dtype` has, in float64: element by element."""
    rows = torch.arange(weight.shape[-2], device=weight.device) // 128
    columns = torch.arange(weight.shape[-1], device=weight.device) // 128
    return (weight.float() * scale[..., rows[:, None], columns[None, :]]).to(dtype).double()


def linear_by_definition(x: Tensor, *weights: tuple[Tensor, Tensor]) -> Tensor:
    """`fp8_linear` in float64."""
    return torch.cat([x.double() @ values_of(w, s, x.dtype).mT for w, s in weights], dim=-1)


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 values of `[..., columns]`, and a scale `[..., columns / 128]` for each block: its largest becomes 448."""
    blocks = x.float().unflatten(-1, (-1, 128))
    largest = blocks.abs().amax(-1)
    scale = torch.where(largest == 0, 1.0, largest / 448)
    return (blocks / scale[..., None]).to(DTYPE).flatten(-2), scale


def in_fp8(x: Tensor) -> Tensor:
    """The numbers that `quantised` stores, in float64."""
    values, scale = quantised(x)
    return values.double() * scale.double().repeat_interleave(128, dim=-1)
