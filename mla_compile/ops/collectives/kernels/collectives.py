"""All-reduce and all-gather through memory that GPUs share (`ops/collectives/peers.py`).

Program i takes the same block of columns of the same token on every GPU:

    writes its block to its own slot ─> signals its peers (release) ─> waits for theirs (acquire) ─> reads all slots

A sum adds the blocks in the order of ranks, in float32, and rounds once. So all GPUs get the same bits, and a token's
bits do not depend on other tokens.

**Reuse of slots.** A program counts its finished collectives: its epoch e. The flag of a peer counts the writes of that
peer, so at epoch e the program waits until every flag exceeds e. Epochs alternate between two buffers of slots. A write
at e + 2 overwrites what the peers read at e. They have finished reading: the program waited at e + 1 for flags of a
later launch of theirs, and a launch begins after the previous one ends (one that starts early waits for that end before
it signals). The size of a slot is fixed for all shapes, so a program never writes to the slot of another. All of this
state is in GPU memory, so replays of CUDA graphs and eager calls may alternate, in the same order on all GPUs.

**No deadlock.** Programs start in the order of their ids, so every GPU starts the lowest program that some GPU has not
finished. A program signals before it waits, so the flags that this one waits for will be set.
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
    """The address of a slot of a rank, as a pointer of the type of `like`."""
    place = ((epoch % 2) * SLOTS + slot) * SLOT_BYTES
    return tl.multiple_of((tl.load(addresses + rank) + place).to(like.dtype), 16)


@triton.jit
def _flag_of(addresses, rank, slot, source, RANKS: tl.constexpr):
    """The address of a rank's flag that counts the writes of `source`."""
    address = tl.load(addresses + rank) + FLAGS + (slot * RANKS + source) * 8
    return address.to(tl.pointer_type(tl.int64))


@triton.jit
def _share(value, column, inside, addresses, slot, epoch, like, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Write a value to this rank's slot, and wait until all other ranks have written theirs."""
    tl.store(_slot_of(addresses, RANK, slot, epoch, like) + column, value, mask=inside)
    tl.debug_barrier()  # after the writes of all threads, so that the release by one thread covers them
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
    """The value in a rank's slot; for this rank, the value in registers."""
    if rank == RANK:
        part = value
    else:
        place = _slot_of(addresses, rank, slot, epoch, like)
        part = tl.load(place + column, mask=inside, other=0.0, cache_modifier=".cg")
    return part


@triton.jit
def _total(value, column, inside, addresses, slot, epoch, like, RANK: tl.constexpr, RANKS: tl.constexpr):
    """The sum of all ranks' values in the order of ranks, in float32."""
    total = _part(value, column, inside, addresses, slot, epoch, like, 0, RANK).to(tl.float32)
    for rank in tl.static_range(1, RANKS):
        total += _part(value, column, inside, addresses, slot, epoch, like, rank, RANK).to(tl.float32)
    return total


@triton.jit
def collective_kernel(
    x,  # [tokens, COLUMNS], strides (x_stride, 1)
    out,  # the sum [tokens, COLUMNS], or with GATHERS [tokens, RANKS, COLUMNS]; contiguous
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
    """All-reduce, or all-gather with GATHERS; grid `[tokens * ceil(COLUMNS / BLOCK)]`."""
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
    x,  # [tokens, COLUMNS], strides (x_stride, 1)
    residual,  # [tokens, COLUMNS], strides (residual_stride, 1)
    weight,  # [COLUMNS] or None
    normed,  # [tokens, COLUMNS], contiguous
    total,  # [tokens, COLUMNS], contiguous: the sum of all ranks' x, plus the residual
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
    """`collective_kernel`, then `rms_norm_kernel`, with the roundings of both; grid `[tokens]`."""
    slot = tl.program_id(0)
    row = slot.to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    dtype = normed.dtype.element_ty
    wait_for_kernel_before(EARLY)
    epoch = tl.load(epochs + slot)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    # Loaded before the wait for the peers.
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
    """`all_reduce` through the memory that the GPUs share."""
    return _collective(x, x.new_empty(x.shape), gathers=False)


def all_gather_triton(x: Tensor, num_parts: int) -> Tensor:
    """`all_gather` through the memory that the GPUs share."""
    tokens, columns = x.shape
    return _collective(x, x.new_empty(tokens, num_parts * columns), gathers=True)


def _collective(x: Tensor, out: Tensor, *, gathers: bool) -> Tensor:
    peers = _peers(x)
    x, x_stride = aligned_rows(x)
    tokens, columns = x.shape
    block, blocks = blocks_of(tokens, columns)
    collective_kernel[(tokens * blocks,)](
        *(x, out, x_stride, peers.addresses, peers.epochs),
        GATHERS=gathers,
        num_warps=max(4, row_warps(block)),
        **_options(peers, x, block),
    )
    return out


def all_reduce_add_rms_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """`all_reduce_add_rms_norm` through the memory that the GPUs share."""
    peers = _peers(x)
    x, x_stride = aligned_rows(x)
    residual, residual_stride = aligned_rows(residual)
    tokens, columns = x.shape
    normed, total = (x.new_empty(tokens, columns) for _ in range(2))
    block = power_of_two(columns)
    all_reduce_add_rms_norm_kernel[(tokens,)](
        *(x, residual, None if weight is None else weight.contiguous(), normed, total),
        *(x_stride, residual_stride, eps, peers.addresses, peers.epochs),
        num_warps=row_warps(block),
        **_options(peers, x, block),
    )
    return normed, total


def _options(peers: Peers, x: Tensor, block: int) -> dict[str, Any]:
    """Launch options of both kernels."""
    sizes = {"RANK": peers.rank, "RANKS": peers.size, "COLUMNS": x.shape[1], "BLOCK": block}
    return sizes | early_options(x)


def _peers(x: Tensor) -> Peers:
    peers = shared.connected(x.device)
    if peers is None:
        hint = "load the model with load_model(parallel=...)"
        raise MLAError("collectives", "GPUs that share memory", "no shared memory", hint)
    return peers
