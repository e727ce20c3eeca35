"""Tiles and grids of the attention kernels: functions of shapes, of the device and of Triton's version alone.

No value of a tensor is read, so that a captured graph's grid serves every length at replay.
"""

import functools
from dataclasses import dataclass

import torch

from mla_compile.ops.device import Device, power_of_two, triton_version

MIN_KEYS = 128
"""Keys of a row under which a further split is not worth its start and its share of the sum."""

SPLIT_UNIT = 64
"""Keys of the first splits of batch-invariant decode. They get longer as DOUBLED says, by a key's place alone: rows,
heads and lengths do not count, as other splits are other bits. Few keys leave most of a GPU idle unless splits are
short; for many keys, short splits would write and read more partial results than latents."""

DOUBLED = (8, 12, 12, 18)
"""The splits from which on they are twice as long as before; one that is named twice is four times as long. So the
first 8 have 64 keys, the next 4 have 128, the next 6 have 512, and all after them 1,024."""

SPLIT_BLOCK = 16
"""Splits whose results are summed at a time."""

_MOST_PARTIAL = 2**26
"""Elements, 256 MB, of all partial results of batch-invariant decode. Its splits are as many as fit the block table."""

_WAVES = 4
"""At most so many programs per multiprocessor; more only write more partial results."""

KV_LORA_RANKS = range(16, 513, 16)
ROPE_HEAD_DIMS = range(16, 129, 16)
"""The widths that the attention kernels over latents take."""


@dataclass(frozen=True)
class AttentionTiles:
    """How much a program of an attention kernel holds."""

    queries: int
    """Of one head, or where nothing is expanded those of all heads, query tokens times heads."""
    keys: int
    warps: int
    stages: int


def decode_tiles(query_rows: int, rank: int, dtype: torch.dtype, device: Device) -> AttentionTiles:
    """Tiles that keep the output, `[rank, rows]` in float32, in registers, and two tiles of keys in shared memory.

    query_rows: `q_len * heads`; of batch-invariant decode `heads` alone, as other tiles may add in another order. On
    Hopper four warps share 64 keys, what one of its matrix instructions takes; two such groups would compute the scores
    twice. With 32 rows of wide latents Triton 3.8 spills up to 288 bytes a thread so; of 32 keys two groups share the
    output, as in `absorbed_tiles`, and spill nothing.
    Elsewhere 32 keys fit the 99 KB of the smaller GPUs. Float32 runs on the plain cores: tensor cores would round it.
    """
    if dtype == torch.float32:
        return AttentionTiles(queries=16, keys=16, warps=8, stages=1)
    if device.capability[0] != 9:
        return AttentionTiles(queries=16, keys=32, warps=4, stages=3)
    rows = min(32 if rank > 256 else 64, power_of_two(query_rows))
    if rank > 256 and rows == 32 and triton_version() >= (3, 8):  # chosen by spills
        return AttentionTiles(queries=32, keys=32, warps=8, stages=3)
    return AttentionTiles(queries=rows, keys=64, warps=4, stages=2)


def absorbed_tiles(query_rows: int, rank: int, dtype: torch.dtype, device: Device) -> AttentionTiles:
    """Those of decode, but for many query rows on Hopper 64 at a time, whose output two groups of four warps share.

    With a rank of 512 an H200 took 8 to 24% less time so from 512 rows on, though GLM's 20 heads make it spill. With
    320 rows or fewer it took 5 to 18% more.
    """
    if query_rows < 512 or dtype == torch.float32 or device.capability[0] != 9:
        return decode_tiles(query_rows, rank, dtype, device)
    return AttentionTiles(queries=64, keys=32, warps=8, stages=3)


@functools.cache
def num_splits(programs: int, max_keys: int, device: Device) -> int:
    """Into how many splits `programs` blocks of query rows divide their keys, `max_keys` at most.

    One program runs on a multiprocessor at a time, so with `s` splits the work takes `ceil(programs * s / SMs)`
    waves, each as long as a split plus its fixed cost, about the time of MIN_KEYS keys. The best `s` fills whole
    waves; of those within 5% of it the least is taken, as more of them write more partial results.
    """
    most = max(1, min(-(-max_keys // MIN_KEYS), _WAVES * device.multiprocessors // programs))

    def cost(splits: int) -> float:
        return -(-programs * splits // device.multiprocessors) * (max_keys / splits + MIN_KEYS)

    best = min(map(cost, range(1, most + 1)))
    return next(s for s in range(1, most + 1) if cost(s) <= 1.05 * best)


def num_fixed_splits(max_keys: int, split_unit: int) -> int:
    """Splits of batch-invariant decode, at least one: `splits_of` of `attention/kernels/fixed_splits.py`."""
    units = -(-max_keys // split_unit)
    splits = units
    for first in DOUBLED:
        splits = min(splits, first) + -(-max(splits - first, 0) // 2)
    return max(1, splits)


def rows_at_once(partial: int) -> int:
    """For how many rows batch-invariant decode has a workspace, where one has so many elements of partial results."""
    return max(1, _MOST_PARTIAL // partial)


def qk_blocks(qk: int) -> tuple[int, int]:
    """Two blocks that hold a head's query, the second may be 0: one of DeepSeek's 192 would be a quarter empty."""
    head = max(16, 1 << (qk.bit_length() - 1))
    return head, power_of_two(qk - head) if qk > head else 0


def prefill_tiles(qk: int, value: int, dtype: torch.dtype, device: Device) -> AttentionTiles:
    """The widest tiles whose queries and one to three tiles of keys and values fit shared memory.

    With GLM's widths the widest spill, and are quicker all the same than any that do not.

    Float32 runs on the plain cores, as tensor cores would round it.
    """
    if dtype == torch.float32:
        return AttentionTiles(queries=16, keys=16, warps=4, stages=1)
    qk, v = sum(qk_blocks(qk)), power_of_two(value)
    room = 220_000 if device.capability[0] == 9 else 96_000
    warps = 8 if v > 128 else 4  # that hold `[64, v]` in float32 in registers

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
