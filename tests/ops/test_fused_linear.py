"""`fused_linear`: values and bits for any layout of the weights, contracts, errors. On a GPU: `test_gpu_kernels`."""

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.library import opcheck

from mla_compile import MLAError
from mla_compile.ops.adjacent import lies_before
from mla_compile.ops.batch_invariant import product_by_row
from mla_compile.ops.library import choose
from mla_compile.ops.linear.matmul import (
    BATCH_INVARIANT_MATMUL,
    batch_invariant_matmul,
    fused_linear,
    fused_linear_op,
)
from tests.fp8_cases import fp8_weight

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def weights(
    n_first: int = 24, n_second: int = 10, k: int = 16, *, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Two adjacent weights."""
    first, second = torch.randn(n_first + n_second, k).to(dtype).split([n_first, n_second])
    return first, second


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of columns of every product that is computed."""
    columns: list[int] = []
    linear = F.linear

    def counted(x: Tensor, weight: Tensor) -> Tensor:
        columns.append(len(weight))
        return linear(x, weight)

    monkeypatch.setattr(F, "linear", counted)
    return columns


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_both_products_for_any_layout_of_the_weights(
    dtype: torch.dtype, tokens: int, products: list[int]
) -> None:
    first, second = weights(dtype=dtype)
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5}.get(dtype, 2e-2)
    for x in (torch.randn(tokens, 16).to(dtype), torch.randn(tokens, 40).to(dtype)[:, 8:24]):
        expected = torch.cat([x.double() @ first.double().T, x.double() @ second.double().T], dim=1)
        for one, other in ((first, second), (first.clone(), second), (first, second.clone())):
            products.clear()
            out = fused_linear(x, one, other)
            assert products == ([34] if one is first and other is second else [24, 10])
            assert out.dtype == dtype and out.is_contiguous()
            torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def test_weights_that_are_moved_between_calls_are_noticed(products: list[int]) -> None:
    first, second = map(torch.nn.Parameter, weights())
    x = torch.randn(3, 16)
    with torch.no_grad():
        before = fused_linear(x, first, second)
        second.data = second.data * 2
        after = fused_linear(x, first, second)
    assert products == [34, 24, 10]
    torch.testing.assert_close(after, torch.cat([before[:, :24], 2 * before[:, 24:]], dim=1))


def test_which_weights_are_adjacent() -> None:
    both = torch.randn(40, 16)
    first, second = both[:24], both[24:34]
    assert lies_before(first, second) and not lies_before(second, first)
    for other in (both[25:34], both[23:34], second.clone(), both.view(-1)[384:].view(16, 16).T):
        assert not lies_before(first, other)
    assert not lies_before(both[:24, :8], both[24:, :8])
    assert not lies_before(first, both.view(torch.int32)[24:])
    mode = FakeTensorMode()
    assert lies_before(*map(mode.from_tensor, (first, second)))
    assert not lies_before(*map(mode.from_tensor, (first, second.clone())))


@pytest.mark.parametrize("adjacent", [True, False])
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_opcheck(batch_invariant: bool, adjacent: bool) -> None:
    first, second = weights()
    second = second if adjacent else second.clone()
    opcheck(fused_linear_op, (torch.randn(5, 16), first, second, batch_invariant))
    opcheck(fused_linear_op, (torch.randn(5, 20).bfloat16()[:, :16], *weights(dtype=torch.bfloat16)))


@pytest.mark.parametrize(
    ("name", "x", "first", "second"),
    [
        ("x", torch.ones(2, 3, 4), torch.ones(5, 4), torch.ones(6, 4)),
        ("first", torch.ones(3, 4), torch.ones(5), torch.ones(6, 4)),
        ("first", torch.ones(3, 4), torch.ones(5, 3), torch.ones(6, 4)),
        ("second", torch.ones(3, 4), torch.ones(5, 4), torch.ones(6, 5)),
        ("second", torch.ones(3, 4), torch.ones(5, 4), torch.ones(6, 4).double()),
        ("second", torch.ones(3, 4), torch.ones(5, 4), torch.ones(6, 4, device="meta")),
        ("second", torch.ones(3, 4), torch.ones(5, 4), torch.ones(6, 4).requires_grad_()),
    ],
    ids=str,
)
def test_bad_input_is_refused(name: str, x: Tensor, first: Tensor, second: Tensor) -> None:
    with pytest.raises(MLAError, match=f"^{name}"):
        fused_linear(x, first, second)


def test_an_unknown_number_of_tokens_adds_no_guard() -> None:
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        x = torch.empty(shapes.create_unbacked_symint(), 16)
        out = fused_linear_op(x, *torch.empty(34, 16).split([24, 10]))
    assert out.shape[1] == 34 and out.stride() == (34, 1) and not shapes.guards


