"""The Triton decode kernel's plans, and what the compiled code uses on absent GPUs."""

import itertools
import random
import re
from dataclasses import replace

import pytest
import torch

from mla_compile.ops import device as devices
from mla_compile.ops.attention import tiles as attention_tiles
from mla_compile.ops.attention.tiles import (
    MIN_KEYS,
    SPLIT_UNIT,
    AttentionTiles,
    decode_tiles,
    num_fixed_splits,
    num_splits,
    rows_at_once,
)
from mla_compile.ops.device import H200, Device, triton_version
from mla_compile.ops.experts.tiles import moe_tiles
from mla_compile.ops.linear import tiles as linear_tiles
from mla_compile.ops.linear.tiles import matmul_tiles
from tests.kernel_cases import decode_case

GPUS = {
    80: (Device(108, (8, 0)), 166_912),
    86: (Device(84, (8, 6)), 101_376),
    90: (H200, 232_448),
    100: (Device(148, (10, 0)), 232_448),
    120: (Device(170, (12, 0)), 101_376),
}
"""By compute capability: a GPU, and the bytes of shared memory that a program may use."""
WIDTHS = {"GLM": (20, 512, 64), "V3": (128, 512, 64), "Mistral4": (32, 256, 64), "MiniCPM3": (40, 256, 32)}


