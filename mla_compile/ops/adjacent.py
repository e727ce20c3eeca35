"""Weights that lie side by side in memory: two matrices with equally many columns that are the rows of one."""

from torch import Tensor

from mla_compile.torch_internals import storage_key


def lies_before(first: Tensor, second: Tensor) -> bool:
    """Whether matrices with equally many columns are the rows of one: `second` begins in memory where `first` ends.

    Of fake tensors too, which share a storage where the tensors do that they stand for.
    """
    return (
        storage_key(first) == storage_key(second)
        and first.dtype == second.dtype
        and first.is_contiguous()
        and second.is_contiguous()
        and second.storage_offset() == first.storage_offset() + first.numel()
    )


def num_columns(first: Tensor, second: Tensor | None) -> int:
    """Of the result of a product by these weights."""
    return first.shape[0] + (0 if second is None else second.shape[0])


def one_matrix(first: Tensor, second: Tensor | None) -> Tensor:
    """`[n_first + n_second, k]`, of weights that lie side by side."""
    if second is None:
        return first
    k = first.shape[1]
    return first.as_strided((first.shape[0] + second.shape[0], k), (k, 1))
