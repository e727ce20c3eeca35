"""What kernels ask of a GPU and of Triton, and how they see a matrix. No value of a tensor is read."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Device:
    """What the plans ask of a GPU."""

    multiprocessors: int
    capability: tuple[int, int]


H200 = Device(132, (9, 0))


@functools.cache
def _cuda_device(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    return Device(properties.multi_processor_count, (properties.major, properties.minor))


def device_of(tensor: Tensor) -> Device:
    """The GPU of a tensor; one on the CPU, where only Triton's interpreter runs, is planned as if for an H200."""
    return _cuda_device(tensor.device.index) if tensor.is_cuda else H200


@functools.cache
def triton_version() -> tuple[int, ...]:
    """Major and minor version of the Triton that compiles the kernels; empty where none is installed."""
    try:
        import triton
    except ImportError:
        return ()
    return tuple(map(int, triton.__version__.split(".")[:2]))


def power_of_two(n: int) -> int:
    """The least power of two that is not below `n` nor below 16, the least side of a tensor core's tile."""
    return max(16, 1 << (n - 1).bit_length())


def row_warps(block: int) -> int:
    """Warps of a program that adds up `block` elements of a row at once: by nothing else, as they decide the order."""
    return max(1, min(8, block // 256))


def aligned_rows(x: Tensor) -> tuple[Tensor, int]:
    """`x` and how far its rows are apart, as Triton sees them for all tensors of so many columns.

    Triton compiles for what it knows of an address and a stride, 16 of them at a time, and which thread adds up what
    may follow from that.
    """
    rows, columns = x.shape
    stride = x.stride(0) if rows > 1 else columns
    as_contiguous = stride == columns or (stride % 16 == 0 and columns % 16 == 0)
    if x.stride(1) == 1 and as_contiguous and x.data_ptr() % 16 == 0:
        return x, stride
    return x.clone(memory_format=torch.contiguous_format), columns
