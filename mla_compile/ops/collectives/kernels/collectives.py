"""All-reduce and all-gather through memory that GPUs share (`ops/collectives/peers.py`).

Of every GPU the program with the same number takes the same part of the same row:

    puts its part into its own slot ─> tells its peers (release) ─> waits for theirs (acquire) ─> reads all slots

A sum adds up the ranks' parts in their order, in float32, and rounds once. So all GPUs get the same bits, and a row's
bits do not depend on the rows beside it.

**How a slot is used again.** A program counts the collectives that it has taken part in, its epoch e. A peer's flag
counts what the peer has put into its slot, so at e the program waits until each flag is above e. There are two buffers
of slots, used by turns. What a program writes at e + 2 it writes over what its peers read at e. They have read it: it
waited at e + 1 for flags that they set in a later launch, and a launch begins when the one before has ended (those that
start early wait for that first, before they signal). Slots keep their size whatever rows have, so that no program
writes to the slot of another one. All of this is in the GPU's memory, so a replayed CUDA graph and eager calls may
follow each other as they like, if they do so alike on all GPUs.

**Why nobody waits for ever.** Programs start in the order of their numbers. So the least one that some GPU has not
finished runs on every GPU, or will: it signals before it waits, and then has all that it waits for.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mla_compile.errors import MLAError
from mla_compile.ops.collectives import peers as shared
from mla_compile.ops.collectives.peers import Peers, blocks_of
from mla_compile.ops.dependent_launch import early_options, wait_for_kernel_before
from mla_compile.ops.device import aligned_rows, power_of_two, row_warps

SLOTS = tl.constexpr(shared.SLOTS)
SLOT_BYTES = tl.constexpr(shared.SLOT_BYTES)
FLAGS = tl.constexpr(shared.FLAGS)


@triton.jit
def _slot_of(addresses, rank, slot, epoch, like):
    """Where the slot of a rank begins: a pointer as `like`."""
    place = ((epoch % 2) * SLOTS + slot) * SLOT_BYTES
    return tl.multiple_of((tl.load(addresses + rank) + place).to(like.dtype), 16)


@triton.jit
def _flag_of(addresses, rank, slot, source, RANKS: tl.constexpr):
    """Where a rank counts what `source` has put into its slot."""
    address = tl.load(addresses + rank) + FLAGS + (slot * RANKS + source) * 8
    return address.to(tl.pointer_type(tl.int64))


@triton.jit
def _share(value, column, inside, addresses, slot, epoch, like, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Put a value into this rank's slot; all others have put theirs when this returns."""
    tl.store(_slot_of(addresses, RANK, slot, epoch, like) + column, value, mask=inside)
    tl.debug_barrier()  # all threads have written: the release of the one that signals covers them
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            tl.atomic_add(_flag_of(addresses, rank, slot, RANK, RANKS), 1, sem="release", scope="sys")
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            flag = _flag_of(addresses, RANK, slot, rank, RANKS)
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            while seen <= epoch:
                seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    tl.debug_barrier()


@triton.jit
def _part(value, column, inside, addresses, slot, epoch, like, rank: tl.constexpr, RANK: tl.constexpr):
    """What a rank has put into its slot; of this rank, what it has in registers."""
    if rank == RANK:
        part = value
    else:
        place = _slot_of(addresses, rank, slot, epoch, like)
        part = tl.load(place + column, mask=inside, other=0.0, cache_modifier=".cg")
    return part


@triton.jit
def _total(value, column, inside, addresses, slot, epoch, like, RANK: tl.constexpr, RANKS: tl.constexpr):
    """The sum of all ranks' parts in their order, in float32."""
    total = _part(value, column, inside, addresses, slot, epoch, like, 0, RANK).to(tl.float32)
    for rank in tl.static_range(1, RANKS):
        total += _part(value, column, inside, addresses, slot, epoch, like, rank, RANK).to(tl.float32)
    return total


