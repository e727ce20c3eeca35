"""FP8 experts of many tokens: the launch that multiplies by an expert's weights dequantises them first, once.

A workspace has `NUM_SLOTS` slots for weights in the dtype of x; expert e has slot `e % NUM_SLOTS`. A launch's programs:

    dequantise 0 | shared experts | dequantise 1, multiply 0 | dequantise 2, multiply 1 | ...

While some programs multiply by an expert, others dequantise the next one. A program that multiplies waits until its
expert is dequantised; one that dequantises waits until the programs of the expert `NUM_SLOTS` before have multiplied.

**No deadlock.** A program takes its number from a counter when it starts, and waits only for smaller numbers: those
programs have started.
"""

from typing import Any, NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.experts.operands import ExpertOperands
from mla_compile.ops.experts.tiles import NUM_SLOTS
from mla_compile.ops.linear import fp8
from mla_compile.ops.linear.kernels.fp8 import BLOCK, dequantize_triton

SLOTS = tl.constexpr(NUM_SLOTS)
_BLOCKS = 4
BLOCKS = tl.constexpr(_BLOCKS)
"""Blocks along k of a program that dequantises: enough loads at once to keep the memory busy."""


class Workspace(NamedTuple):
    """Arguments of a kernel: the FP8 weights of one product of all experts, and the counters of its launch."""

    weights: Any  # [experts, MATRICES, ROWS, COLUMNS]
    scales: Any  # float32 [experts, MATRICES, blocks of ROWS, blocks of COLUMNS]
    counters: Any
    """Int32 `[2 * experts + 1]`, first 0: programs that have dequantised each expert, that have multiplied by it, and
    that have started."""


class Matrices(NamedTuple):
    """Constants of a kernel: the matrices of an expert, and the programs that dequantise them."""

    MATRICES: int
    ROWS: int
    COLUMNS: int
    PROGRAMS: int

    @classmethod
    def of(cls, matrices: int, rows: int, columns: int) -> Self:
        row_blocks, tiles = triton.cdiv(rows, fp8.BLOCK), triton.cdiv(columns, fp8.BLOCK * _BLOCKS)
        return cls(matrices, rows, columns, matrices * row_blocks * tiles)


