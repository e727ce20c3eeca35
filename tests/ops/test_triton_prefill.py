"""What the compiled prefill kernels use, on absent GPUs; their results: `test_interpreted.py`."""

from itertools import product

import pytest
import torch

from mla_compile.ops import device as devices
from mla_compile.ops.attention.operands import PrefillOperands
from mla_compile.ops.attention.tiles import AttentionTiles, absorbed_tiles, decode_tiles
from tests.cases import make_case
from tests.kernel_cases import prefill_args
from tests.ops.test_triton_decode import GPUS
from tests.ops.test_triton_decode import WIDTHS as LATENTS

WIDTHS = {"V3": (128, 64, 128), "GLM": (192, 64, 256), "MiniCPM3": (64, 32, 64)}
"""qk_nope_head_dim, qk_rope_head_dim, v_head_dim"""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("model", WIDTHS)
@pytest.mark.parametrize("capability", [pytest.param(86, marks=pytest.mark.slow), 90])
def test_compiled_code_fits_the_gpu_and_spills_little(
    capability: int, model: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from mla_compile.ops.attention.kernels.prefill import prefill_triton
    from tests.triton_compile import compiled_for

    device, shared_memory = GPUS[capability]
    monkeypatch.setattr(devices, "H200", device)
    nope, rope, v = WIDTHS[model]
    case = make_case(prefill=[(20, 16)], heads=4, nope=nope, rope=rope, v=v, rank=32, dtype=dtype)
    with compiled_for(capability) as kernels:
        prefill_triton(PrefillOperands(*prefill_args(case)))
    widest = (
        model == "GLM" and capability == 90 and dtype == torch.bfloat16
    )  # quicker than any that do not spill
    products = ["matmul_kernel"] * 2 if dtype == torch.float32 else []  # else cuBLAS's
    assert [kernel.name for kernel in kernels] == ["gather_kernel", *products, "prefill_kernel"]
    for kernel in kernels:
        assert kernel.shared_memory <= shared_memory
        assert kernel.spilled_bytes <= (600 if widest else 64), f"{kernel.spilled_bytes} bytes per thread"
    wanted = "" if dtype == torch.float32 else "wgmma.mma_async" if capability == 90 else "mma.sync"
    assert wanted in kernels[-1].text, "the products must run on tensor cores"


@pytest.mark.parametrize("absorbed", [False, True])
def test_more_prompts_in_a_step_compile_nothing(absorbed: bool) -> None:
    pytest.importorskip("triton")
    from mla_compile.ops.attention.kernels.absorbed_prefill import prefill_absorbed
    from mla_compile.ops.attention.kernels.prefill import prefill_triton
    from mla_compile.ops.attention.kernels.prefill_metadata import prefill_metadata_triton
    from tests.triton_compile import compiled_for

    variants: dict[str, set[int]] = {}
    for splits, lens in ((2, [(17, 40)]), (3, [(16, 0), (2, 31)]), (9, [(1, 5)] * 64), (16, [(1, 9)] * 127)):
        case = make_case(prefill=lens, heads=4, nope=16, rope=16, v=16, rank=32, dtype=torch.bfloat16)
        args = PrefillOperands(*prefill_args(case))
        rows, keys = len(lens), args.key_slots.shape[1]
        numbers, table = torch.zeros(rows, 2, dtype=torch.int64), torch.zeros(rows, 8, dtype=torch.int32)
        with compiled_for(90) as kernels:
            prefill_absorbed(args, splits=splits) if absorbed else prefill_triton(args)
            prefill_metadata_triton(numbers, numbers, table, len(args.q), keys, 64)
        for kernel in kernels:
            variants.setdefault(kernel.name, set()).add(id(kernel.cubin))
    first = ["absorbed_kernel", "combine_kernel"] if absorbed else ["gather_kernel", "prefill_kernel"]
    assert [*variants] == [*first, "prefill_metadata_kernel"]
    assert all(len(of_kernel) == 1 for of_kernel in variants.values()), variants


@pytest.mark.parametrize(
    ("capability", "model", "tokens", "dtype", "spilled"),
    [
        (90, "GLM", 4, torch.bfloat16, 128),
        (90, "V3", 3, torch.bfloat16, 128),
        (90, "GLM", 48, torch.bfloat16, 320),  # 960 rows: quicker than with any tiles that do not spill
        (90, "V3", 4, torch.bfloat16, 0),  # 512 rows
        (86, "GLM", 4, torch.bfloat16, 0),
        # 64 rows, the most beside its narrow latents
        pytest.param(90, "MiniCPM3", 1, torch.bfloat16, 350, marks=pytest.mark.slow),
        pytest.param(90, "MiniCPM3", 48, torch.bfloat16, 0, marks=pytest.mark.slow),
        pytest.param(86, "V3", 4, torch.bfloat16, 0, marks=pytest.mark.slow),
        pytest.param(90, "GLM", 4, torch.float32, 0, marks=pytest.mark.slow),
        *(pytest.param(gpu, "GLM", 4, torch.bfloat16, 0, marks=pytest.mark.slow) for gpu in (80, 100, 120)),
        pytest.param(90, "GLM", 4, torch.float16, 128, marks=pytest.mark.slow),
        pytest.param(90, "V3", 4, torch.float16, 0, marks=pytest.mark.slow),
        pytest.param(86, "GLM", 4, torch.float32, 0, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_compiled_absorbed_prefill_fits_the_gpu_and_spills_little(
    capability: int,
    model: str,
    tokens: int,
    dtype: torch.dtype,
    spilled: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    from mla_compile.ops.attention.kernels.absorbed_prefill import prefill_absorbed
    from tests.triton_compile import compiled_for

    device, shared_memory = GPUS[capability]
    monkeypatch.setattr(devices, "H200", device)
    heads, rank, rope = LATENTS[model]
    case = make_case(prefill=[(tokens, 300)], heads=heads, nope=16, rope=rope, v=16, rank=rank, dtype=dtype)
    with compiled_for(capability) as kernels:
        prefill_absorbed(PrefillOperands(*prefill_args(case)))
    assert [kernel.name for kernel in kernels] == ["absorbed_kernel", "combine_kernel"]
    assert kernels[0].shared_memory <= shared_memory
    assert kernels[0].spilled_bytes <= spilled, f"{kernels[0].spilled_bytes} bytes per thread"
    wanted = (
        ""
        if dtype == torch.float32
        else {90: "wgmma.mma_async", 100: "tcgen05.mma"}.get(capability, "mma.sync")
    )
    assert wanted in kernels[0].text, "the products must run on tensor cores"


def test_many_rows_of_absorbed_prefill_get_wide_tiles_on_hopper_in_half_precision_and_nowhere_else() -> None:
    for rows, rank, dtype, (device, _) in product(
        (1, 20, 320, 511, 512, 960, 6144),
        (256, 512),
        (torch.bfloat16, torch.float16, torch.float32),
        GPUS.values(),
    ):
        tiles = absorbed_tiles(rows, rank, dtype, device)
        if rows >= 512 and dtype != torch.float32 and device.capability == (9, 0):
            assert tiles == AttentionTiles(queries=64, keys=32, warps=8, stages=3)
        else:
            assert tiles == decode_tiles(rows, rank, dtype, device)
