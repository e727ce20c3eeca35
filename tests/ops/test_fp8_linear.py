"""`fp8_linear` on the CPU: values, bits, contracts, errors. Its kernels: `interpreted/fp8_linear.py`."""

import copy
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from mla_compile import MLAError
from mla_compile.ops.device import H200, Device
from mla_compile.ops.experts.moe import _experts, moe_experts, moe_experts_op
from mla_compile.ops.experts.tiles import fp8_moe_tiles
from mla_compile.ops.library import choose
from mla_compile.ops.linear.fp8 import BLOCK, dequantize, quantize
from mla_compile.ops.linear.fp8_linear import fp8_linear, fp8_linear_op
from mla_compile.ops.linear.tiles import block_parts, block_tiles, many_block_tiles
from tests.fp8_cases import fp8_weight, linear_by_definition, values_of
from tests.kernel_cases import check_moe, check_padded_moe, moe_case, padding
from tests.ops.test_choice import fake, on

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BOUND = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-12}


def check_op(op: Any, args: tuple[Any, ...]) -> None:
    """`opcheck` without `test_schema`, which cannot compute with float8; checks that the op writes nothing."""
    before = copy.deepcopy(args)
    opcheck(
        op, args, test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    )
    for one, other in zip(before, args, strict=True):
        assert one is other is None or torch.equal(bits(one), bits(other))


def bits(x: Any) -> Tensor:
    x = x if isinstance(x, Tensor) else torch.tensor(x)
    return x.contiguous().view(torch.uint8) if x.dim() else x


