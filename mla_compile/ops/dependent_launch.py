"""Kernels that start before the previous kernel ends (programmatic dependent launch), and wait for it inside.

Between two kernels of a CUDA graph a GPU otherwise drains and fills: about a microsecond, as long as many of a decode
step's kernels run. A kernel that starts early may prefetch weights to the L2 cache before it waits. It reads them after
the wait, so it sees the last writes. Our other kernels are launched as usual; an early kernel may stand between any two
of them. Kernels of other packages may start early and not wait: see `kernels/flash_mla.py`.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mla_compile.ops.device import device_of


def starts_early(tensor: Tensor) -> bool:
    """Whether kernels on the device of a tensor can start early."""
    return tensor.is_cuda and device_of(tensor).capability >= (9, 0)


def early_options(tensor: Tensor) -> dict[str, bool]:
    """Arguments of a launch: a kernel's constant EARLY, and the option `launch_pdl`."""
    starts = starts_early(tensor)
    return {"EARLY": starts, "launch_pdl": starts}


@triton.jit
def wait_for_kernel_before(EARLY: tl.constexpr):
    """Must precede all reads and writes. The next kernel may start from here on."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


_LINES = tl.constexpr(32)
"""Cache lines of a matrix row that are requested at once."""


@triton.jit
def prefetch_rows(row_at, K: tl.constexpr):
    """Prefetch matrix rows of K elements, at pointers `[rows]`, to the L2 cache."""
    LINE: tl.constexpr = 1024 // row_at.dtype.element_ty.primitive_bitwidth
    for start in tl.static_range(0, K, LINE * _LINES):
        line = start + LINE * tl.arange(0, _LINES)
        prefetch(row_at[:, None] + tl.minimum(line, K - 1)[None, :])


@triton.jit
def prefetch(pointers):
    """Prefetch the cache lines of 128 bytes at these addresses to the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
