"""Tile sizes of matmuls by one weight, by one weight per group, and by the blocks of an FP8 weight.

Tile sizes depend on shapes, the device and Triton's version only. They read no tensor values, so the grid of a captured
graph serves every length at replay.
"""

from dataclasses import dataclass

import torch

from mla_compile.ops.device import Device, power_of_two, triton_version


@dataclass(frozen=True)
class ProductTiles:
    """Tile sizes of a program that multiplies tokens by one weight or by the weights of experts."""

    tokens: int
    columns: int
    depth: int
    """Elements of k per iteration."""
    warps: int
    stages: int

    def options(self, size: int) -> dict[str, int]:
        """The launch options for a matmul with `size` elements along k.

        A loop of one iteration gets one stage, as there is nothing to prefetch. The compiler would still allocate
        shared memory for more stages, and the largest tiles would exceed that of an H200.
        """
        return {
            "BLOCK_T": self.tokens,
            "BLOCK_C": self.columns,
            "BLOCK_K": self.depth,
            "num_warps": self.warps,
            "num_stages": self.stages if size > self.depth else 1,
        }


def has_one_order(tokens: int, rows: int, device: Device) -> bool:
    """Whether an FP8 matmul of tiles with weight rows along M adds along k in the order of a half-precision one.

    For an instruction that reads weights from registers, Triton lays FP8 values out in another order. Hopper's
    instructions for M = 64 read the tokens from shared memory, and the order in memory is the order along k.
    """
    return device.capability[0] == 9 and rows >= 64 and tokens >= 16


def float32_warps(device: Device) -> int:
    """Warps of float32 tiles of 64 tokens. With four, Triton 3.8 spills up to 136 bytes per thread on an A100."""
    return 8 if triton_version() >= (3, 8) and device.capability[0] != 9 else 4


# Widest first. Not timed: widths, depths and stages are those of the fastest expert kernels on an H200.
_MATMUL_HOPPER = (
    ProductTiles(128, 256, 64, warps=8, stages=3),
    ProductTiles(64, 128, 64, warps=4, stages=3),
    ProductTiles(64, 64, 128, warps=4, stages=3),
    ProductTiles(64, 32, 128, warps=4, stages=4),
    ProductTiles(64, 16, 128, warps=4, stages=4),
)

_MATMUL_OTHERS = (
    ProductTiles(128, 128, 64, warps=8, stages=3),
    ProductTiles(64, 64, 64, warps=4, stages=3),
    ProductTiles(64, 32, 128, warps=4, stages=3),
)

_MATMUL_FEW = (
    ProductTiles(32, 32, 128, warps=4, stages=4),
    ProductTiles(32, 16, 256, warps=2, stages=4),
    ProductTiles(16, 32, 128, warps=4, stages=4),
    ProductTiles(16, 16, 256, warps=2, stages=4),
)

_MATMUL_BLACKWELL = (
    ProductTiles(128, 128, 64, warps=4, stages=3),
    ProductTiles(128, 64, 64, warps=4, stages=3),
    ProductTiles(128, 32, 64, warps=4, stages=4),
)

_MATMUL_FLOAT32 = (
    ProductTiles(32, 32, 32, warps=4, stages=2),
    ProductTiles(16, 16, 32, warps=2, stages=3),
)


def matmul_tiles(tokens: int, columns: int, dtype: torch.dtype, device: Device) -> ProductTiles:
    """The widest tiles that waste less than half of their tokens and still give most multiprocessors a program.

    The choice never changes bits. A half-precision tile of any size and depth is a sequence of matrix instructions
    that add 16 products each, in the order of k. Hopper has two kinds, for 16 and for 64 tokens; on an H200 both gave
    the same bits. The two kinds of data-centre Blackwell are untested, so it gets one kind: tiles of 128 tokens.
    Float32 runs on CUDA cores, one fused multiply-add after another in the order of k, at one depth.

    columns: output columns of all groups together.
    """
    choices: tuple[ProductTiles, ...] = _MATMUL_BLACKWELL
    if dtype == torch.float32:
        widest = ProductTiles(64, 64, 32, warps=float32_warps(device), stages=2)
        choices = _not_wider((widest, *_MATMUL_FLOAT32), tokens)
    elif device.capability[0] != 10:
        choices = _MATMUL_HOPPER if device.capability[0] == 9 else _MATMUL_OTHERS
        choices = _not_wider((*choices, *_MATMUL_FEW), tokens, least=64)
    return _widest_that_fill(choices, tokens, columns, device)


