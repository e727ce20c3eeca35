"""`fuse_shared_experts`: ways to write shared experts that it sees, what it must leave, and results."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from mla_compile.ops.experts.moe import moe_experts
from mla_compile.passes import pipeline
from mla_compile.passes.fuse_router import fuse_router
from mla_compile.passes.fuse_shared_experts import fuse_shared_experts
from mla_compile.passes.split_prefill_decode import split_prefill_decode
from tests.integrations.test_logits import Reader
from tests.models_for_tests import tiny_model
from tests.passes.capture import checked, nodes_of, ops, without_kernel
from tests.passes.steps import capture_steps, check_greedy_tokens

HIDDEN, INTERMEDIATE, EXPERTS = 16, 8, 4


fuse = without_kernel(fuse_shared_experts)


class Layer(nn.Module):
    """Routed experts plus shared experts, `shared(module, tokens)`."""

    def __init__(self, shared: Callable[["Layer", Tensor], Tensor], num_shared: int = 1) -> None:
        super().__init__()
        self.shared = shared
        wide = num_shared * INTERMEDIATE
        self.w_gate_up = nn.Parameter(0.3 * torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN))
        self.w_down = nn.Parameter(0.3 * torch.randn(EXPERTS, HIDDEN, INTERMEDIATE))
        # Drawn with the widths of `nn.Linear`, whose products are not all alike.
        self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, wide, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(wide, HIDDEN, bias=False)
        self.requires_grad_(False)

    def routed(self, x: Tensor) -> Tensor:
        ids = torch.arange(2 * len(x), device=x.device).view(-1, 2) % EXPERTS
        return moe_experts(x, x[:, :2].float().sigmoid(), ids, self.w_gate_up, self.w_down)

    def forward(self, x: Tensor) -> Tensor:
        return self.routed(x) + self.shared(self, x)


class InThreeDimensions(Layer):
    """As in transformers: `[1, tokens, hidden]`, and the experts on a view."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.unsqueeze(0)
        routed = self.routed(hidden.view(-1, hidden.shape[-1])).view(*hidden.shape)
        return (routed + self.shared(self, hidden)).squeeze(0)


def compare(model: nn.Module, dtype: torch.dtype = torch.float32) -> fx.GraphModule:
    """The graph after the pass, whose results are those of the module run eagerly."""
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    return checked(model.to(dtype), [fuse], torch.randn(5, HIDDEN).to(dtype), dynamic=True, **tolerance)


def is_fused(gm: fx.GraphModule) -> bool:
    (node,) = nodes_of(gm, "moe_experts")
    fused = "linear" not in ops(gm)
    assert fused == (len(node.args) > 7 and node.args[7] is not None)
    return fused


# --- ways to write them


def mlp(layer: Layer, x: Tensor) -> Tensor:
    return layer.down_proj(F.silu(layer.gate_proj(x)) * layer.up_proj(x))


def by_sigmoid(layer: Layer, x: Tensor) -> Tensor:
    gate = layer.gate_proj(x)
    return layer.down_proj(layer.up_proj(x) * (gate * torch.sigmoid(gate)))


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shared", [mlp, by_sigmoid])
@pytest.mark.parametrize("kind", [Layer, InThreeDimensions])
@pytest.mark.parametrize("num_shared", [1, 2])
def test_shared_experts_are_seen_however_they_are_written(
    num_shared: int, kind: type[Layer], shared: Callable, dtype: torch.dtype
) -> None:
    gm = compare(kind(shared, num_shared), dtype)
    assert is_fused(gm) and "add" not in ops(gm)


def test_the_order_of_the_summands_does_not_matter() -> None:
    class Turned(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return self.shared(self, x) + self.routed(x)

    assert is_fused(compare(Turned(mlp)))


# --- what it must leave


def with_gelu(layer: Layer, x: Tensor) -> Tensor:
    return layer.down_proj(F.gelu(layer.gate_proj(x)) * layer.up_proj(x))


def with_a_gate(layer: Layer, x: Tensor) -> Tensor:
    return x[:, :1].sigmoid() * mlp(layer, x)


def scaled(layer: Layer, x: Tensor) -> Tensor:
    return 1.001 * mlp(layer, x)


def of_other_tokens(layer: Layer, x: Tensor) -> Tensor:
    return mlp(layer, x.flip(0))


def twice(layer: Layer, x: Tensor) -> Tensor:
    return mlp(layer, mlp(layer, x))


@pytest.mark.parametrize("shared", [with_gelu, with_a_gate, scaled, of_other_tokens, twice])
def test_another_summand_is_left(shared: Callable, logged: Callable) -> None:
    assert not is_fused(compare(Layer(shared)))
    assert logged("fuse_shared_experts")[0].startswith("not fused: ")


class Kept(Layer):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        routed = self.routed(x)
        return routed + self.shared(self, x), routed


class Written(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        routed = self.routed(x)
        x.mul_(2)
        return routed + self.shared(self, x)


class NotWhole(Layer):
    """Half as wide as a routed expert."""

    def __init__(self, shared: Callable) -> None:
        super().__init__(shared)
        self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, INTERMEDIATE // 2, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(INTERMEDIATE // 2, HIDDEN, bias=False)
        self.requires_grad_(False)


@pytest.mark.parametrize("kind", [Kept, Written, NotWhole])
def test_operands_with_other_readers_or_writers_are_left(kind: type[Layer]) -> None:
    assert not is_fused(compare(kind(mlp)))


def test_where_the_op_has_no_kernel_nothing_changes() -> None:
    assert not is_fused(checked(Layer(mlp), [fuse_shared_experts], torch.randn(3, HIDDEN)))


# --- models


PASSES = [split_prefill_decode, without_kernel(fuse_router), fuse]


@pytest.mark.long
@pytest.mark.parametrize("family", ["glm4_moe_lite", "deepseek_v2", "deepseek_v3"])
def test_steps_of_transformers_models_that_are_fused_give_the_stock_logits(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(family, num_hidden_layers=2)
    capture = capture_steps(reader, PASSES, monkeypatch)
    for _ in range(2):
        reader.assert_as_stock(reader.decode(1))
    layers = nodes_of(capture.after[0], "moe_experts")
    assert layers and all(node.args[7] is not None for node in layers)
    assert len(nodes_of(capture.after[0], "moe_router")) == len(layers)
    assert not {"topk", "scatter_"} & {*ops(capture.after[0])}


@pytest.mark.long
@pytest.mark.usefixtures("unlowered")
def test_every_graph_of_a_batch_invariant_engine_is_fused_and_its_tokens_are_those_of_plain_decoding(
    monkeypatch: pytest.MonkeyPatch, logged: Callable
) -> None:
    """Mixed steps too: fusion rounds differently, so a token's bits would depend on the graph."""
    monkeypatch.setattr(pipeline, "PASSES", PASSES)
    check_greedy_tokens(tiny_model(torch.float32), batch_invariant=True)
    messages = logged("fuse")
    assert len(messages) >= 8 and all(message.startswith("fused: ") for message in messages), messages
