"""The Hopper decode kernels on a CPU: compiled for an absent GPU."""

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from mla_compile import MLAError
from tests.kernel_cases import DecodeCase, decode_case, fp8_cache

if TYPE_CHECKING:
    from tests.triton_compile import Compiled


def compiled(decode: str, case: DecodeCase) -> "list[Compiled]":
    """The kernels that a function of the launching module compiles for a call."""
    pytest.importorskip("triton")
    from mla_compile.ops.attention.kernels.gluon import decode as launching
    from tests.triton_compile import compiled_for

    with compiled_for(90) as kernels:
        getattr(launching, decode)(case.operands())
    return kernels


def check_resources(decode: "Compiled", join: "Compiled", page_size: int) -> None:
    assert decode.shared_memory <= 232_448
    assert decode.spilled_bytes == join.spilled_bytes == 0
    assert "wgmma.mma_async" in decode.text and "cp.async.cg" in decode.text
    assert ("cp.async.bulk.tensor" in decode.text) == (decode.name == "wide_kernel" and page_size > 1)
    wait = join.text.index("griddepcontrol.wait")
    assert "ld.global" not in join.text[:wait] and "st.global" not in join.text[:wait]


def uniform_and_ragged(*calls: tuple[object, ...], ragged: int) -> list[object]:
    """Each call with `q_lens` and without; `make test-all` has most of those with them."""
    with_lens = [
        pytest.param(*call, True, marks=() if i == ragged else pytest.mark.slow)
        for i, call in enumerate(calls)
    ]
    return [*((*call, False) for call in calls), *with_lens]


@pytest.mark.long
@pytest.mark.parametrize(
    ("rows", "heads", "q_len", "page_size", "name", "ragged"),
    [
        *uniform_and_ragged(
            (2, 16, 1, 64, "narrow_kernel"),
            (2, 20, 1, 1, "narrow_kernel"),
            (1024, 16, 1, 64, "narrow_kernel"),
            ragged=1,
        ),
        *uniform_and_ragged(
            (2, 16, 4, 64, "wide_kernel"),
            (2, 20, 4, 16, "wide_kernel"),
            (2, 128, 1, 1, "wide_kernel"),
            (128, 128, 4, 64, "wide_kernel"),
            ragged=3,
        ),
    ],
)
def test_compiled_code_fits_a_multiprocessor_and_spills_nothing(
    rows: int, heads: int, q_len: int, page_size: int, name: str, ragged: bool
) -> None:
    decode, join = compiled("decode_gluon", case_of(rows, heads, q_len, page_size, ragged))
    assert (decode.name, join.name) == (name, "join_kernel")
    check_resources(decode, join, page_size)


@pytest.mark.long
@pytest.mark.parametrize(
    ("heads", "q_len", "default", "invariant"),
    [
        (16, 1, "narrow_fp8_kernel", "narrow_fp8_kernel"),
        (20, 4, "wide_kernel", "narrow_fp8_kernel"),
        (128, 1, "wide_kernel", "wide_kernel"),
    ],
)
def test_fp8_latents_have_kernels_for_any_heads(heads: int, q_len: int, default: str, invariant: str) -> None:
    """They spill a few registers outside their loops, or two or three inside."""
    case = case_of(2, heads, q_len, 64, ragged=False)
    case = replace(case, kv_cache=fp8_cache(case.kv_cache, 512))
    for decode, name in (("decode_gluon", default), ("decode_gluon_invariant", invariant)):
        kernel, _ = compiled(decode, case)
        assert kernel.name == name
        assert kernel.spilled_bytes <= 128 and kernel.shared_memory <= 232_448


@pytest.mark.long
@pytest.mark.parametrize(
    ("heads", "q_len", "name", "ragged"),
    uniform_and_ragged(
        (16, 1, "narrow_kernel"),
        (20, 1, "narrow_kernel"),
        (20, 6, "narrow_kernel"),
        (128, 4, "wide_kernel"),
        ragged=2,
    ),
)
def test_compiled_code_over_fixed_splits_fits_too(heads: int, q_len: int, name: str, ragged: bool) -> None:
    """Few heads use the narrow kernel for any number of query tokens: the wide one adds in another order."""
    decode, join = compiled("decode_gluon_invariant", case_of(2, heads, q_len, 64, ragged))
    assert (decode.name, join.name) == (name, "join_kernel")
    check_resources(decode, join, 64)


def case_of(rows: int, heads: int, q_len: int, page_size: int, ragged: bool) -> DecodeCase:
    q_lens = [q_len, *[0] * (rows - 1)] if ragged else None
    sizes = {"heads": heads, "rank": 512, "rope": 64, "page_size": page_size}
    return decode_case([1] * rows, q_len=q_len, q_lens=q_lens, dtype=torch.bfloat16, **sizes)


def test_a_cache_at_an_odd_address_is_refused_by_name() -> None:
    pytest.importorskip("triton")
    from mla_compile.ops.attention.kernels.gluon.decode import decode_gluon

    case = decode_case([1], heads=16, rank=512, rope=64, page_size=1, dtype=torch.bfloat16)
    cache = case.kv_cache
    odd = torch.empty(cache.numel() + 1, dtype=cache.dtype)[1:].view_as(cache)
    with pytest.raises(MLAError, match=r"^kv_cache: .*address.*\b16\b"):
        decode_gluon(case.operands()._replace(kv_cache=odd))
