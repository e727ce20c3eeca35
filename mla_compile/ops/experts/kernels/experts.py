"""Helpers of the expert kernels: which tokens are padding, and the addresses of an expert's weights."""

from typing import Any, NamedTuple, Self

import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.experts.operands import ExpertOperands


class GateUp(NamedTuple):
    """Gate and up weights as arguments of a kernel, or their scales."""

    both: Any  # [experts, 2, SIZE], SIZE: INTERMEDIATE * HIDDEN or its number of blocks; scales: None if not FP8
    shared_gate: Any  # [SHARED, SIZE], as shared_up; None if there is no shared expert
    shared_up: Any

    @classmethod
    def of(cls, operands: ExpertOperands) -> tuple[Self, Self]:
        """The weights and the scales of a call."""
        weights = cls(operands.w_gate_up, *map(_contiguous, (operands.shared_gate, operands.shared_up)))
        scales = cls(operands.gate_up_scale, operands.shared_gate_scale, operands.shared_up_scale)
        return weights, scales


class Down(NamedTuple):
    """Down weights as arguments of a kernel, and their scales; None for those that are absent."""

    down: Any  # [experts, HIDDEN, INTERMEDIATE]
    shared_down: Any  # [HIDDEN, SHARED * INTERMEDIATE]
    scale: Any  # float32 [experts, blocks of HIDDEN, blocks of INTERMEDIATE]
    shared_scale: Any

    @classmethod
    def of(cls, operands: ExpertOperands) -> Self:
        """The weights and the scales of a call."""
        shared_down = _contiguous(operands.shared_down)
        return cls(operands.w_down, shared_down, operands.down_scale, operands.shared_down_scale)


def _contiguous(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.contiguous()


@triton.jit
def gate_and_up(of, expert, shared, is_shared, SHARED: tl.constexpr, SIZE: tl.constexpr):
    """Pointers to gate and up of an expert in a `GateUp`, or of the shared expert `shared`."""
    gate = of.both + expert.to(tl.int64) * (2 * SIZE)
    up = gate + SIZE
    if SHARED > 0:  # noqa: SIM102 - the outer condition is constexpr
        if is_shared:
            gate = of.shared_gate + shared.to(tl.int64) * SIZE
            up = of.shared_up + shared.to(tl.int64) * SIZE
    return gate, up


@triton.jit
def runs(token, row_lens, rows, q_len):
    """Whether a token is valid and not padding of the first `rows * q_len` tokens."""
    row = token // q_len
    return token - row * q_len < tl.load(row_lens + row, mask=row < rows, other=q_len)


def padding_of(row_lens: Tensor | None, q_len: int) -> tuple[Tensor | None, int, int]:
    """The arguments `row_lens`, `rows` and `q_len` of the kernels."""
    return (None, 0, 1) if row_lens is None else (row_lens.contiguous(), row_lens.shape[0], q_len)
