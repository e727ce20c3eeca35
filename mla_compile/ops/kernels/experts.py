"""What the kernels of experts share: which tokens are padding, and shared experts that there are not."""

import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.operands import ExpertOperands


@triton.jit
def runs(token, row_lens, rows, q_len):
    """Whether a token is none of the padding in the first `rows * q_len` tokens."""
    row = token // q_len
    return token - row * q_len < tl.load(row_lens + row, mask=row < rows, other=q_len)


def padding_of(
    topk_ids: Tensor, row_lens: Tensor | None, q_len: int
) -> tuple[tuple[Tensor, int, int], dict[str, int]]:
    """`row_lens`, `rows` and `q_len` of the kernels, and their TOPK and PADDED."""
    padded = {"TOPK": topk_ids.shape[1], "PADDED": row_lens is not None}
    if row_lens is None:
        return (topk_ids, 0, 1), padded  # a pointer that is not read: any will do
    return (row_lens.contiguous(), row_lens.shape[0], q_len), padded


def shared_weights(operands: ExpertOperands) -> list[Tensor]:
    """Gate, up and down of the shared experts; without these any pointers, which are not read."""
    weights = operands.shared_gate, operands.shared_up, operands.shared_down
    return [operands.w_down if weight is None else weight.contiguous() for weight in weights]
