"""What is done to the projected latents before they are cached: the norm and the rotation, in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm (arXiv 1910.07467) over the last dimension of `x` `[..., size]`, in float32 at least.

    Rounded to the dtype of `x` before the weight multiplies, as DeepSeek's models do.
    """
    return weight * F.rms_norm(x, weight.shape, eps=eps)


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved_in: bool, interleaved_out: bool = False
) -> Tensor:
    """Rotate pairs of the last dimension of `x` `[..., d]` (arXiv 2104.09864), in float32 at least, to its dtype.

    Queries and keys that are permuted alike have the same products, so the layout of the result is free.

    cos, sin: `[..., d / 2]`, by pair; or `[..., d]`, those of the pairs' first elements, then of the second ones.
    interleaved_in, interleaved_out: pairs are neighbours in `x`, in the result; else they are halves apart.
    """
    dtype = x.dtype
    if torch.promote_types(dtype, cos.dtype) in (torch.float16, torch.bfloat16):
        x = x.float()
    if interleaved_in:
        pairs = torch.unflatten(x, -1, (-1, 2))  # under a default device Dynamo cannot trace the method
        a, b = pairs[..., 0], pairs[..., 1]
    else:
        a, b = x.chunk(2, dim=-1)
    per_element = cos.shape[-1] == x.shape[-1]
    cos_a, cos_b = cos.chunk(2, dim=-1) if per_element else (cos, cos)
    sin_a, sin_b = sin.chunk(2, dim=-1) if per_element else (sin, sin)
    first, second = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    if interleaved_out:
        return torch.stack([first, second], dim=-1).flatten(-2).to(dtype)
    return torch.cat([first, second], dim=-1).to(dtype)


def rotate_heads(q_pe: Tensor, cos: Tensor, sin: Tensor, interleaved_in: bool, interleaved_out: bool) -> None:
    """`rotate` every head of queries `[tokens, heads, d]` in place; cos, sin: by token."""
    q_pe.copy_(rotate(q_pe, cos[:, None], sin[:, None], interleaved_in, interleaved_out))