def adjacent_weights(first: int, second: int, k: int) -> tuple[Tensor, ...]:
    """Two adjacent weights with their scales, laid out like those of `models/layout.py`."""
    (a, a_scale), (b, b_scale) = fp8_weight(first, k), fp8_weight(second, k, seed=1)
    weights, scales = torch.cat([a, b]), torch.cat([a_scale, b_scale])
    (a, b), (a_scale, b_scale) = weights.split([first, second]), scales.split([len(a_scale), len(b_scale)])
    return a, a_scale, b, b_scale


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_values_are_those_of_the_definition(batch_invariant: bool, dtype: torch.dtype) -> None:
    for first, second, k in ((128, 72, 200), (40, 70, 300), (256, 128, 128)):
        x = torch.randn(5, k + 8).to(dtype)[:, :-8]
        a, a_scale, b, b_scale = adjacent_weights(first, second, k)
        for weights in ((a, a_scale), (a, a_scale, b, b_scale), (a, a_scale, b.clone(), b_scale.clone())):
            out = fp8_linear(x, *weights, batch_invariant=batch_invariant)
            assert out.dtype == dtype and out.is_contiguous()
            pairs = zip(weights[::2], weights[1::2], strict=True)
            expected = linear_by_definition(x, *pairs)
            torch.testing.assert_close(out.double(), expected, atol=BOUND[dtype], rtol=BOUND[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_tokens_bits_depend_on_no_other_token(dtype: torch.dtype) -> None:
    weights, x = adjacent_weights(128, 72, 200), torch.randn(40, 200).to(dtype)
    whole = fp8_linear(x, *weights, batch_invariant=True)
    for part in (slice(0, 1), slice(3, 4), slice(7, 31), torch.randperm(40)):
        assert torch.equal(fp8_linear(x[part], *weights, batch_invariant=True), whole[part])
    alone = [fp8_linear(x, w, s, batch_invariant=True) for w, s in (weights[:2], weights[2:])]
    assert torch.equal(torch.cat(alone, 1), whole)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_opcheck(batch_invariant: bool) -> None:
    x = torch.randn(5, 216).bfloat16()[:, :200]
    weights = adjacent_weights(128, 72, 200)
    check_op(fp8_linear_op, (x, *weights, batch_invariant))
    check_op(fp8_linear_op, (x, *weights[:2], None, None, False, batch_invariant))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("sizes", [(48, 40, 1), (200, 150, 1), (136, 128, 2)], ids=str)
def test_experts_in_fp8(sizes: tuple[int, int, int], batch_invariant: bool, dtype: torch.dtype) -> None:
    hidden, intermediate, shared = sizes
    case = moe_case(9, 2, hidden=hidden, intermediate=intermediate, shared=shared, dtype=dtype, fp8=True)
    check_moe(case, moe_experts_op(*case.all_args(), batch_invariant))
    row_lens, q_len, runs = padding(case, 2, [2, 0, 1])
    check_padded_moe(case, moe_experts_op(*case.all_args(row_lens, q_len), batch_invariant), runs)
    check_op(moe_experts_op, (*case.all_args(row_lens, q_len), batch_invariant))


def test_the_public_call_takes_scales() -> None:
    case = moe_case(5, 2, fp8=True)
    gate_up_scale, down_scale, *_ = case.scales
    check_moe(case, moe_experts(*case.args(), gate_up_scale=gate_up_scale, down_scale=down_scale))


def test_quantised_weights_are_within_half_a_step_of_fp8() -> None:
    """With 3 bits of mantissa a step is 2^-3 of the number's power of two, and at least 2^-9 of the scale."""
    g = torch.Generator("cpu").manual_seed(0)
    weight = torch.randn(2, 200, 300, generator=g) * 10 ** torch.empty(2, 200, 300).uniform_(
        -6, 0, generator=g
    )
    weight[1, :128, 128:256] = 0
    values, scale = quantize(weight)
    assert values.dtype == torch.float8_e4m3fn and values.is_contiguous()
    assert scale.shape == (2, 2, 3) and scale.dtype == torch.float32
    assert scale[0, 1, 2] == weight[0, 128:, 256:].abs().max() / 448
    error = (values_of(values, scale, torch.float32) - weight.double()).abs()
    steps = scale[:, torch.arange(200)[:, None] // BLOCK, torch.arange(300) // BLOCK].double()
    assert (error <= 1.0001 * torch.maximum(2.0**-4 * weight.double().abs(), 2.0**-10 * steps)).all()
    assert not error[1, :128, 128:256].any()
    assert torch.equal(dequantize(values, scale).double(), values_of(values, scale, torch.float32))


@pytest.mark.parametrize(
    ("machine", "dtype", "tokens", "asked", "expected"),
    [
        ((9, 0), torch.bfloat16, 1, False, "triton"),
        ((9, 0), torch.bfloat16, 2, False, "blocks"),
        ((9, 0), torch.float32, 2, False, "dequantized_in_order"),
        ((8, 9), torch.float16, 8, False, "blocks"),
        ((9, 0), torch.bfloat16, 64, False, "blocks_in_order"),
        ((10, 0), torch.bfloat16, 64, False, "dequantized_in_order"),
        ((9, 0), torch.bfloat16, 4096, False, "dequantized"),
        *(((9, 0), torch.bfloat16, tokens, True, "blocks_in_order") for tokens in (1, 16, 4096)),
        ((8, 9), torch.float16, 17, True, "blocks_in_order"),
        ((9, 0), torch.float32, 1, True, "dequantized_in_order"),
        ((10, 0), torch.bfloat16, 1, True, "dequantized_in_order"),
        ((9, 0), torch.float64, 1, True, "by_row"),
        ((8, 9), torch.bfloat16, 1, False, "triton"),
        ((8, 0), torch.bfloat16, 1, False, "reference"),
        (None, torch.bfloat16, 1, False, "reference"),
        (None, torch.bfloat16, 1, True, "by_row"),
    ],
    ids=str,
)
def test_which_kernel_serves_a_call(
    machine: Any, dtype: torch.dtype, tokens: int, asked: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(machine, monkeypatch)
    args = (torch.empty(tokens, 128, dtype=dtype), *fp8_weight(64, 128), None, None, False, asked)
    assert choose("fp8_linear", fake(args, machine)).chosen.name == expected


@pytest.mark.parametrize(
    ("machine", "tokens", "asked", "expected"),
    [
        ((9, 0), 4, False, "triton_fp8"),
        *(((9, 0), tokens, False, "gemv_fp8") for tokens in (1, 2)),
        ((9, 0), 1, True, "triton_fp8_in_order"),
        ((8, 0), 1, False, "reference"),
        (None, 4, False, "reference"),
    ],
    ids=str,
)
def test_which_kernel_serves_experts(
    machine: Any, tokens: int, asked: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(machine, monkeypatch)
    args = (*moe_case(tokens, 2, dtype=torch.bfloat16, fp8=True).all_args(), asked)
    assert choose("moe_experts", fake(args, machine)).chosen.name == expected


@pytest.mark.parametrize(
    ("shared", "intermediate", "expected"),
    [(0, 64, "triton_fp8"), (1, 64, "triton_fp8"), (2, 128, "triton_fp8"), (2, 64, "reference")],
)
def test_a_kernel_takes_shared_experts_that_each_begin_a_block_of_scales(
    shared: int, intermediate: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on((9, 0), monkeypatch)
    case = moe_case(4, 2, intermediate=intermediate, shared=shared, dtype=torch.bfloat16, fp8=True)
    chosen = choose("moe_experts", fake(case.all_args(), (9, 0)))
    assert chosen.chosen.name == expected


@pytest.mark.parametrize(
    ("machine", "dtype", "tokens", "k", "linear", "experts"),
    [
        ((9, 0), torch.bfloat16, 600, 128, *["fp8_activations"] * 2),
        ((9, 0), torch.bfloat16, 128, 128, "blocks_in_order", "fp8_products"),
        ((9, 0), torch.bfloat16, 20, 128, "blocks", "triton_fp8"),
        ((9, 0), torch.bfloat16, 600, 130, "dequantized", "triton_fp8"),
        ((9, 0), torch.float16, 600, 128, "dequantized", "triton_fp8"),
        ((8, 9), torch.bfloat16, 600, 128, "dequantized", "triton_fp8"),
        (None, torch.bfloat16, 600, 128, "reference", "reference"),
    ],
    ids=str,
)
def test_which_kernels_quantise_tokens_if_they_may(
    machine: Any,
    dtype: torch.dtype,
    tokens: int,
    k: int,
    linear: str,
    experts: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on(machine, monkeypatch)
    args = (torch.empty(tokens, k, dtype=dtype), *fp8_weight(64, k), None, None, True, False)
    assert choose("fp8_linear", fake(args, machine)).chosen.name == linear
    case = moe_case(tokens, 2, experts=16, hidden=k, intermediate=128, dtype=dtype, fp8=True)
    assert choose("moe_experts", fake((*case.all_args()[:-1], True, False), machine)).chosen.name == experts


@pytest.mark.parametrize("device", [H200, Device(108, (8, 9)), Device(148, (10, 0))], ids=str)
def test_tiles_are_a_block_deep(device: Device) -> None:
    for tokens in (1, 40, 128, 5000):
        tiles, _ = many_block_tiles(tokens, 5120, 4, device)
        assert tiles.depth == BLOCK and BLOCK % tiles.columns == 0 and tiles.tokens <= max(64, 2 * tokens)
        for products, in_order in product((1, 2), (False, True)):
            plan = partial(fp8_moe_tiles, 4 * tokens, 64, products, device=device, in_order=in_order)
            assert plan(torch.bfloat16).depth == BLOCK and plan(torch.float32).depth == 32


@pytest.mark.parametrize("products", [1, 2])
def test_experts_in_order_have_one_kind_of_tiles_on_blackwell(products: int) -> None:
    """It is not known which of its instructions add in one order."""
    plan = partial(fp8_moe_tiles, products=products, device=Device(148, (10, 0)), in_order=True)
    assert len({plan(pairs, 64, dtype=torch.bfloat16) for pairs in (4, 100, 600, 4000, 40000)}) == 1


@pytest.mark.parametrize("device", [H200, Device(108, (8, 0)), Device(170, (12, 0))], ids=str)
def test_tiles_of_few_tokens_are_whole_blocks_that_warps_share(device: Device) -> None:
    for k in (128, 768, 1024, 1025, 5120, 7168):
        for tokens in (1, 2, 8, 16, 17, 32, 5000):
            tiles = block_tiles(tokens, k, device)
            assert min(tokens, 32) <= tiles.tokens and BLOCK % tiles.columns == 0
            assert tiles.depth == block_parts(k) * BLOCK == tiles.warps * BLOCK, (
                "the order is that of k alone"
            )


X, (WEIGHT, SCALE) = torch.randn(3, 200), fp8_weight(130, 200)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((X.int(), WEIGHT, SCALE), "x: .*bfloat16.*int32"),
        ((X[:, :100], WEIGHT, SCALE), r"first: .*\b100\b.*\[\d+, \d+\]"),
        (
            (X, WEIGHT.float(), SCALE),
            "first: .*float8_e4m3fn.*float32",
        ),
        (
            (X, torch.cat([WEIGHT] * 2, 1)[:, :200], SCALE),
            "first: .*contiguous.*strides",
        ),
        ((X, WEIGHT, SCALE[:1]), r"first_scale: .*128 x 128.*\[2, 2\].*\[1, 2\]"),
        ((X, WEIGHT, SCALE.double()), "first_scale: .*float32.*float64"),
        ((X, WEIGHT, SCALE, WEIGHT), r"second_scale: .*\[2, 2\].*None"),
        ((X, WEIGHT, SCALE.tolist()), r"first_scale: expected a tensor, got \[\["),
    ],
    ids=range(8),
)
def test_wrong_arguments_are_named(args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(MLAError, match=f"^{message}"):
        fp8_linear(*args)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gate_up_scale": None}, "gate_up_scale: .*float32.*None"),
        ({"down_scale": torch.ones(3)}, "down_scale: .*block"),
        ({"w_down": torch.zeros(8, 48, 40)}, "w_down: .*float8_e4m3fn"),
        (dict.fromkeys(("gate_up_scale", "down_scale")), "w_down: .*bfloat16"),
        ({"row_lens": torch.ones(1, 1, dtype=torch.int32)}, "row_lens: .*1 dimensions"),
        (
            {"row_lens": torch.ones(1, dtype=torch.int32), "q_len": 0},
            "q_len: expected an integer >= 1, got 0",
        ),
    ],
    ids=range(6),
)
def test_wrong_scales_and_rows_of_experts_are_named(changes: dict[str, Any], message: str) -> None:
    names = [argument.name for argument in moe_experts_op._schema.arguments]
    given = dict(zip(names, moe_case(4, 2, shared=1, fp8=True).all_args(), strict=False))
    with pytest.raises(MLAError, match=f"^{message}"):
        _experts(**given | changes)  # private: the public call takes no shared experts
