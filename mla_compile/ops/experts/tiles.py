"""Tiles of the experts' products: functions of shapes, of the device and of Triton's version alone.

No value of a tensor is read, so that a captured graph's grid serves every length at replay.
"""

import torch

from mla_compile.ops.device import Device, power_of_two
from mla_compile.ops.linear.tiles import ProductTiles, float32_warps

MOST_UNSORTED_PAIRS = 512
"""(token, expert) pairs up to which each program of the expert kernels finds its own; more are sorted first."""

MOST_NARROW_PAIRS = 128
"""Pairs an expert up to which Hopper gets narrow tiles of down. On an H200 those won at 68 pairs, wide ones at 256."""


def moe_tiles(pairs: int, experts: int, products: int, dtype: torch.dtype, device: Device) -> ProductTiles:
    """For few pairs, tiles of 32 columns: narrower ones, though more of them fill the GPU better, took longer.

    For many of an expert, a tile of so many tokens that most experts need one, and 128 columns on tensor cores. On
    Hopper four warps hold 64 x 128 of that product, eight 128 x 256: of gate and up where experts have more than 64
    pairs, of down where they fill several tiles.

    products: of how many matrices a program holds `columns`: gate and up are two.
    """
    wanted = 5 * pairs // (4 * experts)  # tokens: a quarter above the average
    many = pairs > MOST_UNSORTED_PAIRS
    if dtype == torch.float32:
        if many and wanted > 16:
            return ProductTiles(64, columns=64 // products, depth=32, warps=float32_warps(device), stages=2)
        return ProductTiles(tokens=16, columns=32, depth=32, warps=4, stages=2)
    if device.capability[0] == 10:  # one kind of instructions for all, as in `matmul_tiles`
        return ProductTiles(tokens=128, columns=128 // products, depth=64, warps=4, stages=3)
    if many and wanted > 32:
        if device.capability[0] == 9:
            if products == 2 and pairs > 64 * experts:
                return ProductTiles(tokens=128, columns=128, depth=64, warps=8, stages=4)
            if pairs > MOST_NARROW_PAIRS * experts:
                return ProductTiles(tokens=128, columns=256, depth=64, warps=8, stages=3)
            return ProductTiles(tokens=64, columns=128 // products, depth=64, warps=4, stages=3)
        tokens = min(128, power_of_two(wanted))
        return ProductTiles(tokens, columns=128 // products, depth=64, warps=tokens // 16, stages=3)
    tokens = 16 if pairs <= 8 * experts else 32
    return ProductTiles(tokens, columns=32, depth=128, warps=2 * products, stages=4)


def fp8_moe_tiles(
    pairs: int, experts: int, products: int, dtype: torch.dtype, device: Device, *, in_order: bool
) -> ProductTiles:
    """`moe_tiles` of weights in block FP8: a block deep, as each block's sum is scaled; in float32 a quarter of one.

    Those that an H200 was quickest with.

    in_order: only such as add in one order (`has_one_order`): for few pairs others were quicker, of fewer rows. Of
        data-centre Blackwell's instructions nobody knows which do, so it has one kind, as in `moe_tiles`.
    """
    if dtype == torch.float32:
        return moe_tiles(pairs, experts, products, dtype, device)
    if pairs <= 2 * experts and not in_order:
        if pairs <= 16:
            return ProductTiles(tokens=8, columns=64, depth=128, warps=4, stages=4)
        return ProductTiles(tokens=8, columns=32, depth=128, warps=2, stages=4)
    if pairs > 16 * experts or (in_order and device.capability[0] == 10):
        return ProductTiles(tokens=64, columns=128 // products, depth=128, warps=8 // products, stages=3)
    return ProductTiles(16 if pairs <= MOST_UNSORTED_PAIRS else 32, columns=64, depth=128, warps=4, stages=3)
