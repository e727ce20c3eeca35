"""With which tiles and grid the Triton kernels run: functions of shapes, of the device and of Triton's version alone.

No value of a tensor is read, so that a captured graph's grid serves every length at replay.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

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
class Device:
    """What the plans ask of a GPU."""

    multiprocessors: int
    capability: tuple[int, int]


H200 = Device(132, (9, 0))


@functools.cache
def _cuda_device(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    return Device(properties.multi_processor_count, (properties.major, properties.minor))


def device_of(tensor: Tensor) -> Device:
    """The GPU of a tensor; one on the CPU, where only Triton's interpreter runs, is planned as if for an H200."""
    return _cuda_device(tensor.device.index) if tensor.is_cuda else H200


@functools.cache
def triton_version() -> tuple[int, ...]:
    """Major and minor version of the Triton that compiles the kernels; empty where none is installed."""
    try:
        import triton
    except ImportError:
        return ()
    return tuple(map(int, triton.__version__.split(".")[:2]))


def power_of_two(n: int) -> int:
    """The least power of two that is not below `n` nor below 16, the least side of a tensor core's tile."""
    return max(16, 1 << (n - 1).bit_length())


def row_warps(block: int) -> int:
    """Warps of a program that adds up `block` elements of a row at once: by nothing else, as they decide the order."""
    return max(1, min(8, block // 256))


def aligned_rows(x: Tensor) -> tuple[Tensor, int]:
    """`x` and how far its rows are apart, as Triton sees them for all tensors of so many columns.

    Triton compiles for what it knows of an address and a stride, 16 of them at a time, and which thread adds up what
    may follow from that.
    """
    rows, columns = x.shape
    stride = x.stride(0) if rows > 1 else columns
    as_contiguous = stride == columns or (stride % 16 == 0 and columns % 16 == 0)
    if x.stride(1) == 1 and as_contiguous and x.data_ptr() % 16 == 0:
        return x, stride
    return x.clone(memory_format=torch.contiguous_format), columns


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
    """Splits of batch-invariant decode, at least one: `splits_of` of `kernels/fixed_splits.py`."""
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


MOST_UNSORTED_PAIRS = 512
"""(token, expert) pairs up to which each program of the expert kernels finds its own; more are sorted first."""

MOST_NARROW_PAIRS = 128
"""Pairs an expert up to which Hopper gets narrow tiles of down. On an H200 those won at 68 pairs, wide ones at 256."""


def _float32_warps(device: Device) -> int:
    """Warps of tiles of 64 tokens in float32: with four, Triton 3.8 spills up to 136 bytes a thread on an A100."""
    return 8 if triton_version() >= (3, 8) and device.capability[0] != 9 else 4


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
            return ProductTiles(64, columns=64 // products, depth=32, warps=_float32_warps(device), stages=2)
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
        widest = ProductTiles(64, 64, 32, warps=_float32_warps(device), stages=2)
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
    return programs < _WAVES * device.multiprocessors
