"""The second launch of a split-k matmul: it adds the partial sums in order."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit(do_not_specialize=["elements"])
def add_parts_kernel(parts, out, elements, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the partial sums of PARTS splits, float32 `[PARTS, elements]`, in order."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < elements
    result = tl.load(parts + i, mask=inside, other=0.0)
    for part in range(1, PARTS):
        result += tl.load(parts + part * elements.to(tl.int64) + i, mask=inside, other=0.0)
    tl.store(out + i, result, mask=inside)


def add_parts(parts: Tensor, out: Tensor) -> Tensor:
    """Write `parts.sum(0)`, added in order, to `out`. parts: contiguous, float32; out: contiguous, any dtype."""
    grid = (triton.cdiv(out.numel(), _BLOCK),)
    add_parts_kernel[grid](parts, out, out.numel(), PARTS=parts.shape[0], BLOCK=_BLOCK, num_warps=4)
    return out