MAX_SHARING = 32
"""Most tokens for which the warps of a program split the blocks of a weight along k."""


def block_parts(k: int) -> int:
    """The number of splits of such a matmul along k. It decides the order of addition, so it depends on `k` only."""
    return 2 if k <= 1024 else 4


def block_tiles(tokens: int, k: int, device: Device) -> ProductTiles:
    """Tiles for a few tokens: each iteration takes one block of every split along k, one per warp.

    On an H200 these were the fastest for GLM-4.7-Flash's matmuls, and for DeepSeek-V3's in FP8 with k from 7168 on.
    GPUs with less shared memory get fewer stages.
    """
    rows, parts = 8 if tokens <= 8 else 16 if tokens <= 16 else 32, block_parts(k)
    roomy = device.capability[0] in (9, 10)
    columns = 32 if k >= 7168 and roomy else 16
    stages = 3 if k <= 1024 or k >= 7168 or not roomy else 4 if rows < 32 else 5
    return ProductTiles(rows, columns, depth=128 * parts, warps=parts, stages=stages)


_MANY_BLOCKS = (
    ProductTiles(128, 128, 128, warps=8, stages=3),
    ProductTiles(64, 128, 128, warps=8, stages=3),
    ProductTiles(64, 64, 128, warps=4, stages=3),
)


def many_block_tiles(tokens: int, columns: int, parts: int, device: Device) -> tuple[ProductTiles, bool]:
    """Tiles of a batch-invariant matmul of many tokens by the blocks of a weight, and whether to split k.

    The tiles are the widest that fill most of the GPU. Split-k gives each split along k its own programs. It is used
    unless programs that compute all splits fill half of the GPU. Shared memory of GPUs other than Hopper fits the last
    tiles only.
    """
    choices = _not_wider(_MANY_BLOCKS if device.capability[0] == 9 else _MANY_BLOCKS[-1:], max(64, tokens))
    tiles = _widest_that_fill(choices, tokens, parts * columns, device)
    programs = -(-tokens // tiles.tokens) * -(-columns // tiles.columns)
    return tiles, parts > 1 and 2 * programs < device.multiprocessors


def by_head_tiles(tokens: int, k: int) -> ProductTiles:
    """Tiles of a matmul by one matrix per head. All add 16 products at a time, in the order of k."""
    if tokens <= 8:
        return ProductTiles(8, columns=32, depth=64 if k < 512 else 128, warps=2, stages=4)
    return ProductTiles(
        16 if tokens <= 16 else 32 if tokens <= 64 else 64, columns=64, depth=64, warps=4, stages=4
    )


def _not_wider(choices: tuple[ProductTiles, ...], tokens: int, least: int = 0) -> tuple[ProductTiles, ...]:
    """The choices whose tiles hold at most the given tokens, rounded up, and at least `least` tokens or all of them."""
    wanted = power_of_two(tokens)
    return tuple(tiles for tiles in choices if min(wanted, least) <= tiles.tokens <= wanted)


def _widest_that_fill(
    choices: tuple[ProductTiles, ...], tokens: int, columns: int, device: Device
) -> ProductTiles:
    """The first choice that gives most multiprocessors a program, or else the last choice."""

    def fills(tiles: ProductTiles) -> bool:
        programs = -(-tokens // tiles.tokens) * -(-columns // tiles.columns)
        return 4 * programs >= 3 * device.multiprocessors

    return next(filter(fills, choices), choices[-1])


def splits_matmul(programs: int, device: Device) -> bool:
    """Whether to split k, given the number of programs without a split: few programs would take long."""
    return programs < 4 * device.multiprocessors
