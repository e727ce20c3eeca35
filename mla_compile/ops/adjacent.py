"""Weights that are adjacent in memory: two matrices with the same number of columns that form one matrix."""

from torch import Tensor

from mla_compile.torch_internals import storage_key


def lies_before(first: Tensor, second: Tensor) -> bool:
    """Whether two matrices with the same number of columns form one: `second` begins in memory where `first` ends.

    Works on fake tensors too: they share a storage if the tensors that they represent do.
    """
    return (
        storage_key(first) == storage_key(second)
        and first.dtype == second.dtype
        and first.is_contiguous()
        and second.is_contiguous()
        and second.storage_offset() == first.storage_offset() + first.numel()
    )


def num_columns(first: Tensor, second: Tensor | None) -> int:
    """Columns of a product with these weights."""
    return first.shape[0] + (0 if second is None else second.shape[0])


def one_matrix(first: Tensor, second: Tensor | None) -> Tensor:
    """Adjacent weights as one matrix `[n_first + n_second, k]`, without a copy."""
    if second is None:
        return first
    k = first.shape[1]
    return first.as_strided((first.shape[0] + second.shape[0], k), (k, 1))
