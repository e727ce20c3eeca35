"""`moe_experts(batch_invariant=True)` on the CPU. Kernels: `interpreted/moe.py`, `tests/test_gpu_kernels.py`."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from mla_compile.ops.experts.moe import moe_by_token, moe_experts_op
from mla_compile.ops.experts.operands import ExpertOperands
from mla_compile.ops.library import choose
from tests.kernel_cases import MoeCase, check_moe, check_padded_moe, moe_case, padding
from tests.ops.test_choice import fake, on

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def drawn_case(draw: random.Random, most_tokens: int) -> MoeCase:
    experts = draw.randint(1, 12)
    return moe_case(
        draw.randint(1, most_tokens),
        draw.randint(1, 4),
        experts=experts,
        among=draw.randint(1, experts),
        hidden=draw.randint(1, 70),
        intermediate=draw.randint(1, 70),
        shared=draw.randint(0, 2),
        dtype=draw.choice(DTYPES),
        seed=draw.randint(0, 10**6),
    )


def tokens_of(case: MoeCase, which: Tensor) -> MoeCase:
    return replace(case, **{name: getattr(case, name)[which] for name in ("x", "topk_weights", "topk_ids")})


def invariant(case: MoeCase, row_lens: Tensor | None = None, q_len: int = 1) -> Tensor:
    return moe_experts_op(*case.all_args(row_lens, q_len), True)


@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 150), marks=pytest.mark.slow)], ids=len)
def test_a_tokens_bits_depend_on_no_other_token(seeds: range) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        case = drawn_case(draw, draw.choice([5, 100, 300] if seed % 5 == 0 else [5, 40]))
        whole = invariant(case)
        check_moe(case, whole)
        for _ in range(3):
            which = torch.randperm(len(case.x))[: draw.randint(1, len(case.x))]
            part = tokens_of(case, which)
            assert torch.equal(invariant(part), whole[which]), seed
            lens = [draw.randint(0, 1) for _ in range(draw.randint(0, len(which)))]
            row_lens, q_len, runs = padding(part, 1, lens)
            assert torch.equal(invariant(part, row_lens, q_len)[runs], whole[which][runs]), seed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_padding_gets_0_whatever_it_holds(dtype: torch.dtype) -> None:
    case = moe_case(16, 2, dtype=dtype)
    row_lens, q_len, runs = padding(case, 4, [4, 1, 0, 2])
    case.w_gate_up[:1], case.w_down[:1] = torch.nan, torch.nan  # an expert that only padding chose
    case.topk_ids.clamp_(min=1)
    case.topk_ids[~runs] = 0
    check_padded_moe(case, invariant(case, row_lens, q_len), runs)


@pytest.mark.parametrize("shape", [(0, 2), (3, 0), (0, 0)], ids=str)
def test_no_tokens_and_no_experts_of_a_token(shape: tuple[int, int]) -> None:
    case = moe_case(4, 2)
    x, ids = case.x[: shape[0]], torch.zeros(shape, dtype=torch.int64)
    out = moe_by_token(ExpertOperands(x, torch.ones(shape), ids, case.w_gate_up, case.w_down))
    assert out.shape == x.shape and not out.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    case = moe_case(8, 2, shared=2, dtype=dtype)
    opcheck(moe_experts_op, (*case.all_args(*padding(case, 2, [2, 0])[:2]), True))


@pytest.mark.parametrize(
    ("machine", "dtype", "tokens", "asked", "expected"),
    [
        ((9, 0), torch.bfloat16, 4, True, "triton"),
        ((9, 0), torch.bfloat16, 1, True, "triton"),
        *(((9, 0), torch.bfloat16, tokens, False, "gemv") for tokens in (1, 2)),
        ((9, 0), torch.bfloat16, 3, False, "triton"),
        ((9, 0), torch.float32, 1, False, "triton"),
        ((9, 0), torch.float64, 1, True, "by_token"),
        ((9, 0), torch.float64, 1, False, "reference"),
        (None, torch.bfloat16, 4, True, "by_token"),
        (None, torch.bfloat16, 4, False, "reference"),
    ],
    ids=str,
)
def test_which_kernel_serves_a_call(
    machine: object,
    dtype: torch.dtype,
    tokens: int,
    asked: bool,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on(machine, monkeypatch)
    args = (*moe_case(tokens, 2, dtype=dtype).all_args(), asked)
    assert choose("moe_experts", fake(args, machine)).chosen.name == expected
