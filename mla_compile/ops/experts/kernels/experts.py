"""What the kernels of experts share: which tokens are padding, and where an expert's weights are."""

from typing import Any, NamedTuple, Self

import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.experts.operands import ExpertOperands


class GateUp(NamedTuple):
    """Gate and up in a kernel, or their scales."""

    both: (
        Any  # [experts, 2, SIZE]: [INTERMEDIATE, HIDDEN], or the blocks of that; None: weights are not in FP8
    )
    shared_gate: Any  # [SHARED, SIZE], as shared_up; None: there is no shared expert
    shared_up: Any

    @classmethod
    def of(cls, operands: ExpertOperands) -> tuple[Self, Self]:
        """Those of a call."""
        weights = cls(operands.w_gate_up, *map(_contiguous, (operands.shared_gate, operands.shared_up)))
        scales = cls(operands.gate_up_scale, operands.shared_gate_scale, operands.shared_up_scale)
        return weights, scales


class Down(NamedTuple):
    """Down in a kernel, and its scales; None: there are none."""

    down: Any  # [experts, HIDDEN, INTERMEDIATE]
    shared_down: Any  # [HIDDEN, SHARED * INTERMEDIATE]
    scale: Any  # float32 [experts, blocks of HIDDEN, blocks of INTERMEDIATE]
    shared_scale: Any

    @classmethod
    def of(cls, operands: ExpertOperands) -> Self:
        """Those of a call."""
        shared_down = _contiguous(operands.shared_down)
        return cls(operands.w_down, shared_down, operands.down_scale, operands.shared_down_scale)


def _contiguous(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.contiguous()


@triton.jit
def gate_and_up(of, expert, shared, is_shared, SHARED: tl.constexpr, SIZE: tl.constexpr):
    """Where an expert's parts of a `GateUp` begin, or those of the shared expert `shared`."""
    gate = of.both + expert.to(tl.int64) * (2 * SIZE)
    up = gate + SIZE
    if SHARED > 0:  # noqa: SIM102 - one of the two is known to the compiler
        if is_shared:
            gate = of.shared_gate + shared.to(tl.int64) * SIZE
            up = of.shared_up + shared.to(tl.int64) * SIZE
    return gate, up


@triton.jit
def runs(token, row_lens, rows, q_len):
    """Whether a token is none of the padding in the first `rows * q_len` tokens."""
    row = token // q_len
    return token - row * q_len < tl.load(row_lens + row, mask=row < rows, other=q_len)


def padding_of(row_lens: Tensor | None, q_len: int) -> tuple[Tensor | None, int, int]:
    """`row_lens`, `rows` and `q_len` of the kernels."""
    return (None, 0, 1) if row_lens is None else (row_lens.contiguous(), row_lens.shape[0], q_len)