@pytest.mark.parametrize(
    ("capability", "model", "dtype"),
    [
        *itertools.product([90], WIDTHS, [torch.bfloat16, torch.float32]),
        *itertools.product([80, 86, 100, 120], ["GLM", "MiniCPM3"], [torch.bfloat16]),
        (90, "GLM", torch.float16),
        (80, "GLM", torch.float32),
    ],
    ids=str,
)
def test_compiled_code_fits_the_gpu_and_spills_next_to_nothing(
    capability: int, model: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from mla_compile.ops.attention.kernels.decode import decode_triton, decode_triton_invariant
    from tests.triton_compile import compiled_for

    heads, rank, rope = WIDTHS[model]
    device, shared_memory = GPUS[capability]
    monkeypatch.setattr(devices, "H200", device)
    case = decode_case([64, 64], heads=heads, rank=rank, rope=rope, page_size=64, columns=16, dtype=dtype)
    # 64 queries, the most beside its narrow latents
    widest = model == "MiniCPM3" and capability == 90 and dtype == torch.bfloat16
    most_spilled = 128 if triton_version() >= (3, 9) else 112
    for decode, join, spilled in (
        (decode_triton, "combine", most_spilled),
        (decode_triton_invariant, "join", 400),
    ):
        with compiled_for(capability) as kernels:
            decode(case.operands())
        assert [kernel.name for kernel in kernels] == ["split_kernel", f"{join}_kernel"]
        for kernel in kernels:
            assert kernel.shared_memory <= shared_memory, kernel.name
            most = spilled if widest else 64
            assert kernel.spilled_bytes <= most, f"{kernel.name}: {kernel.spilled_bytes} bytes per thread"
        wanted = "" if dtype == torch.float32 else "wgmma.mma_async" if capability == 90 else "mma.sync"
        assert wanted in kernels[0].text, "the products must run on tensor cores"


@pytest.mark.parametrize("rope", [64, 32])
def test_no_load_of_fp8_latents_is_wider_than_their_alignment(rope: int) -> None:
    """A token of 392 or 328 bytes is aligned to 8, whatever the page. Triton 3.6 took it to be aligned to 16."""
    pytest.importorskip("triton")
    from mla_compile.ops.attention.kernels.decode import decode_triton
    from tests.triton_compile import compiled_for

    loads = []
    for page_size in (1, 48):
        sizes = {"heads": 32, "rank": 256, "rope": rope, "page_size": page_size, "columns": 64}
        case = decode_case([64, 64], **sizes, dtype=torch.bfloat16, fp8=True)
        with compiled_for(90) as kernels:
            decode_triton(case.operands())
        loads.append(len(re.findall(r"ld\.global[.\w]*\.v4\.b32", kernels[0].text)))
    assert loads[0] == loads[1] > 0, "those of queries alone"


@pytest.mark.parametrize(("heads", "rank", "rope"), [(20, 512, 64), (32, 256, 64), (40, 256, 32)], ids=str)
def test_compiled_code_for_fp8_latents_spills_nothing_on_hopper(heads: int, rank: int, rope: int) -> None:
    pytest.importorskip("triton")
    from mla_compile.ops.attention.kernels.decode import decode_triton, decode_triton_invariant
    from tests.triton_compile import compiled_for

    sizes = {"heads": heads, "rank": rank, "rope": rope, "page_size": 64, "columns": 16}
    case = decode_case([64, 64], **sizes, dtype=torch.bfloat16, fp8=True)
    for decode in (decode_triton, decode_triton_invariant):
        with compiled_for(90) as kernels:
            decode(case.operands())
        assert [kernel.spilled_bytes for kernel in kernels] == [0, 0]
        assert "ld.global.v4.b32" in kernels[0].text, "a thread reads 16 bytes of values at a time"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_one_compiled_kernel_serves_all_batch_invariant_calls_of_a_model(dtype: torch.dtype) -> None:
    """Kernels for other rows, tables or `q_len` might add in another order."""
    pytest.importorskip("triton")
    from mla_compile.ops.attention.kernels.decode import decode_triton_invariant
    from tests.triton_compile import compiled_for

    sizes = {"heads": 20, "rank": 512, "rope": 64, "page_size": 64, "dtype": dtype}
    with compiled_for(90) as kernels:
        for lengths, more in (
            ([64], {}),
            ([64] * 16, {"q_len": 16, "columns": 16}),
            ([64, 3], {"q_len": 4, "q_lens": [4, 3]}),
            ([64] * 3, {"q_len": 6, "columns": 301}),
        ):
            case = decode_case(lengths, **more, **sizes)
            decode_triton_invariant(case.operands())
            decode_triton_invariant(case.operands(), at_once=1)
            by_head = case.q_latent.transpose(0, 1).contiguous().transpose(0, 1)
            apart = torch.cat([case.q_pe, case.q_pe, case.q_pe], -1)[
                ..., 8:72
            ]  # not at a multiple of 16 elements
            decode_triton_invariant(replace(case, q_latent=by_head, q_pe=apart).operands())
    for name in ("split_kernel", "join_kernel"):
        assert len({kernel.text for kernel in kernels if kernel.name == name}) == 1, name


@pytest.mark.parametrize("max_keys", [16, 1024, 5000, 131_072])
@pytest.mark.parametrize("programs", [1, 2, 3, 32, 100, 132, 133, 1000])
def test_splits_fill_the_gpu_without_flooding_it(programs: int, max_keys: int) -> None:
    splits = num_splits(programs, max_keys, H200)
    assert 1 <= splits <= max(1, -(-max_keys // MIN_KEYS)), "a split of less than MIN_KEYS keys is of no use"
    assert splits == 1 or programs * splits <= 4 * H200.multiprocessors
    if max_keys >= 132 * MIN_KEYS:
        waves = programs * splits / H200.multiprocessors
        assert waves / -(-waves // 1) > 0.75, f"{waves} waves leave much of the GPU idle"


def test_splits_of_batch_invariant_decode_get_longer_with_their_place() -> None:
    counts = [num_fixed_splits(keys, SPLIT_UNIT) for keys in range(8194)]
    ends = [keys for keys in range(1, 8193) if counts[keys + 1] > counts[keys]]
    lengths = [end - begin for begin, end in itertools.pairwise([0, *ends])]
    assert lengths == [64] * 8 + [128] * 4 + [512] * 6 + [1024] * 4
    assert counts[0] == 1


def test_the_workspace_of_batch_invariant_decode_is_bounded_whatever_the_table() -> None:
    for partial in (1, 20 * 512, 2**26, 2**30):
        rows = rows_at_once(partial)
        assert rows == 1 or rows * partial <= 2**26 < (rows + 1) * partial


def test_a_plan_is_a_function_of_shapes_and_of_tritons_version() -> None:
    assert decode_tiles(20, 512, torch.bfloat16, H200).queries == 32
    assert decode_tiles(80, 512, torch.bfloat16, H200).queries == 32
    assert decode_tiles(80, 256, torch.bfloat16, H200).queries == 64
    assert decode_tiles(1, 512, torch.bfloat16, H200).queries == 16


def test_tiles_of_triton_3_8_differ_where_it_spills_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper for wide latents, elsewhere for 64 tokens in float32."""
    draw = random.Random(0)
    for _ in range(500):
        rows, rank = draw.choice([1, 16, 17, 20, 33, 128, 511, 512, 4096]), draw.randrange(16, 513, 16)
        dtype = draw.choice([torch.bfloat16, torch.float16, torch.float32])
        device, _ = draw.choice(list(GPUS.values()))
        tokens, pairs, products = draw.randint(1, 200), draw.randint(1, 20_000), draw.choice([1, 2])
        tiles = {}
        for version in ((3, 6), (3, 7), (3, 8), (4, 0), ()):
            for module in (attention_tiles, linear_tiles):
                monkeypatch.setattr(module, "triton_version", lambda version=version: version)
            tiles[version] = (
                decode_tiles(rows, rank, dtype, device),
                moe_tiles(pairs, 64, products, dtype, device),
                matmul_tiles(tokens, 4096, dtype, device),
            )
        decode, *products_before = before = tiles.pop((3, 6))
        assert tiles.pop((3, 7)) == tiles.pop(()) == before
        if device is H200 and dtype != torch.float32 and rank > 256 and rows > 16:
            decode = AttentionTiles(32, 32, warps=8, stages=3)
        expected = [
            replace(x, warps=8) if device is not H200 and dtype == torch.float32 and x.tokens == 64 else x
            for x in products_before
        ]
        assert set(tiles.values()) == {(decode, *expected)}
