"""What the passes make of products by FP8 weights: joined, given to `moe_experts`, below gathers, in one order."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from mla_compile.models.fp8 import FP8Experts, FP8Linear
from mla_compile.models.layout import pack_adjacent
from mla_compile.ops.linear.fp8 import quantize
from mla_compile.passes.fuse_linear import fuse_linear
from mla_compile.passes.fuse_shared_experts import fuse_shared_experts
from mla_compile.passes.make_batch_invariant import make_batch_invariant
from tests.passes.capture import Capture, nodes_of, ops

HIDDEN, EXPERTS = 72, 4


def fill(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if name + "_scale_inv" in module._parameters:
                halves = parameter.unflatten(-2, (2 if name == "w_gate_up" else 1, -1))
                drawn = torch.randn(halves.shape) * halves.shape[-1] ** -0.5
                value, scale = (x.flatten(-3, -2) for x in quantize(drawn))
                parameter.data.copy_(value)
                module._parameters[name + "_scale_inv"].data.copy_(scale)
    return model


class Layer(nn.Module):
    """Routed and shared experts; `intermediate` says whether their blocks straddle."""

    def __init__(self, intermediate: int, shared: int) -> None:
        super().__init__()
        self.experts = FP8Experts(EXPERTS, HIDDEN, intermediate)
        self.gate_proj, self.up_proj = (FP8Linear(HIDDEN, shared * intermediate) for _ in range(2))
        self.down_proj = FP8Linear(shared * intermediate, HIDDEN)
        fill(self)
        pack_adjacent(self)

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(2 * len(x), device=x.device).view(-1, 2) % EXPERTS
        routed = self.experts(x, x[:, :2].float().sigmoid(), ids, None)
        return routed + self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def run(model: Callable[..., Any], passes: Sequence[Any], *inputs: Tensor) -> fx.GraphModule:
    """The graph after the passes, whose results are those of the module run eagerly."""
    capture, expected = Capture(list(passes)), model(*inputs)
    torch._dynamo.mark_dynamic(inputs[0], 0)
    torch.testing.assert_close(torch.compile(model, backend=capture, fullgraph=True)(*inputs), expected)
    return capture.after[0]


@pytest.mark.parametrize(("intermediate", "joined"), [(128, True), (40, False)])
def test_products_of_one_input_are_joined_where_blocks_begin_together(
    intermediate: int, joined: bool
) -> None:
    gm = run(Layer(intermediate, 1), [partial(fuse_linear, require_kernel=False)], torch.randn(5, HIDDEN))
    assert ops(gm).count("fp8_linear") == (2 if joined else 3)


@pytest.mark.parametrize(
    ("intermediate", "shared", "fused"), [(40, 1, True), (128, 2, True), (40, 2, False)], ids=str
)
def test_shared_experts_are_given_to_the_op_unless_two_share_a_block(
    intermediate: int, shared: int, fused: bool
) -> None:
    fuse = partial(fuse_shared_experts, require_kernel=False)
    gm = run(Layer(intermediate, shared), [fuse], torch.randn(5, HIDDEN))
    assert ops(gm).count("fp8_linear") == (0 if fused else 3)
    assert ("add" in ops(gm)) != fused


def test_all_are_asked_for_one_order() -> None:
    gm = run(Layer(40, 1), [make_batch_invariant], torch.randn(5, HIDDEN))
    for node in (*nodes_of(gm, "fp8_linear"), *nodes_of(gm, "moe_experts")):
        assert node.args[-1] is True


def test_a_layer_in_half_precision_is_seen_too() -> None:
    fuse = partial(fuse_shared_experts, require_kernel=False)
    capture, layer = Capture([fuse]), Layer(128, 1)
    x = torch.randn(5, HIDDEN).bfloat16()
    out, expected = torch.compile(layer, backend=capture, fullgraph=True)(x), layer(x)
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
    assert "fp8_linear" not in ops(capture.after[0])
