"""Tiles of products by one weight, by a weight for each group, and by the blocks of an FP8 weight.

They are functions of shapes, of the device and of Triton's version alone. No value of a tensor is read, so that a
captured graph's grid serves every length at replay.
"""

from dataclasses import dataclass

import torch

from mla_compile.ops.device import Device, power_of_two, triton_version


@dataclass(frozen=True)
class ProductTiles:
    """How much a program of a product holds, by one weight or by those of experts."""

    tokens: int
    columns: int
    depth: int
    """Elements of a row that are multiplied at a time."""
    warps: int
    stages: int

    def options(self, size: int) -> dict[str, int]:
        """As the kernels' arguments spell them, for products along `size` elements.

        Where these are one step, nothing is there to load ahead. The compiler would keep the room for it all the same,
        beside the result's: more than an H200 has for the largest tiles.
        """
        return {
            "BLOCK_T": self.tokens,
            "BLOCK_C": self.columns,
            "BLOCK_K": self.depth,
            "num_warps": self.warps,
            "num_stages": self.stages if size > self.depth else 1,
        }


def has_one_order(tiles: ProductTiles, device: Device) -> bool:
    """Whether a product of FP8's values, in tiles whose rows are those of the weight, adds along k as one by plain
    weights does.

    Where an instruction takes weights from registers, Triton lays values of FP8 out in another order. Hopper's
    instructions for 64 rows take tokens as they lie in shared memory, so the order is theirs.
    """
    return device.capability[0] == 9 and tiles.columns >= 64 and tiles.tokens >= 16


def float32_warps(device: Device) -> int:
    """Warps of tiles of 64 tokens in float32: with four, Triton 3.8 spills up to 136 bytes a thread on an A100."""
    return 8 if triton_version() >= (3, 8) and device.capability[0] != 9 else 4


# Widest first. Not timed: widths, depths and stages follow those that won among the expert kernels on an H200.
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
    """The widest that waste less than half of their tokens and still give most multiprocessors a program.

    No choice among them changes a bit. A half-precision tile of any size and depth is a sequence of matrix
    instructions that add 16 products each, in the order of k. Hopper has two kinds, one of 16 tokens and one of 64,
    which an H200 was seen to give the same bits. Nobody has tried data-centre Blackwell's two: it gets one kind,
    tiles of 128 tokens. Float32 runs on the plain cores, one fused multiply-add after another in the order of k, at
    one depth.

    columns: of all groups.
    """
    choices: tuple[ProductTiles, ...] = _MATMUL_BLACKWELL
    if dtype == torch.float32:
        widest = ProductTiles(64, 64, 32, warps=float32_warps(device), stages=2)
        choices = _not_wider((widest, *_MATMUL_FLOAT32), tokens)
    elif device.capability[0] != 10:
        choices = _MATMUL_HOPPER if device.capability[0] == 9 else _MATMUL_OTHERS
        choices = _not_wider((*choices, *_MATMUL_FEW), tokens, least=64)
    return _widest_that_fill(choices, tokens, columns, device)


MOST_SHARING = 32
"""Tokens up to which the warps of a program share a product by the blocks of a weight along k."""


def block_parts(k: int) -> int:
    """Into how many parts such a product is divided along k, which decides the order of addition: by `k` alone."""
    return 2 if k <= 1024 else 4


def block_tiles(tokens: int, k: int, device: Device) -> ProductTiles:
    """Tiles of a product of a few tokens by the blocks of a weight, which the warps share: a block of each part.

    On an H200 these were the quickest for GLM-4.7-Flash's products, and from 7168 elements on for DeepSeek-V3's in FP8.
    Other GPUs than the largest have room for fewer stages.
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
    """Tiles of a batch-invariant product of many tokens by the blocks of a weight, and whether each of its parts goes
    to programs of its own.

    The widest that fill most of the GPU. As a program's time is that of its parts, parts are divided unless programs
    with all of them fill half of it. Only the last has room on other GPUs than Hopper.
    """
    choices = _not_wider(_MANY_BLOCKS if device.capability[0] == 9 else _MANY_BLOCKS[-1:], max(64, tokens))
    tiles = _widest_that_fill(choices, tokens, parts * columns, device)
    programs = -(-tokens // tiles.tokens) * -(-columns // tiles.columns)
    return tiles, parts > 1 and 2 * programs < device.multiprocessors


def by_head_tiles(tokens: int, k: int) -> ProductTiles:
    """Tiles of a product of a few tokens by a matrix for each head."""
    if tokens <= 8:
        return ProductTiles(8, columns=32, depth=64 if k < 512 else 128, warps=2, stages=4)
    return ProductTiles(16 if tokens <= 16 else 32, columns=64, depth=64, warps=4, stages=4)


def _not_wider(choices: tuple[ProductTiles, ...], tokens: int, least: int = 0) -> tuple[ProductTiles, ...]:
    """Those of no more tokens than there are, and of `least` or as many as there are."""
    wanted = power_of_two(tokens)
    return tuple(tiles for tiles in choices if min(wanted, least) <= tiles.tokens <= wanted)


def _widest_that_fill(
    choices: tuple[ProductTiles, ...], tokens: int, columns: int, device: Device
) -> ProductTiles:
    """The first that gives most multiprocessors a program, or else the last."""

    def fills(tiles: ProductTiles) -> bool:
        programs = -(-tokens // tiles.tokens) * -(-columns // tiles.columns)
        return 4 * programs >= 3 * device.multiprocessors

    return next(filter(fills, choices), choices[-1])


def splits_matmul(programs: int, device: Device) -> bool:
    """Whether parts of k go to programs of their own, where so many take all of them: few would take long."""
    return programs < 4 * device.multiprocessors
