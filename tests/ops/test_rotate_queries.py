"""`mla_rotate_queries`: what it writes, its contract, the errors that bad input gets."""

from collections.abc import Callable

import pytest
import torch
from torch.library import opcheck

from mla_compile import MLAError
from mla_compile.ops.attention.norm_rope import mla_rotate_queries, rotate_queries_op
from mla_compile.ops.library import implementations
from tests.host_sync import NoHostSync
from tests.ops.rotate_queries import check, expected, rotation_case

NAMES = ("q_pe", "cos", "sin", "interleaved_in", "interleaved_out")


@pytest.mark.parametrize("per_column", [False, True], ids=["by pair", "by column"])
@pytest.mark.parametrize("interleaved_out", [False, True])
@pytest.mark.parametrize("interleaved_in", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_rotated_columns_are_the_definitions_and_the_others_stay(
    dtype: torch.dtype, interleaved_in: bool, interleaved_out: bool, per_column: bool
) -> None:
    case = rotation_case(
        5,
        interleaved_in=interleaved_in,
        interleaved_out=interleaved_out,
        per_column=per_column,
        angles=torch.float64 if dtype == torch.float64 else torch.float32,
        dtype=dtype,
    )
    want = expected(case)
    mla_rotate_queries(**dict(zip(NAMES, case)))
    check(case, want)


def test_no_token_is_no_work() -> None:
    mla_rotate_queries(**dict(zip(NAMES, rotation_case(0))))


def test_the_op_keeps_its_contract() -> None:
    opcheck(rotate_queries_op, rotation_case(4))


def test_the_implementation_never_waits_for_the_device() -> None:
    on_meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in rotation_case(8)]
    with NoHostSync():
        implementations["mla_rotate_queries"](*on_meta)


BAD: dict[str, tuple[str, Callable]] = {
    "queries of rank 2": ("q_pe", lambda x: x[:, 0]),
    "integer queries": ("q_pe", lambda x: x.long()),
    "an odd width": ("q_pe", lambda x: x[..., :-1]),
    "cos of half the pairs": ("sin", lambda x: x[:, :4]),
    "cos of fewer tokens": ("cos", lambda x: x[:-1]),
    "cos on another device": ("cos", lambda x: x.to("meta")),
    "integer cos": ("cos", lambda x: x.long()),
    "sin of other columns than cos": ("sin", lambda x: x.repeat(1, 2)),
    "sin of another dtype": ("sin", lambda x: x.double()),
}


@pytest.mark.parametrize(("name", "change"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_refused_by_name_and_the_queries_stay(name: str, change: Callable) -> None:
    case = rotation_case(4)
    arguments = dict(zip(NAMES, case)) | {name: change(case[NAMES.index(name)])}
    before = case[0].clone()
    with pytest.raises(MLAError, match=f"^{name}: expected .+, got "):
        mla_rotate_queries(**arguments)
    assert torch.equal(case[0], before)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("capability", [80, 90])
def test_compiled_code_spills_nothing(capability: int, interleaved: bool) -> None:
    pytest.importorskip("triton")
    from mla_compile.ops.attention.kernels.rotate_queries import rotate_queries_triton
    from tests.triton_compile import compiled_for

    case = rotation_case(3, 20, 64, 192, interleaved_in=interleaved, dtype=torch.bfloat16)
    with compiled_for(capability) as kernels:
        rotate_queries_triton(*case)
    (kernel,) = kernels
    assert kernel.spilled_bytes == 0
