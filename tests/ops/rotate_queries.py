"""Cases of `mla_rotate_queries`, and their results on every device."""

import torch
from torch import Tensor

from mla_compile.ops.attention.norm_rope import rotate

Case = tuple[Tensor, Tensor, Tensor, bool, bool]


def rotation_case(
    tokens: int,
    heads: int = 3,
    rope: int = 16,
    nope: int = 8,
    *,
    interleaved_in: bool = True,
    interleaved_out: bool = False,
    per_column: bool = False,
    dtype: torch.dtype = torch.float32,
    angles: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    """The op's arguments. `q_pe` is the last columns of each head of a wider tensor; cos and sin lie strided."""
    g = torch.Generator(device).manual_seed(seed)
    queries = torch.randn(tokens, heads, nope + rope, generator=g, device=device).to(dtype)
    width = rope if per_column else rope // 2
    cos, sin = torch.randn(tokens, width, 2, generator=g, device=device).to(angles).unbind(-1)
    return queries[..., nope:], cos, sin, interleaved_in, interleaved_out


def whole(case: Case) -> Tensor:
    """The queries with their other columns."""
    q_pe = case[0]
    base = q_pe._base  # private: torch has no public way from a view to its tensor
    assert base is not None
    return base


def expected(case: Case) -> Tensor:
    """The expected queries with their other columns, in float64."""
    q_pe, cos, sin, *layout = case
    out = whole(case).double()
    out[..., -q_pe.shape[2] :] = rotate(q_pe.double(), cos.double()[:, None], sin.double()[:, None], *layout)
    return out


def check(case: Case, want: Tensor, units: float = 1.5) -> None:
    """units: the error allowed, in units of the dtype, relative to the terms that are added."""
    got, rope = whole(case), case[0].shape[2]
    assert torch.equal(got[..., :-rope].double(), want[..., :-rope]), "columns that are not rotated"
    scale = want.abs().amax().clamp(min=1)
    bound = units * torch.finfo(got.dtype).eps * scale
    assert (got.double() - want).abs().amax() <= bound
