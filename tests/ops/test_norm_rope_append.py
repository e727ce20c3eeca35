"""`mla_norm_rope_append`: what it writes, its contract, the errors that bad input gets."""

from collections.abc import Callable

import pytest
import torch
from torch.library import opcheck

from mla_compile import MLAError
from mla_compile.ops.attention.norm_rope import mla_norm_rope_append, mla_rotate_queries, norm_rope_append_op
from mla_compile.ops.library import implementations
from tests.host_sync import NoHostSync
from tests.kernel_cases import NormRopeAppendOperands, check_norm_rope_append, norm_rope_append_case

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def call(case: NormRopeAppendOperands) -> None:
    mla_norm_rope_append(**case._asdict())


@pytest.mark.parametrize("per_column", [False, True], ids=["by pair", "by column"])
@pytest.mark.parametrize("interleaved_out", [False, True])
@pytest.mark.parametrize("interleaved_in", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_cache_holds_the_definitions_values_and_else_what_it_held(
    dtype: torch.dtype, interleaved_in: bool, interleaved_out: bool, per_column: bool
) -> None:
    case = norm_rope_append_case(
        13,
        interleaved_in=interleaved_in,
        interleaved_out=interleaved_out,
        per_column=per_column,
        angles=torch.float64 if dtype == torch.float64 else torch.float32,
        dtype=dtype,
    )
    before = case.kv_cache.clone()
    call(case)
    check_norm_rope_append(case, before)


def test_angles_in_half_precision_and_a_large_epsilon() -> None:
    case = norm_rope_append_case(7, eps=0.5, angles=torch.bfloat16, dtype=torch.bfloat16)
    before = case.kv_cache.clone()
    call(case)
    check_norm_rope_append(case, before)


@pytest.mark.parametrize("interleaved_in", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_queries_are_rotated_beside_it_as_by_the_op_for_them_alone(
    dtype: torch.dtype, interleaved_in: bool
) -> None:
    case = norm_rope_append_case(6, heads=3, interleaved_in=interleaved_in, dtype=dtype)
    assert case.q_pe is not None
    before, alone = case.kv_cache.clone(), case.q_pe.clone()
    mla_rotate_queries(
        alone, case.cos, case.sin, interleaved_in=interleaved_in, interleaved_out=case.interleaved_out
    )
    call(case)
    check_norm_rope_append(case, before)
    assert torch.equal(case.q_pe, alone)


@pytest.mark.parametrize("tokens", [0, 3])
def test_no_token_or_no_valid_slot_writes_nothing(tokens: int) -> None:
    case = norm_rope_append_case(tokens)
    case.slot_mapping.fill_(-1)
    call(case)
    assert case.kv_cache.isnan().all()


@pytest.mark.parametrize("heads", [0, 2])
@pytest.mark.parametrize("per_column", [False, True])
def test_the_op_keeps_its_contract(per_column: bool, heads: int) -> None:
    case = norm_rope_append_case(6, per_column=per_column, heads=heads)
    opcheck(norm_rope_append_op, case._replace(kv_cache=case.kv_cache.nan_to_num()))


def test_the_implementation_never_waits_for_the_device() -> None:
    case = norm_rope_append_case(8)
    on_meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in case]
    with NoHostSync():
        implementations["mla_norm_rope_append"](*on_meta)


BAD: dict[str, tuple[str, Callable]] = {
    "kv_a of rank 3": ("kv_a", lambda x: x[None]),
    "an integer kv_a": ("kv_a", lambda x: x.long()),
    "a weight of another dtype": ("weight", lambda x: x.double()),
    "a weight as wide as kv_a": ("weight", lambda x: x.new_ones(48)),
    "a weight that leaves an odd width": ("weight", lambda x: x[:-1]),
    "cos of half the pairs": ("sin", lambda x: x[:, :4]),
    "integer cos": ("cos", lambda x: x.long()),
    "cos of fewer tokens": ("cos", lambda x: x[:-1]),
    "cos on another device": ("cos", lambda x: x.to("meta")),
    "sin of other columns than cos": ("sin", lambda x: x.repeat(1, 2)),
    "sin of another dtype": ("sin", lambda x: x.double()),
    "a cache of another width": ("kv_cache", lambda x: x[..., :-1].contiguous()),
    "a cache of another dtype": ("kv_cache", lambda x: x.double()),
    "int32 slots": ("slot_mapping", lambda x: x.int()),
    "queries of another width": ("q_pe", lambda x: x[..., :-2]),
    "queries of fewer tokens": ("q_pe", lambda x: x[:-1]),
    "queries of another dtype": ("q_pe", lambda x: x.double()),
    "too few slots": ("slot_mapping", lambda x: x[:-1]),
    "a slot past the cache": ("slot_mapping", lambda x: x + 10_000),
}


@pytest.mark.parametrize(("name", "change"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_refused_by_name_and_the_cache_stays(name: str, change: Callable) -> None:
    arguments = norm_rope_append_case(6, heads=2)._asdict()
    arguments[name] = change(arguments[name])
    with pytest.raises(MLAError, match=f"^{name}: expected .+, got "):
        mla_norm_rope_append(**arguments)
    assert arguments["kv_cache"].isnan().all()


def test_a_call_that_would_need_a_backward_is_refused() -> None:
    case = norm_rope_append_case(3)
    case.weight.requires_grad_()
    with pytest.raises(MLAError, match=r"weight.+torch\.no_grad"):
        call(case)


# --- the kernel without a GPU


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("capability", [80, 90])
def test_compiled_code_spills_nothing(capability: int, interleaved: bool) -> None:
    pytest.importorskip("triton")
    from mla_compile.ops.attention.kernels.norm_rope_append import norm_rope_append_triton
    from tests.triton_compile import compiled_for

    case = norm_rope_append_case(3, 512, 64, interleaved_in=interleaved, heads=20, dtype=torch.bfloat16)
    with compiled_for(capability) as kernels:
        norm_rope_append_triton(case)
    (kernel,) = kernels
    assert kernel.spilled_bytes == 0
