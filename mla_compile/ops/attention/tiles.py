"""Tiles and grids of the attention kernels: functions of shapes, the device and Triton's version alone.

No value of a tensor is read, so a captured graph's grid serves every length at replay.
"""

import functools
from dataclasses import dataclass

import torch

from mla_compile.ops.device import Device, power_of_two, triton_version

MIN_KEYS = 128
"""The least keys of a split: shorter ones cost more to start and to sum than they save."""

SPLIT_UNIT = 64
"""Keys of the first splits of batch-invariant decode. Later splits are longer (DOUBLED), as a function of a key's
position alone: other splits would give other bits, so rows, heads and lengths must not count. With few keys only short
splits occupy a GPU; with many keys, short splits would write and read more partial results than latents."""

DOUBLED = (8, 12, 12, 18)
"""The splits at which the length doubles; a split that is listed twice is four times as long as the one before. So the
first 8 have 64 keys, the next 4 have 128, the next 6 have 512, and all later ones 1,024."""

SPLIT_BLOCK = 16
"""Splits whose results are summed at once."""

_MAX_PARTIAL = 2**26
"""The most elements, 256 MB, of partial results of batch-invariant decode, whose splits cover the whole block table."""

_WAVES = 4
"""The most programs per multiprocessor; more would only write more partial results."""

KV_LORA_RANKS = range(16, 513, 16)
ROPE_HEAD_DIMS = range(16, 129, 16)
"""The widths that the attention kernels over latents support."""


@dataclass(frozen=True)
class AttentionTiles:
    """The tile sizes and launch options of an attention kernel's program."""

    queries: int
    """Query tokens of one head; for absorbed attention queries, tokens times heads."""
    keys: int
    warps: int
    stages: int


def decode_tiles(
    num_queries: int, rank: int, dtype: torch.dtype, device: Device, *, fp8: bool = False
) -> AttentionTiles:
    """Tiles that keep the output, `[rank, queries]` in float32, in registers, and two tiles of keys in shared memory.

    num_queries: `q_len * heads`; for batch-invariant decode `heads` alone, as other tiles may add in another order. On
    Hopper four warps share 64 keys, the size of one of its matrix instructions; two such groups would compute the
    scores twice. With 32 queries over wide latents this makes Triton 3.8 spill up to 288 bytes per thread. With 32 keys
    two groups share the output, as in `absorbed_tiles`, and nothing spills. So do FP8 latents, converted in registers.
    On other GPUs 32 keys fit the 99 KB of the smaller ones. Float32 runs on CUDA cores: tensor cores would round it.
    """
    if dtype == torch.float32:
        return AttentionTiles(queries=16, keys=16, warps=8, stages=1)
    if device.capability[0] != 9:
        return AttentionTiles(queries=16, keys=32, warps=4, stages=3)
    queries = min(32 if rank > 256 else 64, power_of_two(num_queries))
    if fp8 or (rank > 256 and queries == 32 and triton_version() >= (3, 8)):  # chosen by spills
        return AttentionTiles(queries=queries, keys=32, warps=8, stages=3)
    return AttentionTiles(queries=queries, keys=64, warps=4, stages=2)


def absorbed_tiles(
    num_queries: int, rank: int, dtype: torch.dtype, device: Device, *, fp8: bool = False
) -> AttentionTiles:
    """The tiles of decode; for many queries on Hopper, tiles of 64, whose output two groups of four warps share.

    With rank 512 on an H200, tiles of 64 save 8 to 24% of the time from 512 queries on, though they spill with GLM's 20
    heads. With 320 queries or fewer they cost 5 to 18% more.
    """
    if num_queries < 512 or dtype == torch.float32 or device.capability[0] != 9:
        return decode_tiles(num_queries, rank, dtype, device, fp8=fp8)
    return AttentionTiles(queries=64, keys=32, warps=8, stages=3)


@functools.cache
def num_splits(programs: int, max_keys: int, device: Device) -> int:
    """The number of splits of the keys, at most `max_keys`, of each of `programs` blocks of queries.

    One program runs on a multiprocessor at a time, so with `s` splits the work needs `ceil(programs * s / SMs)`
    waves, each as long as a split plus its fixed cost, about the time of MIN_KEYS keys. The best `s` fills whole
    waves. The result is the smallest within 5% of it, as more splits write more partial results.
    """
    most = max(1, min(-(-max_keys // MIN_KEYS), _WAVES * device.multiprocessors // programs))

    def cost(splits: int) -> float:
        return -(-programs * splits // device.multiprocessors) * (max_keys / splits + MIN_KEYS)

    best = min(map(cost, range(1, most + 1)))
    return next(s for s in range(1, most + 1) if cost(s) <= 1.05 * best)


def num_fixed_splits(max_keys: int, split_unit: int) -> int:
    """The number of splits of batch-invariant decode, at least one; as `splits_of` of `kernels/fixed_splits.py`."""
    units = -(-max_keys // split_unit)
    splits = units
    for first in DOUBLED:
        splits = min(splits, first) + -(-max(splits - first, 0) // 2)
    return max(1, splits)


def rows_at_once(partial: int) -> int:
    """Rows that share the workspace of batch-invariant decode; `partial`: elements of one row's partial results."""
    return max(1, _MAX_PARTIAL // partial)


def qk_blocks(qk: int) -> tuple[int, int]:
    """Sizes of two blocks that hold a head's query; the second may be 0. One block for 192 would be a quarter empty."""
    head = max(16, 1 << (qk.bit_length() - 1))
    return head, power_of_two(qk - head) if qk > head else 0


def prefill_tiles(qk: int, value: int, dtype: torch.dtype, device: Device) -> AttentionTiles:
    """The widest tiles whose queries and one to three tiles of keys and values fit shared memory.

    With GLM's widths the widest tiles spill, and are still faster than all that do not.

    Float32 runs on CUDA cores, as tensor cores would round it.
    """
    if dtype == torch.float32:
        return AttentionTiles(queries=16, keys=16, warps=4, stages=1)
    qk, v = sum(qk_blocks(qk)), power_of_two(value)
    room = 220_000 if device.capability[0] == 9 else 96_000
    warps = 8 if v > 128 else 4  # enough to hold `[64, v]` in float32 in registers

    def fits(tiles: AttentionTiles) -> bool:
        return 2 * (tiles.queries * qk + tiles.stages * tiles.keys * (qk + v)) <= room

    return next(
        tiles
        for tiles in (
            AttentionTiles(queries=128, keys=64, warps=8, stages=3),
            AttentionTiles(queries=128, keys=64, warps=8, stages=2),
            AttentionTiles(queries=64, keys=64, warps=warps, stages=2),
            AttentionTiles(queries=64, keys=32, warps=warps, stages=2),
            AttentionTiles(queries=64, keys=32, warps=warps, stages=1),
            AttentionTiles(queries=16, keys=16, warps=4, stages=1),
        )
        if fits(tiles)
    )
