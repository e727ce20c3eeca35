"""`append_triton` in Triton's interpreter; `tests/ops/test_interpreted.py` runs this file."""

import pytest
import torch

from tests.triton_interpreter import mend_interpreter

mend_interpreter()

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


def test_no_valid_token_writes_nothing() -> None:
    cache = torch.full((2, 4, 48), 7.0)
    append_triton(torch.randn(3, 32), torch.randn(3, 16), cache, torch.full((3,), -1))
    assert (cache == 7).all()
