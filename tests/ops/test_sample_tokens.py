"""`sample_tokens` in plain torch: values, contract, errors, and its compiled kernels."""

import pytest
import torch
from torch.library import opcheck

from mla_compile import MLAError
from mla_compile.ops.device import H200
from mla_compile.ops.sampling.sample import sample_tokens, sample_tokens_op
from tests.ops.row_argmax import VOCABULARIES
from tests.ops.sample_tokens import args_of_all, check, check_not_finite, check_shapes, sample_args


@pytest.mark.parametrize("vocab", [2, 3, 100, 1000])
def test_it_is_the_best_of_the_kept_ids(vocab: int) -> None:
    check(sample_tokens, args_of_all(vocab))


def test_a_positions_token_does_not_depend_on_its_neighbours() -> None:
    check_shapes(sample_tokens, sample_args(16, 3, 300))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_without_a_finite_largest_logit_it_is_argmax(dtype: torch.dtype) -> None:
    check_not_finite(sample_tokens, dtype)


@pytest.mark.parametrize(("rows", "n"), [(0, 2), (1, 1), (5, 3)])
def test_contract(rows: int, n: int) -> None:
    opcheck(sample_tokens_op, sample_args(rows, n, 12, torch.bfloat16))


def test_a_mistake_is_named() -> None:
    logits, position, seed, temperature, top_k, *rest = sample_args(3, 2, 12)
    for name, args, message in (
        ("logits", (logits[0], position, seed, temperature, top_k), "rows, n, vocab_size"),
        ("logits", (logits[..., :0], position, seed, temperature, top_k), r"one id.*\[3, 2, 0\]"),
        ("position", (logits, position[:, :1], seed, temperature, top_k), r"2 \(n of logits\).*\[3, 1\]"),
        ("seed", (logits, position, seed[:2], temperature, top_k), r"3 \(rows of logits\).*\[2\]"),
        ("top_k", (logits, position, seed, temperature, top_k.long()), "int32.*int64"),
    ):
        with pytest.raises(MLAError, match=f"^{name}: .*{message}"):
            sample_tokens(*args, *rest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernels_spill_nothing(dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    from mla_compile.ops.sampling.kernels.sample import sample_triton
    from tests.triton_compile import compiled_for

    with compiled_for(10 * H200.capability[0] + H200.capability[1]) as kernels:
        sample_triton(*sample_args(1, 4, VOCABULARIES[1], dtype))
    names = ["parts_kernel", "histogram_kernel", "window_kernel", "collect_kernel", "choose_kernel"]
    assert [kernel.name for kernel in kernels] == names
    assert all(kernel.spilled_bytes == 0 for kernel in kernels)
    assert "ld.global.v4.b32" in kernels[1].text, "a thread reads 16 bytes at a time"
