"""`norm_rope_append_triton` in Triton's interpreter; `tests/ops/test_interpreted.py` runs this file."""

import itertools

import pytest
import torch

from tests.triton_interpreter import mend_interpreter

mend_interpreter()

from mla_compile.ops.attention.kernels.norm_rope_append import norm_rope_append_triton  # noqa: E402
from mla_compile.ops.attention.kernels.rotate_queries import rotate_queries_triton  # noqa: E402
from tests.kernel_cases import check_norm_rope_append, fp8_cache, norm_rope_append_case  # noqa: E402


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow), torch.bfloat16], ids=str
)
@pytest.mark.parametrize(
    "widths", [(512, 64), pytest.param((256, 32), marks=pytest.mark.slow), (48, 20)], ids=str
)
def test_latents_go_to_their_slots_and_masked_ones_nowhere(
    widths: tuple[int, int], dtype: torch.dtype
) -> None:
    for per_column, *layout in itertools.product([False, True], repeat=3):
        case = norm_rope_append_case(
            7,
            *widths,
            interleaved_in=layout[0],
            interleaved_out=layout[1],
            per_column=per_column,
            dtype=dtype,
            angles=dtype if per_column else torch.float32,
        )
        before = case.kv_cache.clone()
        norm_rope_append_triton(case)
        # The interpreter truncates to bfloat16; a GPU rounds.
        check_norm_rope_append(case, before, units=2.5 if dtype == torch.bfloat16 else 1.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fp8_latents_have_the_bytes_of_a_separate_append(dtype: torch.dtype) -> None:
    for interleaved in (False, True):
        case = norm_rope_append_case(
            7, 256, 32, interleaved_in=True, interleaved_out=interleaved, dtype=dtype
        )
        norm_rope_append_triton(case)  # in the dtype of the model
        packed = case._replace(kv_cache=fp8_cache(torch.full_like(case.kv_cache, torch.nan), 256))
        norm_rope_append_triton(packed)
        assert torch.equal(packed.kv_cache, fp8_cache(case.kv_cache, 256))


def test_no_valid_token_writes_nothing() -> None:
    case = norm_rope_append_case(3)
    case.slot_mapping.fill_(-1)
    norm_rope_append_triton(case)
    assert case.kv_cache.isnan().all()


@pytest.mark.parametrize("heads", [3, 70])
def test_queries_get_the_bits_of_the_kernel_for_them_alone(heads: int) -> None:
    for interleaved_in in (False, True):
        case = norm_rope_append_case(
            5, 48, 32, heads=heads, interleaved_in=interleaved_in, dtype=torch.bfloat16
        )
        assert case.q_pe is not None
        before, alone = case.kv_cache.clone(), case.q_pe.clone()
        rotate_queries_triton(alone, case.cos, case.sin, interleaved_in, case.interleaved_out)
        norm_rope_append_triton(case)
        check_norm_rope_append(case, before, units=2.5)
        assert torch.equal(case.q_pe, alone)
