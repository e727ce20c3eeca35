"""The GPU properties and Triton version that kernels depend on, and matrix strides. No tensor value is read."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Device:
    """The properties of a GPU that decide tiles and grids."""

    multiprocessors: int
    capability: tuple[int, int]


H200 = Device(132, (9, 0))


@functools.cache
def _cuda_device(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    return Device(properties.multi_processor_count, (properties.major, properties.minor))


def device_of(tensor: Tensor) -> Device:
    """The GPU of a tensor. CPU tensors, which only Triton's interpreter uses, get the tiles of an H200."""
    return _cuda_device(tensor.device.index) if tensor.is_cuda else H200


@functools.cache
def triton_version() -> tuple[int, ...]:
    """Major and minor version of the installed Triton; empty if it is not installed."""
    try:
        import triton
    except ImportError:
        return ()
    return tuple(map(int, triton.__version__.split(".")[:2]))


def power_of_two(n: int) -> int:
    """The smallest power of two >= `n` and >= 16, the smallest side of a tensor core's tile."""
    return max(16, 1 << (n - 1).bit_length())


def row_warps(block: int) -> int:
    """Warps of a program that sums `block` elements at once. Nothing else counts, as warps decide the order of sums."""
    return max(1, min(8, block // 256))


def aligned_rows(x: Tensor) -> tuple[Tensor, int]:
    """`x` and its row stride, in a form that Triton compiles alike for all tensors with as many columns.

    Triton specialises a kernel on whether addresses and strides are multiples of 16. The specialisation may decide
    which thread adds which elements. Other tensors are copied.
    """
    rows, columns = x.shape
    stride = x.stride(0) if rows > 1 else columns
    as_contiguous = stride == columns or (stride % 16 == 0 and columns % 16 == 0)
    if x.stride(1) == 1 and as_contiguous and x.data_ptr() % 16 == 0:
        return x, stride
    return x.clone(memory_format=torch.contiguous_format), columns