@triton.jit
def collective_kernel(
    x,  # [rows, COLUMNS], rows x_stride apart
    out,  # [rows, COLUMNS], contiguous, the sum; to gather [rows, RANKS, COLUMNS]
    x_stride,
    addresses,
    epochs,
    GATHERS: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid `[rows * ceil(COLUMNS / BLOCK)]`."""
    slot = tl.program_id(0)
    blocks: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    row = (slot // blocks).to(tl.int64)
    start = (slot % blocks) * BLOCK
    column = tl.arange(0, BLOCK)
    inside = start + column < COLUMNS
    wait_for_kernel_before(EARLY)
    epoch = tl.load(epochs + slot)
    value = tl.load(x + row * x_stride + start + column, mask=inside, other=0.0)
    _share(value, column, inside, addresses, slot, epoch, out, RANK, RANKS)
    if GATHERS:
        for rank in tl.static_range(RANKS):
            part = _part(value, column, inside, addresses, slot, epoch, out, rank, RANK)
            tl.store(out + (row * RANKS + rank) * COLUMNS + start + column, part, mask=inside)
    else:
        total = _total(value, column, inside, addresses, slot, epoch, out, RANK, RANKS)
        tl.store(out + row * COLUMNS + start + column, total.to(out.dtype.element_ty), mask=inside)
    tl.store(epochs + slot, epoch + 1)


@triton.jit
def all_reduce_add_rms_norm_kernel(
    x,  # [rows, COLUMNS], rows x_stride apart
    residual,  # likewise
    weight,  # [COLUMNS]; None: no weight
    normed,  # [rows, COLUMNS], contiguous
    total,  # likewise: the sum of all ranks' x, and the residual
    x_stride,
    residual_stride,
    eps,
    addresses,
    epochs,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid `[rows]`: `collective_kernel`, then `rms_norm_kernel`, with the roundings of both."""
    slot = tl.program_id(0)
    row = slot.to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    dtype = normed.dtype.element_ty
    wait_for_kernel_before(EARLY)
    epoch = tl.load(epochs + slot)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    # Asked for before the peers are waited for.
    added = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0
    if weight is not None:
        factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    _share(value, column, inside, addresses, slot, epoch, normed, RANK, RANKS)
    reduced = _total(value, column, inside, addresses, slot, epoch, normed, RANK, RANKS).to(dtype)
    rounded = (reduced.to(tl.float32) + added).to(dtype)
    tl.store(total + row * COLUMNS + column, rounded, mask=inside)
    summed = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(summed * summed, 0) / COLUMNS + eps)
    out = (summed * scale).to(dtype).to(tl.float32) * factor
    tl.store(normed + row * COLUMNS + column, out.to(dtype), mask=inside)
    tl.store(epochs + slot, epoch + 1)


def all_reduce_triton(x: Tensor) -> Tensor:
    """What `all_reduce` computes, with its argument."""
    rows, columns = x.shape
    return _collective(x, x.new_empty(rows, columns), gathers=False)


def all_gather_triton(x: Tensor, num_parts: int) -> Tensor:
    """What `all_gather` computes, with its arguments."""
    rows, columns = x.shape
    return _collective(x, x.new_empty(rows, num_parts * columns), gathers=True)


def _collective(x: Tensor, out: Tensor, *, gathers: bool) -> Tensor:
    peers = _peers(x)
    x, x_stride = aligned_rows(x)
    rows, columns = x.shape
    block, blocks = blocks_of(rows, columns)
    collective_kernel[(rows * blocks,)](
        *(x, out, x_stride, peers.addresses, peers.epochs),
        GATHERS=gathers,
        num_warps=max(4, row_warps(block)),
        **_options(peers, x, block),
    )
    return out


def all_reduce_add_rms_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """What `all_reduce_add_rms_norm` computes, with its arguments."""
    peers = _peers(x)
    x, x_stride = aligned_rows(x)
    residual, residual_stride = aligned_rows(residual)
    rows, columns = x.shape
    normed, total = (x.new_empty(rows, columns) for _ in range(2))
    block = power_of_two(columns)
    all_reduce_add_rms_norm_kernel[(rows,)](
        *(x, residual, None if weight is None else weight.contiguous(), normed, total),
        *(x_stride, residual_stride, eps, peers.addresses, peers.epochs),
        num_warps=row_warps(block),
        **_options(peers, x, block),
    )
    return normed, total


def _options(peers: Peers, x: Tensor, block: int) -> dict[str, Any]:
    """What both kernels are launched with."""
    sizes = {"RANK": peers.rank, "RANKS": peers.size, "COLUMNS": x.shape[1], "BLOCK": block}
    return sizes | early_options(x)


def _peers(x: Tensor) -> Peers:
    peers = shared.connected(x.device)
    if peers is None:
        hint = "load the model with load_model(parallel=...)"
        raise MLAError("collectives", "GPUs that share memory", "none that are connected", hint)
    return peers
