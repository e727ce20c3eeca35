"""Tile sizes of the experts' matmuls. They depend on shapes, the device and Triton's version only.

They read no tensor values, so the grid of a captured graph serves every length at replay.
"""

import torch

from mla_compile.ops.device import Device, power_of_two
from mla_compile.ops.linear.tiles import ProductTiles, float32_warps

MAX_UNSORTED_PAIRS = 192
"""Most (token, expert) pairs for which each program searches for its own pairs. More are sorted by expert first, in a
launch of its own. With it, GLM's experts in FP8 took 1% less time at 256 pairs and 11% less at 512 on an H100."""

MAX_NARROW_PAIRS = 128
"""Most pairs per expert for which Hopper gets narrow tiles of down. On an H200 narrow was faster at 68, wide at 256."""

MIN_FP8_PRODUCT_PAIRS = 3
"""Fewest pairs per expert for which Hopper multiplies FP8 by FP8; with fewer, converting weights takes no longer than
quantising tokens and sorting. On an H200 GLM's experts took 5% longer at 2 pairs and 16% less at 3."""

MIN_ROUNDED_PAIRS = 64
"""Fewest pairs per expert for which products by bfloat16 weights round each expert's results; with fewer they are in
float32. On an H100 that saves 4% at 64 pairs, 9% at 256 and 3 to 7% at 1,024."""


def moe_tiles(pairs: int, experts: int, products: int, dtype: torch.dtype, device: Device) -> ProductTiles:
    """Tiles of 32 columns for few pairs: narrower tiles fill the GPU better but were slower.

    For many pairs per expert, a tile holds enough tokens that most experts need one tile, and 128 columns on tensor
    cores. On Hopper four warps accumulate 64 x 128 and eight 128 x 256. Eight are used for gate and up above 64 pairs
    per expert, for down above `MAX_NARROW_PAIRS`.

    products: the number of matrices by which a program multiplies: 2 for gate and up, with `columns` each.
    """
    wanted = 5 * pairs // (4 * experts)  # tokens per expert: the average plus a quarter
    many = pairs > MAX_UNSORTED_PAIRS
    if dtype == torch.float32:
        if many and wanted > 16:
            return ProductTiles(64, columns=64 // products, depth=32, warps=float32_warps(device), stages=2)
        return ProductTiles(tokens=16, columns=32, depth=32, warps=4, stages=2)
    if device.capability[0] == 10:  # one kind of instruction for all, as in `matmul_tiles`
        return ProductTiles(tokens=128, columns=128 // products, depth=64, warps=4, stages=3)
    if many and wanted > 32:
        if device.capability[0] == 9:
            if products == 2 and pairs > 64 * experts:
                return ProductTiles(tokens=128, columns=128, depth=64, warps=8, stages=4)
            if pairs > MAX_NARROW_PAIRS * experts:
                return ProductTiles(tokens=128, columns=256, depth=64, warps=8, stages=3)
            return ProductTiles(tokens=64, columns=128 // products, depth=64, warps=4, stages=3)
        tokens = min(128, power_of_two(wanted))
        return ProductTiles(tokens, columns=128 // products, depth=64, warps=tokens // 16, stages=3)
    if products == 1 and pairs <= 8 * experts:
        return ProductTiles(16, columns=32, depth=256, warps=1, stages=3)
    tokens = 16 if pairs <= 8 * experts else 32
    return ProductTiles(tokens, columns=32, depth=128, warps=2 * products, stages=4)


def fp8_moe_tiles(
    pairs: int,
    experts: int,
    products: int,
    dtype: torch.dtype,
    device: Device,
    *,
    in_order: bool = False,
) -> ProductTiles:
    """`moe_tiles` for block-FP8 weights, the fastest on an H100.

    Their depth is at most one block, as the sum of each block is scaled; in float32 a quarter of a block.

    in_order: whether all tiles must add in one order (`has_one_order`). Otherwise few pairs get narrower tiles, which
        are faster. The order of data-centre Blackwell's instructions is untested, so it gets one kind, as in
        `moe_tiles`.
    """
    if dtype == torch.float32:
        return moe_tiles(pairs, experts, products, dtype, device)
    if pairs > 16 * experts or (in_order and device.capability[0] == 10):
        return ProductTiles(tokens=64, columns=128 // products, depth=128, warps=8 // products, stages=3)
    if pairs <= 2 * experts and not in_order:
        if pairs <= 16:
            return ProductTiles(tokens=8, columns=64, depth=128, warps=4, stages=4)
        return ProductTiles(tokens=8, columns=32, depth=128, warps=2, stages=4)
    if pairs <= 8 * experts:
        return ProductTiles(tokens=16, columns=64 // products, depth=128, warps=4, stages=4)
    return ProductTiles(tokens=32, columns=64, depth=128, warps=4, stages=3)


def fp8_product_tiles(pairs: int, experts: int, parts: int) -> tuple[ProductTiles, ProductTiles]:
    """Tiles of FP8 tokens by FP8 weights on Hopper: of gate and up, and of down with half of its columns.

    The fastest of 30 on an H200 with GLM's experts, from 32 to 16,384 tokens; no tile changed a bit. Tiles of 32 tokens
    gained nothing over the next ones. Two programs of 64 tokens fit a multiprocessor.

    parts: the FP8 vectors of a token.
    """
    if pairs <= 16 * experts:
        # Programs that have a multiprocessor alone get more stages; three of gate and up fit one with two stages.
        stages = 4 if pairs <= 8 else 2 if 16 < pairs <= 32 else 3
        gate_up = ProductTiles(16, columns=128, depth=128, warps=4, stages=stages)
        return gate_up, ProductTiles(16, columns=64, depth=128, warps=4, stages=4 if pairs <= 16 else 3)
    if parts == 2 and pairs > 96 * experts:
        both = ProductTiles(128, columns=128, depth=128, warps=8, stages=3)
        return both, both
    gate_up = ProductTiles(64, columns=128, depth=128, warps=4, stages=2)
    return gate_up, gate_up if parts == 1 else ProductTiles(64, columns=64, depth=128, warps=4, stages=3)
