"""`fuse_norm_linear`: which norms are computed in the launch of the product that reads them, and which are not."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mla_compile.models.fp8 import FP8Linear
from mla_compile.ops.norm_rope import rms_norm
from mla_compile.passes import PASSES
from mla_compile.passes.fuse_linear import fuse_linear
from mla_compile.passes.fuse_norm_linear import fuse_norm_linear
from mla_compile.passes.fuse_rms_norm import fuse_rms_norm
from mla_compile.passes.make_batch_invariant import make_batch_invariant
from tests.passes.capture import Capture, nodes_of, ops
from tests.passes.test_fp8 import fill

K, FIRST, SECOND = 16, 24, 8
FUSE = [partial(graph_pass, everywhere=True) for graph_pass in (fuse_rms_norm, fuse_linear, fuse_norm_linear)]


class Layer(nn.Module):
    """Two projections whose weights lie side by side, one in FP8, and a norm; `call` says what becomes of them."""

    def __init__(self, call: Callable[["Layer", Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(K, FIRST, bias=False), nn.Linear(K, SECOND, bias=False)
        both = torch.cat([self.a.weight.data, self.b.weight.data])
        self.a.weight.data, self.b.weight.data = both.split([FIRST, SECOND])
        self.fp8 = fill(FP8Linear(K, FIRST))
        self.norm_weight = nn.Parameter(torch.randn(K))
        self.call = call
        self.requires_grad_(False)

    def forward(self, x: Tensor, residual: Tensor) -> Any:
        return self.call(self, x, residual)

    def norm(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.norm_weight, 1e-5)

    def both(self, x: Tensor) -> Tensor:
        return torch.cat([self.a(x).sin(), self.b(x)], dim=-1)


def after(call: Callable[[Layer, Tensor, Tensor], Any], *more: Any, dims: int = 2) -> Any:
    """The graph after the passes, whose results and writes are those of the module run eagerly."""
    torch.manual_seed(0)
    layer, capture = Layer(call), Capture([*FUSE, *more])
    x, residual = torch.randn(2, 5, *[1] * (dims - 2), K)
    inputs = x.clone(), residual.clone()
    expected = layer(*inputs)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(residual, 0)
    found = torch.compile(layer, backend=capture, fullgraph=True)(x, residual)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close((x, residual), inputs)
    return capture.after[0]


def joined(layer: Layer, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return layer.both(layer.norm(total)), total * 2


def of_columns(layer: Layer, x: Tensor, residual: Tensor) -> Tensor:
    wide = torch.cat([x, residual], dim=-1)
    return layer.fp8(layer.norm(wide[..., :K]).flatten(0, -2))


def twice(layer: Layer, x: Tensor, residual: Tensor) -> Tensor:
    total = x + residual
    hidden = layer.both(layer.norm(total))[..., :K]
    return layer.both(layer.norm(hidden + total))


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize(("call", "fused"), [(joined, 1), (of_columns, 1), (twice, 2)])
def test_a_norm_that_one_product_reads_is_computed_with_it(call: Any, fused: int, dims: int) -> None:
    gm = after(call, dims=dims)
    assert len(nodes_of(gm, "norm_linear")) == fused
    assert not {"fused_rms_norm", "fused_add_rms_norm", "fused_linear", "fp8_linear"} & set(ops(gm))
    assert (nodes_of(gm, "norm_linear")[0].args[1] is None) == (call is of_columns)


def read_by_others(layer: Layer, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    normed = layer.norm(x + residual)
    return layer.both(normed), normed.sin()


def read_on_the_way(layer: Layer, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    normed = layer.norm(x)
    return layer.fp8(normed), normed.unsqueeze(0) * 2


def of_other_rows(layer: Layer, x: Tensor, residual: Tensor) -> Tensor:
    return layer.fp8(layer.norm(x.view(-1, 2, K // 2).flatten(1)).flip(0))


def with_a_weight_that_is_made(layer: Layer, x: Tensor, residual: Tensor) -> Tensor:
    return F.linear(layer.norm(x), layer.a.weight * residual[0])


def with_a_weight_written_to(layer: Layer, x: Tensor, residual: Tensor) -> Tensor:
    normed = layer.norm(x)
    layer.fp8.weight_scale_inv.mul_(1.0)
    return layer.fp8(normed)


@pytest.mark.parametrize(
    "call",
    [
        read_by_others,
        read_on_the_way,
        of_other_rows,
        with_a_weight_that_is_made,
        with_a_weight_written_to,
    ],
)
def test_others_stay(call: Any) -> None:
    gm = after(call)
    assert not nodes_of(gm, "norm_linear")
    assert {"fused_rms_norm", "fused_add_rms_norm"} & set(ops(gm))


def test_the_op_is_told_that_bits_must_not_depend_on_the_batch() -> None:
    (node,) = nodes_of(after(of_columns, make_batch_invariant), "norm_linear")
    assert node.args[-1] is True


def test_nothing_is_fused_where_the_op_has_no_kernel() -> None:
    capture = Capture([*FUSE[:2], fuse_norm_linear])
    layer, (x, residual) = Layer(joined), torch.randn(2, 5, K)
    torch.compile(layer, backend=capture, fullgraph=True)(x, residual)
    assert "norm_linear" not in ops(capture.after[0]) and fuse_norm_linear in PASSES
