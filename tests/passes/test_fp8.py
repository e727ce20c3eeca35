"""Products by FP8 weights: the passes that join them, make them batch-invariant or quantise their tokens."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mla_compile.models.fp8 import FP8Experts, FP8Linear
from mla_compile.models.layout import pack_adjacent
from mla_compile.ops.linear.fp8 import quantize
from mla_compile.passes.fuse_linear import fuse_linear
from mla_compile.passes.fuse_shared_experts import fuse_shared_experts
from mla_compile.passes.make_batch_invariant import make_batch_invariant
from mla_compile.passes.nodes import op_arguments
from mla_compile.passes.quantize_activations import quantize_activations
from tests.passes.capture import checked, nodes_of, ops, without_kernel

HIDDEN, EXPERTS = 72, 4
FUSE_SHARED = without_kernel(fuse_shared_experts)


def fill(model: nn.Module) -> nn.Module:
    for module in model.modules():
        parameters = dict(module.named_parameters(recurse=False))
        for name, parameter in parameters.items():
            if name + "_scale_inv" in parameters:
                halves = parameter.unflatten(-2, (2 if name == "w_gate_up" else 1, -1))
                drawn = torch.randn(halves.shape) * halves.shape[-1] ** -0.5
                value, scale = (x.flatten(-3, -2) for x in quantize(drawn))
                parameter.data.copy_(value)
                parameters[name + "_scale_inv"].data.copy_(scale)
    return model


class Layer(nn.Module):
    """Routed and shared experts, whose FP8 blocks straddle if `intermediate` is no multiple of 128."""

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


@pytest.mark.parametrize(("intermediate", "joined"), [(128, True), (40, False)])
def test_products_of_one_input_are_joined_where_blocks_begin_together(
    intermediate: int, joined: bool
) -> None:
    gm = checked(
        Layer(intermediate, 1),
        [without_kernel(fuse_linear)],
        torch.randn(5, HIDDEN),
        dynamic=True,
    )
    assert ops(gm).count("fp8_linear") == (2 if joined else 3)


@pytest.mark.parametrize(
    ("intermediate", "shared", "fused"), [(40, 1, True), (128, 2, True), (40, 2, False)], ids=str
)
def test_shared_experts_are_given_to_the_op_unless_two_share_a_block(
    intermediate: int, shared: int, fused: bool
) -> None:
    gm = checked(Layer(intermediate, shared), [FUSE_SHARED], torch.randn(5, HIDDEN), dynamic=True)
    assert ops(gm).count("fp8_linear") == (0 if fused else 3)
    assert ("add" in ops(gm)) != fused


def test_batch_invariant_graphs_ask_every_op_for_one_order() -> None:
    gm = checked(Layer(40, 1), [make_batch_invariant], torch.randn(5, HIDDEN), dynamic=True)
    for node in (*nodes_of(gm, "fp8_linear"), *nodes_of(gm, "moe_experts")):
        assert node.args[-1] is True


def test_calls_with_fp8_weights_may_quantise_their_tokens() -> None:
    passes = [FUSE_SHARED, without_kernel(fuse_linear), quantize_activations]
    for intermediate, shared in ((40, 2), (128, 1)):
        gm = checked(Layer(intermediate, shared), passes, torch.randn(5, HIDDEN), dynamic=True)
        calls = [*nodes_of(gm, "fp8_linear"), *nodes_of(gm, "moe_experts")]
        assert calls and all(op_arguments(node)["fp8_activations"] is True for node in calls)
        assert not any(op_arguments(node)["batch_invariant"] for node in calls)


def test_a_layer_in_half_precision_is_seen_too() -> None:
    gm = checked(Layer(128, 1), [FUSE_SHARED], torch.randn(5, HIDDEN).bfloat16(), atol=2e-2, rtol=2e-2)
    assert "fp8_linear" not in ops(gm)
