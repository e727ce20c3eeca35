"""On a CUDA device: products and experts by FP8 weights at the sizes of real models, and an engine's tokens."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_compile import Engine, MLABatch, SamplingParams, load_model, prefill_segment
from mla_compile.defaults import SHIPPED_MODEL
from mla_compile.models import MLAForCausalLM
from mla_compile.ops import library
from mla_compile.ops.device import device_of
from mla_compile.ops.dispatch import Candidate
from mla_compile.ops.experts.kernels.moe import moe_triton
from mla_compile.ops.experts.kernels.moe_fp8 import moe_fp8
from mla_compile.ops.experts.moe import moe_experts_op
from mla_compile.ops.experts.tiles import fp8_moe_tiles, fp8_product_tiles
from mla_compile.ops.library import choose
from mla_compile.ops.linear.fp8_linear import fp8_linear, fp8_linear_op
from mla_compile.ops.linear.kernels import blocks
from mla_compile.ops.linear.kernels.fp8 import dequantize_triton, quantize_triton
from mla_compile.ops.linear.tiles import many_block_tiles
from tests.fp8_cases import fp8_weight, in_fp8, linear_by_definition, quantised, values_of
from tests.kernel_cases import (
    MoeCase,
    check_moe,
    check_padded_moe,
    check_quantised_moe,
    moe_case,
    moe_reference,
    padding,
)

pytestmark = pytest.mark.gpu
BOUND = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}


@pytest.fixture(autouse=True)
def converts_fp8() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs SM 89")


@pytest.mark.parametrize(
    ("columns", "k"), [(1344, 2048), (5120, 768), (7168, 2048), (200, 300), (7, 41)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_products_equal_the_definition(dtype: torch.dtype, columns: int, k: int) -> None:
    weight, scale = fp8_weight(columns, k, device="cuda")
    assert torch.equal(dequantize_triton(weight, scale, dtype).double(), values_of(weight, scale, dtype))
    for tokens in (1, 2, 3, 16, 40, 128, 600):
        x = torch.randn(tokens, k + 8, device="cuda", dtype=dtype)[:, 8:]
        expected = linear_by_definition(x, (weight, scale))
        for batch_invariant in (False, True):
            args = x, weight, scale, None, None, False, batch_invariant
            assert choose("fp8_linear", args).chosen.name.startswith(("triton", "blocks", "dequantized"))
            error = (fp8_linear(*args).double() - expected).abs().max() / expected.abs().max()
            assert error < BOUND[dtype], error


def test_a_tokens_bits_depend_on_no_other_token() -> None:
    for columns, k in ((1344, 2048), (7168, 2048), (200, 300)):
        weight, scale = fp8_weight(columns, k, device="cuda")
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(3000, k, device="cuda", dtype=dtype)
            whole = fp8_linear_op(x, weight, scale, None, None, False, True)
            for tokens in (1, 2, 5, 16, 17, 33, 64, 100, 128, 129, 544, 1500):
                for part in (slice(tokens), slice(-tokens, None)):
                    assert torch.equal(
                        fp8_linear_op(x[part], weight, scale, None, None, False, True), whole[part]
                    )


def test_no_tile_changes_a_bit() -> None:
    """Few tokens are multiplied by another instruction than many."""
    for columns, k in ((5120, 768), (2048, 5120), (200, 300)):
        weight, scale = fp8_weight(columns, k, device="cuda")
        for dtype in (torch.bfloat16, torch.float16):
            x = torch.randn(600, k, device="cuda", dtype=dtype)
            whole = blocks.multiply_in_order(x, weight, scale)
            plans = {many_block_tiles(tokens, columns, 4, device_of(x))[0] for tokens in (40, 200, 5000)}
            assert len(plans) > 1
            for tiles, split in product(plans, (False, True)):
                result = blocks.multiply_in_order(x, weight, scale, tiles=tiles, split=split)
                assert torch.equal(result, whole), (columns, k, dtype, tiles, split)


def glm_case(tokens: int) -> MoeCase:
    size = {"experts": 16, "hidden": 2048, "intermediate": 1536, "shared": 1}
    return moe_case(tokens, 4, **size, dtype=torch.bfloat16, device="cuda", fp8=True)


def test_no_tile_of_experts_changes_a_bit() -> None:
    """Nor does the instruction of the narrow ones."""
    case = glm_case(600)
    whole = moe_triton(case.operands(), in_order=True)
    device = device_of(case.x)
    plans = [
        tuple(
            fp8_moe_tiles(pairs, 64, products, torch.bfloat16, device, in_order=True) for products in (2, 1)
        )
        for pairs in (4, 600, 4000)
    ]
    assert len({*plans}) == 3
    for gate_up, down in plans:
        got = moe_triton(case.operands(), gate_up=gate_up, down=down, in_order=True)
        assert torch.equal(got, whole), (gate_up, down)


@pytest.mark.parametrize("tokens", [5, 40, 600])
def test_no_tile_of_fp8_products_changes_a_bit(tokens: int) -> None:
    """Nor do the other tokens."""
    case = glm_case(tokens)
    whole = moe_fp8(case.operands())
    plans = {fp8_product_tiles(pairs, 64, 2) for pairs in (600, 4000, 9000)}
    assert len(plans) == 3
    for tiles in plans:
        assert torch.equal(moe_fp8(case.operands(), tiles=tiles), whole), tiles
    expected, of_half = moe_reference(case), moe_triton(case.operands()).double()
    error, of_half = ((got - expected).norm() for got in (whole.double(), of_half))
    assert error < 1.2 * of_half, "the error of rounding results to bfloat16"
    few = replace(case, **{name: getattr(case, name)[1:4] for name in ("x", "topk_weights", "topk_ids")})
    assert torch.equal(moe_fp8(few.operands()), whole[1:4])


@pytest.mark.parametrize("sizes", [(384, 256, 2), (128, 128, 0), (640, 384, 1)], ids=str)
def test_fp8_products_of_any_sizes(sizes: tuple[int, int, int]) -> None:
    hidden, intermediate, shared = sizes
    for tokens, pairs in ((5, 600), (70, 4000), (300, 9000)):
        size = {"hidden": hidden, "intermediate": intermediate, "shared": shared, "among": 4}
        case = moe_case(tokens, 2, **size, dtype=torch.bfloat16, device="cuda", fp8=True)
        tiles = fp8_product_tiles(pairs, 64, 2)
        check_moe(case, moe_fp8(case.operands(), tiles=tiles))
        row_lens, q_len, runs = padding(case, 1, [0, 1])
        check_padded_moe(case, moe_fp8(case.operands(row_lens, q_len), tiles=tiles), runs)


def test_experts_of_more_numbers_than_int32() -> None:
    size = {"experts": 8, "hidden": 128, "intermediate": 4096}
    case = moe_case(70_000, 8, **size, dtype=torch.bfloat16, device="cuda", fp8=True)
    last = replace(case, **{name: getattr(case, name)[-9:] for name in ("x", "topk_weights", "topk_ids")})
    check_moe(last, moe_fp8(last.operands()))
    assert torch.equal(moe_fp8(case.operands())[-9:], moe_fp8(last.operands()))


@pytest.mark.parametrize(
    ("tokens", "kernel"),
    [(1, "gemv_fp8"), (2, "gemv_fp8"), (8, "triton_fp8"), (100, "fp8_products"), (2048, "grouped_fp8")],
)
def test_experts_at_the_size_of_glm(tokens: int, kernel: str) -> None:
    case = glm_case(tokens)
    assert choose("moe_experts", (*case.all_args(), False)).chosen.name == kernel
    assert choose("moe_experts", (*case.all_args(), True)).chosen.name == "fp8_products_in_order"
    whole = moe_experts_op(*case.all_args(), True)
    if tokens <= 100:
        check_moe(case, whole)
        check_moe(case, moe_experts_op(*case.all_args(), False))
        row_lens, q_len, runs = padding(case, 1, [0])
        got = moe_experts_op(*case.all_args(row_lens, q_len), True)
        assert torch.equal(got[runs], whole[runs])
        if runs.any():
            check_padded_moe(case, got, runs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [(300, 150, 1), (50, 33, 1), (512, 256, 2)], ids=str)
def test_few_tokens_and_sizes_that_fill_no_tile(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    hidden, intermediate, shared = sizes
    for tokens in (1, 2, 5, 33):
        case = moe_case(
            *(tokens, 3),
            hidden=hidden,
            intermediate=intermediate,
            shared=shared,
            dtype=dtype,
            device="cuda",
            fp8=True,
        )
        check_moe(case, moe_experts_op(*case.all_args()))


def test_a_nan_weight_is_seen() -> None:
    """It has the bits of a number of half precision; FP8 has no infinity."""
    case = moe_case(2, 2, hidden=256, intermediate=256, dtype=torch.bfloat16, device="cuda", fp8=True)
    case.w_down.view(torch.uint8)[case.topk_ids[0, 1], 5, 200] = 0x7F
    weight, scale = fp8_weight(200, 300, device="cuda")
    weight.view(torch.uint8)[5, 200] = 0x7F
    for tokens in (1, 2):
        part = (arg[:tokens] for arg in case.args()[:3])
        assert moe_experts_op(*part, *case.all_args()[3:])[0, 5].isnan()
        out = fp8_linear(torch.randn(tokens, 300, device="cuda").bfloat16(), weight, scale)
        assert out[:, 5].isnan().all() and out[:, 6:].isfinite().all()


@pytest.mark.parametrize(
    ("columns", "k"), [(1344, 2048), (5120, 768), (576, 2048), (2048, 5120), (16, 128), (400, 640)], ids=str
)
def test_products_of_tokens_in_fp8(columns: int, k: int) -> None:
    weight, scale = fp8_weight(columns, k, device="cuda")
    for tokens in (129, 131, 600, 4097):
        x = torch.randn(tokens, k + 8, device="cuda").bfloat16()[:, 8:]
        values, scales = quantize_triton(x)
        stored, of_blocks = quantised(x)
        torch.testing.assert_close(scales.t()[:tokens], of_blocks, rtol=1e-6, atol=0)
        assert (values[:tokens].float() != stored.float()).float().mean() < 1e-3, "but for ties"
        args = x, weight, scale, None, None, True, False
        assert choose("fp8_linear", args).chosen.name == "fp8_activations"
        expected = linear_by_definition(in_fp8(x), (weight, scale))
        error = (fp8_linear(*args).double() - expected).abs().max() / expected.abs().max()
        assert error < BOUND[torch.bfloat16], error
        assert not torch.equal(fp8_linear(*args), fp8_linear(*args[:5])), "without the flag"


@pytest.mark.parametrize("shared", [0, 1, 2])
@pytest.mark.parametrize("among", [2, 8])
@pytest.mark.parametrize(("hidden", "name"), [(512, "grouped_activations"), (384, "fp8_activations")])
def test_experts_of_tokens_in_fp8(hidden: int, name: str, shared: int, among: int) -> None:
    size = {"experts": 8, "hidden": hidden, "intermediate": 384, "shared": shared, "among": among}
    case = moe_case(700, 2, **size, dtype=torch.bfloat16, device="cuda", fp8=True)
    args = (*case.all_args()[:-1], True)
    assert choose("moe_experts", (*args, False)).chosen.name == name
    check_quantised_moe(case, moe_experts_op(*args))
    row_lens, q_len, runs = padding(case, 2, [1, 0, 2])
    check_quantised_moe(case, moe_experts_op(*case.all_args(row_lens, q_len)[:-1], True), runs)


def test_an_engine_quantises_the_tokens_of_long_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(SHIPPED_MODEL, dtype=torch.bfloat16, device="cuda", quantize="fp8")
    served, serving = list[str](), library.serving

    def noted(op: str, args: Sequence[Any]) -> Candidate:
        served.append(serving(op, args).name)
        return serving(op, args)

    monkeypatch.setattr(library, "serving", noted)
    size = {"num_speculative_tokens": 0, "max_rows": 2, "max_model_len": 512, "capture_budget": 0}
    engine = Engine(model, **size, fp8_activations=True)
    for tokens, quantises in ((20, False), (400, True), (20, False)):
        served.clear()
        prompt = [3 + i % 90 for i in range(tokens)]
        (found,) = engine.generate([prompt], sampling=SamplingParams(max_tokens=1, logprobs=1))
        assert served and ("fp8_activations" in served) == quantises
        with torch.no_grad():
            expected = next_logits(model, prompt).float().log_softmax(-1)[found.token_ids[0]]
        assert abs(found.logprobs[0][found.token_ids[0]].logprob - float(expected)) < (
            0.3 if quantises else 0.1
        )


def next_logits(model: MLAForCausalLM, prompt: list[int]) -> Tensor:
    """Of the token after a prompt, by the model in eager mode."""
    pages = torch.arange(1, 1 + -(-len(prompt) // 64), dtype=torch.int32, device="cuda")
    segment, positions = prefill_segment([len(prompt)], [0], pages[None], page_size=64)
    hidden, *_ = model(torch.tensor(prompt, device="cuda"), positions, MLABatch(prefill=segment))
    return model.logits(hidden[-1:])[0]


@pytest.mark.parametrize("k", [0, 3])
def test_an_engines_tokens_are_those_of_the_dequantised_model(k: int) -> None:
    """In float32 with CUDA graphs. The dequantised model has the values of the quantised one."""
    model = load_model(SHIPPED_MODEL, dtype=torch.float32, device="cuda", quantize="fp8")
    prompts = [[5, 9, 1, 30, 7], [2, 2, 8], list(range(1, 40))]
    found = Engine(model, num_speculative_tokens=k, max_rows=4, max_model_len=128).generate(
        prompts, max_new_tokens=24
    )
    plain = load_model(SHIPPED_MODEL, dtype=torch.float32, device="cuda")
    for name, parameter in plain.named_parameters():
        other = model.get_parameter(name)
        if other.dtype == torch.float8_e4m3fn:
            halves = 2 if name.endswith("w_gate_up") else 1
            parts = (x.unflatten(-2, (halves, -1)) for x in (other, model.get_parameter(f"{name}_scale_inv")))
            parameter.copy_(values_of(*parts, torch.float32).flatten(-3, -2))
    expected = Engine(plain, num_speculative_tokens=0, max_rows=4, max_model_len=128, compile=False).generate(
        prompts, max_new_tokens=24
    )
    assert [one.token_ids for one in found] == [other.token_ids for other in expected]
