"""`masked_decode_triton` in Triton's interpreter; `tests/ops/test_interpreted.py` runs this file."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.triton_interpreter import mend_interpreter

mend_interpreter()

from mla_compile.ops.attention.kernels.masked_decode import masked_decode_triton  # noqa: E402
from mla_compile.ops.attention.tiles import AttentionTiles  # noqa: E402
from tests.kernel_cases import MaskedCase, check_masked, masked_case  # noqa: E402

MASKED = ["none", "bool", "float", "heads"]
SMALL = AttentionTiles(queries=16, keys=16, warps=4, stages=1)


def run(case: MaskedCase, **plan) -> None:
    check_masked(case, masked_decode_triton(*case.args(), **plan))


@pytest.mark.parametrize("masked", MASKED)
@pytest.mark.parametrize(
    ("heads", "q_len"),
    [pytest.param(4, 1, marks=pytest.mark.slow), pytest.param(4, 3, marks=pytest.mark.slow), (9, 2)],
)
def test_rows_of_all_lengths_equal_the_definition(heads: int, q_len: int, masked: str) -> None:
    case = masked_case([0, 1, 16, 17, 40], masked=masked, heads=heads, q_len=q_len, keys=40)
    run(case, tiles=SMALL, splits=2)


@pytest.mark.parametrize(
    ("dtype", "masked"),
    [
        (torch.float32, "heads"),
        (torch.float16, "float"),
        (torch.bfloat16, "none"),
        (torch.bfloat16, "bool"),
    ],
    ids=str,
)
def test_dtypes_and_latents_that_all_rows_share(dtype: torch.dtype, masked: str) -> None:
    run(masked_case([0, 3, 70], masked=masked, heads=9, q_len=2, shared=True, dtype=dtype), splits=2)


@pytest.mark.parametrize(("rank", "rope", "heads"), [(512, 64, 20), (256, 32, 40), (48, 16, 5)])
def test_widths_and_heads_of_real_models(rank: int, rope: int, heads: int) -> None:
    sizes = {"keys": 90, "rank": rank, "rope": rope, "heads": heads, "dtype": torch.bfloat16}
    run(masked_case([70, 3], masked="bool", **sizes))


@pytest.mark.parametrize("masked", ["none", "bool"])
@pytest.mark.parametrize("splits", [3, 5, 9])
def test_splits_of_few_tiles_and_of_none(splits: int, masked: str) -> None:
    run(masked_case([0, 70, 33], masked=masked), tiles=SMALL, splits=splits)


@pytest.mark.parametrize("splits", [1, 2])
def test_keys_that_no_query_sees_are_not_read(splits: int) -> None:
    case = masked_case([20, 40], q_len=2)
    for row, length in enumerate((20, 40)):
        for part in (case.kv_c, case.k_pe):
            part[row, length:] = torch.nan
    # In the middle of a text too: all of tile 1, and some keys of tile 0.
    case.mask[..., 16:32] = False
    case.mask[..., 3:7] = False
    out = masked_decode_triton(*case.args(), tiles=SMALL, splits=splits)
    clean = [part.nan_to_num(7.0) for part in (case.kv_c, case.k_pe)]
    check_masked(replace(case, kv_c=clean[0], k_pe=clean[1]), out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_lowest_finite_number_hides_as_it_does_in_torch(dtype: torch.dtype) -> None:
    case = masked_case([5, 70], dtype=dtype)
    lowest = torch.where(case.mask, 0, torch.finfo(dtype).min).to(dtype)
    run(replace(case, mask=lowest), tiles=SMALL, splits=2)
    nothing_else = replace(case, mask=torch.full_like(lowest, torch.finfo(dtype).min))
    run(nothing_else, tiles=SMALL, splits=1)
    # Such a number hides how many keys each split saw, so the result is some mean of the values.
    assert masked_decode_triton(*nothing_else.args(), tiles=SMALL, splits=2).isfinite().all()


def test_tensors_may_have_any_strides() -> None:
    case = masked_case([20, 5], q_len=3, heads=6)
    by_head = case.q_latent.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)
    of_wider = torch.cat([case.q_pe, case.q_pe], -1)[..., :16]
    outermost = case.q_latent.movedim(3, 0).contiguous().movedim(0, 3)
    keys_first = case.mask.transpose(2, 3).contiguous().transpose(2, 3)
    # Rows and keys of a larger cache, one row of it for all in k_pe.
    cache = torch.full((4, 100, 48), torch.nan)
    cache[1:3, :70] = torch.cat([case.kv_c, case.k_pe], -1)
    run(replace(case, q_latent=by_head, q_pe=of_wider, mask=keys_first), tiles=SMALL, splits=2)
    run(replace(case, q_latent=outermost, kv_c=cache[1:3, :70, :32], k_pe=cache[1:2, :70, 32:]))


@pytest.mark.parametrize(
    "shape", [(20,), (1, 20), (3, 20), (4, 1, 20), (2, 1, 1, 20), (4, 1, 1), (2, 4, 3, 20), (1, 1, 1, 1)]
)
def test_a_mask_may_broadcast(shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape) < 0.7
    case = masked_case([20, 20], q_len=3, keys=20)
    run(replace(case, mask=mask), tiles=SMALL, splits=2)
    run(replace(case, mask=mask.float()), tiles=SMALL, splits=2)


@settings(max_examples=6)
@given(st.data())
def test_drawn_batches_and_plans(data: st.DataObject) -> None:
    keys = data.draw(st.integers(1, 90))
    case = masked_case(
        data.draw(st.lists(st.integers(0, keys), min_size=1, max_size=3)),
        masked=data.draw(st.sampled_from(MASKED)),
        q_len=data.draw(st.integers(1, 4)),
        keys=keys,
        shared=data.draw(st.booleans()),
        heads=data.draw(st.integers(1, 9)),
        rank=16 * data.draw(st.integers(1, 4)),
        rope=16 * data.draw(st.integers(1, 2)),
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
        seed=data.draw(st.integers(0, 99)),
    )
    tiles = AttentionTiles(
        data.draw(st.sampled_from([16, 32, 64])), data.draw(st.sampled_from([16, 32, 64])), 4, 1
    )
    run(case, tiles=tiles, splits=data.draw(st.integers(1, 6)))