# Bits.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tokens_bits_are_those_of_each_product_for_any_layout_of_the_weights(dtype: torch.dtype) -> None:
    first, second = weights(50, 33, 100, dtype=dtype)
    x = torch.randn(40, 100).to(dtype)
    parts = [batch_invariant_matmul(x[:, None], w.T[None])[:, 0] for w in (first, second)]
    expected = torch.cat(parts, dim=1)
    for part in (slice(None), slice(1), slice(3, 20), slice(39, 40), slice(0)):
        for other in (second, second.clone()):
            assert torch.equal(fused_linear(x[part], first, other, batch_invariant=True), expected[part])


def test_which_kernel_serves_a_call() -> None:
    x, (first, second) = torch.randn(3, 16), weights()
    assert choose("fused_linear", (x, first, second, False)).chosen.name == "reference"
    assert choose("fused_linear", (x, first, second, True)).chosen.name == "each_matmul"


def no_longer(*_: object) -> None:
    raise AssertionError("a product by one weight")


def by_both(x: Tensor, w: Tensor) -> Tensor:
    """Stands in for a kernel of ours."""
    assert w.shape == (1, 128, 40)
    return product_by_row(x, w)


def test_adjacent_weights_are_one_product_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = (row for row in BATCH_INVARIANT_MATMUL if row.name == "blocks")
    row = replace(row, function=f"{__name__}:by_both")
    monkeypatch.setattr("mla_compile.ops.linear.matmul.serving", lambda op, args: row)
    first, second = weights(24, 16, 128, dtype=torch.bfloat16)
    x = torch.randn(5, 128).bfloat16()
    monkeypatch.setattr("mla_compile.ops.linear.matmul.batch_invariant_matmul_op", no_longer)
    joined = fused_linear_op(x, first, second, True)
    monkeypatch.undo()
    assert torch.equal(joined, fused_linear_op(x, first.clone(), second.clone(), True))


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_weight_is_one_product(dtype: torch.dtype, batch_invariant: bool, tokens: int) -> None:
    weight = torch.randn(24, 16).to(dtype)
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5}.get(dtype, 2e-2)
    for one in (weight, weight.T.contiguous().T):
        x = torch.randn(tokens, 16).to(dtype)
        out = fused_linear(x, one, batch_invariant=batch_invariant)
        assert out.dtype == dtype and out.is_contiguous()
        torch.testing.assert_close(out.double(), x.double() @ weight.double().T, atol=tolerance, rtol=1e-2)


def test_autocast_changes_no_dtype() -> None:
    first, second = weights()
    with torch.autocast("cpu", torch.bfloat16):
        for more in ((), (second,), (second.clone(),)):
            assert fused_linear(torch.randn(3, 16), first, *more).dtype == torch.float32


def test_the_contract_of_one_weight() -> None:
    for batch_invariant in (False, True):
        opcheck(fused_linear_op, (torch.randn(5, 16), torch.randn(24, 16), None, batch_invariant))


@pytest.mark.long
def test_the_kernel_spills_nothing() -> None:
    pytest.importorskip("triton")
    from mla_compile.ops.linear.kernels.linear import linear_gemv
    from tests.triton_compile import compiled_for

    with compiled_for(90) as kernels:
        for k in (768, 2048, 5120, 16384):
            for tokens in (1, 2):
                linear_gemv(*(torch.zeros(n, k, dtype=torch.bfloat16) for n in (tokens, 64)))
    assert len(kernels) == 8 and all(kernel.spilled_bytes == 0 for kernel in kernels)
    assert all("ld.global.v4" in kernel.text for kernel in kernels)


def test_nothing_stands_between_the_loads_of_few_tokens() -> None:
    """Of the kernel's instructions: no barrier before its last load, and no spills."""
    pytest.importorskip("triton")
    from mla_compile.ops.linear.kernels import gemv
    from tests.triton_compile import compiled_for

    weight = torch.zeros(1344, 2048, dtype=torch.bfloat16)
    with compiled_for(90) as kernels:
        gemv.multiply(weight[:1], weight, None, gemv.half_tiles(2048))
        gemv.multiply(weight[:1, :768], *fp8_weight(5120, 768), gemv.fp8_tiles(768))
    assert [kernel.spilled_bytes for kernel in kernels] == [0, 0]
    for kernel in kernels:
        found = re.findall(r"ld\.global|bar\.sync", kernel.text)
        assert "ld.global" not in found[found.index("bar.sync") :]
