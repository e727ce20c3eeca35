"""`append_triton` in Triton's interpreter; `tests/ops/test_interpreted.py` runs this file."""

import pytest
import torch

from tests.triton_interpreter import mend_interpreter

mend_interpreter()

from mla_compile.latents import fp8_width  # noqa: E402
from mla_compile.ops.attention.append import append_torch  # noqa: E402
from mla_compile.ops.attention.kernels.append import append_triton  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("widths", [(512, 64), (32, 16), (48, 20)], ids=str)
def test_latents_go_to_their_slots_and_masked_ones_nowhere(
    widths: tuple[int, int], dtype: torch.dtype
) -> None:
    tokens, rank, rope = 7, *widths
    both = torch.randn(tokens, rank + rope + 3).to(dtype)
    kv_c, k_pe = both[:, :rank], both[:, rank : rank + rope]  # rows apart
    cache = torch.full((5, 4, rank + rope), float("nan"), dtype=dtype)
    slots = torch.tensor([3, -1, 19, 0, -1, 8, 7])
    expected = cache.clone()
    append_torch(kv_c, k_pe, expected, slots)
    append_triton(kv_c, k_pe, cache, slots)
    torch.testing.assert_close(cache, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("widths", [(512, 64), (384, 20)], ids=str)
def test_fp8_latents_have_the_bytes_of_the_torch_code(widths: tuple[int, int], dtype: torch.dtype) -> None:
    rank, rope = widths
    kv_c = torch.randn(7, rank) * 10.0 ** torch.randint(-6, 5, (7, 1))
    kv_c[0, :128], kv_c[3, 5], kv_c[5, -1] = 0, torch.nan, -torch.inf
    kv_c, k_pe = kv_c.to(dtype), torch.randn(7, rope).to(dtype)
    cache = torch.full((5, 4, fp8_width(rank, rope)), 0xFF, dtype=torch.uint8)
    slots = torch.tensor([3, -1, 19, 0, -1, 8, 7])
    expected = cache.clone()
    append_torch(kv_c, k_pe, expected, slots)
    append_triton(kv_c, k_pe, cache, slots)
    assert torch.equal(cache, expected)


def test_no_valid_token_writes_nothing() -> None:
    cache = torch.full((2, 4, 48), 7.0)
    append_triton(torch.randn(3, 32), torch.randn(3, 16), cache, torch.full((3,), -1))
    assert (cache == 7).all()
