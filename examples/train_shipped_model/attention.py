"""Attention while training: which kernel runs, and that its gradients are right."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, DeepseekV3Config

ATTENTION = "shipped_training"
DROPOUT = 0.1  # on both branches of a layer; the corpus is read dozens of times
PAD_VALUES = False  # some kernels want keys and values of one width; set by `pick_attention`


def training_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | BlockMask | None,
    scaling: float,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention over [batch, heads, tokens, width]; causal without a mask. Returns [batch, tokens, heads, width]."""
    query, key = query.to(value.dtype), key.to(value.dtype)
    width = value.shape[-1]
    if isinstance(mask, BlockMask):
        out = flex_attention(query, key, value, block_mask=mask, scale=scaling)
    else:
        if PAD_VALUES and mask is None:
            value = F.pad(value, (0, query.shape[-1] - width))
        out = F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, scale=scaling)
    out = out[..., :width].transpose(1, 2).contiguous()
    return F.dropout(out, DROPOUT, module.training), None


AttentionInterface.register(ATTENTION, training_attention)


def key_gradient(cfg: DeepseekV3Config, rows: int, length: int, dtype: torch.dtype, pad: bool) -> Tensor:
    """The key's gradient of causal attention over random inputs, which are the same at every call."""
    draw = torch.Generator("cuda").manual_seed(1)
    inputs = []
    for width in (cfg.qk_head_dim, cfg.qk_head_dim, cfg.v_head_dim):
        shape = (rows, length, cfg.num_attention_heads, width)
        inputs.append(torch.randn(shape, device="cuda", generator=draw).bfloat16().to(dtype).transpose(1, 2))
    query, key, value = (x.requires_grad_() for x in inputs)
    padded = F.pad(value, (0, cfg.qk_head_dim - cfg.v_head_dim)) if pad else value
    out = F.scaled_dot_product_attention(query, key, padded, is_causal=True)[..., : cfg.v_head_dim]
    (gradient,) = torch.autograd.grad(out.square().sum(), key)
    return gradient


def pick_attention(cfg: DeepseekV3Config, rows: int, length: int, report: Callable[..., None]) -> None:
    """Keep the fastest kernel on the trunk's own shape among those whose gradients are right: values are 16 wide,
    keys 80, which not every kernel was made for."""
    global PAD_VALUES  # read while compiling, so before the first step
    set_attention("math")
    exact = key_gradient(cfg, 2, 256, torch.float32, pad=False)
    times: dict[tuple[str, bool], float] = {}
    for name, pad in (("flash", True), ("cudnn", True), ("cudnn", False), ("mem_efficient", False)):
        set_attention(name)
        try:
            difference = key_gradient(cfg, 2, 256, torch.bfloat16, pad) - exact
            for _ in range(3):
                torch.cuda.synchronize()
                begin = time.monotonic()
                key_gradient(cfg, rows, length, torch.bfloat16, pad)
                torch.cuda.synchronize()
        except Exception as error:  # whatever a kernel objects to, the next one may do
            report(attention=name, padded=pad, failed=str(error)[:200])
            continue
        off = float(difference.norm() / exact.norm())
        report(attention=name, padded=pad, milliseconds=(time.monotonic() - begin) * 1e3, gradient_error=off)
        if off < 0.05:
            times[name, pad] = time.monotonic() - begin
    if times:
        name, PAD_VALUES = min(times, key=lambda key: times[key])
        set_attention(name)
    else:
        set_attention("mem_efficient", "math")


def set_attention(*allowed: str) -> None:
    for kernel in ("flash", "cudnn", "mem_efficient", "math"):
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(kernel in allowed)