@triton.jit
def _wait(counter, count):
    """Wait until a counter reaches a count; what its programs wrote before is visible then."""
    seen = tl.atomic_add(counter, 0, sem="acquire")
    while seen < count:
        seen = tl.atomic_add(counter, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit
def _count(counter, number):
    tl.debug_barrier()  # after the reads and writes of all threads, so that the release by one thread covers them
    tl.atomic_add(counter, number, sem="release")


@triton.jit
def _programs(starts, expert, inside, BLOCK_T: tl.constexpr, COLUMN_TILES: tl.constexpr):
    """The number of programs that multiply by the weights of experts; see `sort_pairs` for `starts`."""
    start = tl.load(starts + expert, mask=inside, other=0)
    end = tl.load(starts + expert + 1, mask=inside, other=0)
    return (end - start + BLOCK_T - 1) // BLOCK_T * COLUMN_TILES


@triton.jit
def _role(
    workspace, starts, experts, num_shared, M: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_T, COLUMN_TILES
):
    """The expert that this program dequantises, or -1; its number among the programs of its kind."""
    program = tl.atomic_add(workspace.counters + 2 * experts, 1, sem="relaxed")
    e = tl.arange(0, BLOCK_E)
    of_e = _programs(starts, e, e < experts, BLOCK_T, COLUMN_TILES)
    of_e += tl.where(e < experts - 1, M.PROGRAMS, 0)  # of the next expert, which come first
    behind = program - M.PROGRAMS - num_shared
    before = (tl.cumsum(of_e, 0) <= behind) & (e < experts)
    passed = tl.sum(before.to(tl.int32), 0)
    nth = behind - tl.sum(tl.where(before, of_e, 0), 0)
    expert = tl.where((passed < experts - 1) & (nth < M.PROGRAMS), passed + 1, -1)
    number = tl.where(expert >= 0, nth, program - M.PROGRAMS * tl.minimum(passed + 2, experts))
    first = program < M.PROGRAMS
    expert = tl.where(first, 0, tl.where(behind < 0, -1, expert))
    number = tl.where(first, program, tl.where(behind < 0, program - M.PROGRAMS, number))
    return expert, number


@triton.jit
def _dequantize(workspace, slots, expert, number, starts, experts, M: tl.constexpr, BLOCK_T, COLUMN_TILES):
    """BLOCKS blocks of an expert's weights: value times scale in float32, rounded to the dtype of the workspace."""
    ROWS: tl.constexpr = M.ROWS
    COLUMNS: tl.constexpr = M.COLUMNS
    ROW_BLOCKS: tl.constexpr = (ROWS + BLOCK - 1) // BLOCK
    COLUMN_BLOCKS: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    TILES: tl.constexpr = (COLUMN_BLOCKS + BLOCKS - 1) // BLOCKS
    row_block = number // TILES
    matrix = row_block // ROW_BLOCKS
    row_block = row_block % ROW_BLOCKS
    block = number % TILES * BLOCKS + tl.arange(0, BLOCKS)
    of_expert = expert.to(tl.int64) * M.MATRICES + matrix
    row = row_block * BLOCK + tl.arange(0, BLOCK)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    at = row[None, :, None] * COLUMNS + column[:, None, :]
    inside = (row < ROWS)[None, :, None] & (column < COLUMNS)[:, None, :]
    values = tl.load(workspace.weights + of_expert * (ROWS * COLUMNS) + at, mask=inside, other=0.0)
    scale_at = workspace.scales + (of_expert * ROW_BLOCKS + row_block) * COLUMN_BLOCKS + block
    scale = tl.load(scale_at, mask=block < COLUMN_BLOCKS, other=0.0)
    rounded = (values.to(tl.float32) * scale[:, None, None]).to(slots.dtype.element_ty)
    before = expert - SLOTS
    multiplying = _programs(starts, before, before >= 0, BLOCK_T, COLUMN_TILES)
    _wait(workspace.counters + experts + tl.maximum(before, 0), multiplying)
    of_slot = (expert % SLOTS).to(tl.int64) * M.MATRICES + matrix
    tl.store(slots + of_slot * (ROWS * COLUMNS) + at, rounded, mask=inside)
    _count(workspace.counters + expert, 1)


@triton.jit
def dequantize_first(
    workspace,
    slots,  # [NUM_SLOTS, MATRICES, ROWS, COLUMNS]
    starts,  # of `sort_pairs`
    experts,
    num_shared,  # programs of shared experts
    M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    COLUMN_TILES: tl.constexpr,
):
    """Dequantise if this program is one that does. Returns the number of one that multiplies; 2^30, past all, else."""
    expert, number = _role(workspace, starts, experts, num_shared, M, BLOCK_E, BLOCK_T, COLUMN_TILES)
    if expert >= 0:
        _dequantize(workspace, slots, expert, number, starts, experts, M, BLOCK_T, COLUMN_TILES)
    return tl.where(expert >= 0, 2**30, number)


@triton.jit
def wait_for_weights(workspace, expert, shared, experts, M: tl.constexpr):
    """Wait until an expert is dequantised, if this program multiplies by its weights. Returns the expert's slot."""
    slot = expert
    if workspace is not None:
        multiplies = (expert < experts) & (shared < 0)
        _wait(workspace.counters + tl.minimum(expert, experts - 1), tl.where(multiplies, M.PROGRAMS, 0))
        slot = expert % SLOTS
    return slot


@triton.jit
def weights_consumed(workspace, expert, shared, experts):
    """This program has multiplied by an expert's weights, if it had work."""
    if workspace is not None:
        multiplies = (expert < experts) & (shared < 0)
        _count(workspace.counters + experts + tl.minimum(expert, experts - 1), multiplies.to(tl.int32))


def in_workspace(operands: ExpertOperands) -> tuple[ExpertOperands, Workspace, Workspace]:
    """The operands of a call with weights in the dtype of x: slots for routed experts, and shared experts dequantised.

    Returns:
        also the workspaces of gate and up, and of down. They share their slots, as their launches do not overlap.
    """
    x, w_gate_up, w_down = operands.x, operands.w_gate_up, operands.w_down
    experts, hidden, intermediate = w_down.shape
    slots = x.new_empty(NUM_SLOTS, 2 * intermediate, hidden)
    counters = torch.zeros(2, 2 * experts + 1, dtype=torch.int32, device=x.device)

    def shared(weight: Tensor | None, scale: Tensor | None) -> Tensor | None:
        return weight if weight is None or scale is None else dequantize_triton(weight, scale, x.dtype)

    dequantized = operands._replace(
        w_gate_up=slots,
        w_down=slots.flatten()[: slots.numel() // 2].view(NUM_SLOTS, hidden, intermediate),
        shared_gate=shared(operands.shared_gate, operands.shared_gate_scale),
        shared_up=shared(operands.shared_up, operands.shared_up_scale),
        shared_down=shared(operands.shared_down, operands.shared_down_scale),
        gate_up_scale=None,
        down_scale=None,
        shared_gate_scale=None,
        shared_up_scale=None,
        shared_down_scale=None,
    )
    gate_up = Workspace(w_gate_up, operands.gate_up_scale, counters[0])
    return dequantized, gate_up, Workspace(w_down, operands.down_scale, counters[1])
