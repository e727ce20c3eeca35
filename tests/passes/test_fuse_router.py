"""`fuse_router`: ways to write a router that it sees, what it must leave, and results."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from mla_compile.models.architecture import Routing
from mla_compile.models.moe import Router
from mla_compile.ops.experts.moe import moe_experts
from mla_compile.passes.fuse_router import fuse_router
from mla_compile.passes.provenance import module_path
from tests.passes.capture import Capture, checked, nodes_of, ops, without_kernel

HIDDEN, INTERMEDIATE = 16, 8


fuse = without_kernel(fuse_router)


class MoE(nn.Module):
    """Experts behind a router whose last results are weights and ids."""

    def __init__(self, gate: nn.Module, experts: int) -> None:
        super().__init__()
        self.gate = gate
        self.w_gate_up = nn.Parameter(0.1 * torch.randn(experts, 2 * INTERMEDIATE, HIDDEN))
        self.w_down = nn.Parameter(0.1 * torch.randn(experts, HIDDEN, INTERMEDIATE))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        *rest, weights, ids = self.gate(x)
        return *rest, moe_experts(x, weights, ids, self.w_gate_up, self.w_down)


class Gate(nn.Module):
    """A router as `choose` writes it: from the module and logits in float32 to its results."""

    def __init__(self, choose: Callable[["Gate", Tensor], tuple[Tensor, ...]], experts: int = 12) -> None:
        super().__init__()
        self.choose = choose
        self.proj = nn.Linear(HIDDEN, experts, bias=False)
        self.register_buffer("bias", 0.1 * torch.randn(experts))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.choose(self, F.linear(x.float(), self.proj.weight.float()))


def compare(gate: nn.Module, experts: int = 12, dtype: torch.dtype = torch.float32) -> fx.GraphModule:
    """The graph after the passes, whose results are those of the module run eagerly."""
    torch.manual_seed(1)
    return checked(MoE(gate, experts).to(dtype), [fuse], torch.randn(7, HIDDEN).to(dtype), dynamic=True)


def is_fused(gm: fx.GraphModule) -> bool:
    found = ops(gm)
    assert ("topk" in found) != ("moe_router" in found)
    return "moe_router" in found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "routing",
    [
        Routing("sigmoid", 64, 4, 1, 1, True, 1.8),
        Routing("sigmoid", 32, 8, 8, 4, True, 2.5),
        Routing("softmax", 40, 6, 8, 3, False, 16.0),
        Routing("softmax", 12, 3, 1, 1, False, 1.0),
        Routing("sigmoid", 6, 6, 1, 1, False, 1.0),
    ],
    ids=str,
)
def test_our_router_is_one_call(routing: Routing, dtype: torch.dtype) -> None:
    router = Router(HIDDEN, routing)
    if routing.scoring == "sigmoid":
        router.e_score_correction_bias.normal_(std=0.1)
    gm = compare(router, routing.num_experts, dtype)
    assert ops(gm) == ["moe_router", "getitem", "getitem", "moe_experts"]
    (node,) = nodes_of(gm, "moe_router")
    given = (routing.topk, routing.num_groups, routing.topk_groups)
    assert node.args[3:6] == given and node.args[6] == (routing.scoring == "softmax")
    assert node.args[7:] == (routing.normalize, routing.scaling_factor)
    assert module_path(node) == "gate" and node.meta["example_value"][0].dtype == torch.float32


class WithoutLogits(nn.Module):
    """Returns weights and ids alone, as the MoE layers of transformers use them."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router = router

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.router(x)[-2:]


def transformers_routers() -> dict[str, tuple[nn.Module, int]]:
    from transformers import DeepseekV2Config, DeepseekV3Config, Glm4MoeLiteConfig
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteTopkRouter

    v2 = DeepseekV2Config(
        num_attention_heads=2,
        hidden_size=HIDDEN,
        n_routed_experts=40,
        n_group=8,
        topk_group=3,
        topk_method="group_limited_greedy",
        num_experts_per_tok=6,
        routed_scaling_factor=16.0,
    )
    routers = {
        "v2": (DeepseekV2TopkRouter(v2), 40),
        "v3": (DeepseekV3TopkRouter(DeepseekV3Config(hidden_size=HIDDEN)), 256),
        "glm": (Glm4MoeLiteTopkRouter(Glm4MoeLiteConfig(hidden_size=HIDDEN)), 64),
    }
    for router, _ in routers.values():
        for tensor in (*router.parameters(), *router.buffers()):
            tensor.data.normal_(std=0.2)
    return routers


@pytest.mark.parametrize("name", ["v2", "v3", "glm"])
def test_routers_of_transformers_are_one_call_though_they_fill_masks_in_place(name: str) -> None:
    router, experts = transformers_routers()[name]
    gm = compare(WithoutLogits(router), experts)
    assert is_fused(gm) and not {"scatter_", "itruediv", "linear", "type"} & {*ops(gm)}


# --- ways to write a choice


def of_the_best_alone(gate: Gate, logits: Tensor) -> tuple[Tensor, ...]:
    values, ids = logits.topk(3)
    return values.softmax(-1), ids  # the softmax of all, made to sum to 1


def with_a_bias_by_sort(gate: Gate, logits: Tensor) -> tuple[Tensor, ...]:
    scores = torch.special.expit(logits)
    ids = (scores + gate.bias).argsort(-1, descending=True)[:, :3]
    return 2.5 * F.normalize(scores.gather(1, ids), p=1, dim=-1), ids


def filled_in_place(gate: Gate, logits: Tensor) -> tuple[Tensor, ...]:
    scores = logits.sigmoid()
    choice = torch.empty_like(scores)
    choice.copy_(scores)
    choice += gate.bias
    ids = torch.topk(choice, 3, sorted=False)[1]
    return scores.gather(1, ids), ids


def with_a_bias_that_is_computed(gate: Gate, logits: Tensor) -> tuple[Tensor, ...]:
    scores = logits.sigmoid()
    ids = (scores + gate.bias * gate.proj.weight[:, 0]).topk(3).indices
    return scores.gather(1, ids), ids


@pytest.mark.parametrize(
    "choose", [of_the_best_alone, with_a_bias_by_sort, filled_in_place, with_a_bias_that_is_computed]
)
def test_a_choice_is_seen_however_it_is_written(choose: Callable) -> None:
    assert "moe_router" in ops(compare(Gate(choose)))


def also_logits(gate: Gate, logits: Tensor) -> tuple[Tensor, ...]:
    scores = logits.sigmoid()
    ids = (scores + gate.bias).topk(3).indices
    return logits, scores.gather(1, ids), ids


def test_results_with_other_readers_are_kept() -> None:
    found = ops(compare(Gate(also_logits)))
    assert {"moe_router", "linear"} <= {*found} and "sigmoid" not in found


class Rounded(nn.Module):
    """The input of experts and router is rounded, like a norm's result."""

    def __init__(self, experts: MoE) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        return self.experts((1.1 * x.float()).to(x.dtype))


def test_the_router_gets_the_tokens_as_they_were_rounded() -> None:
    model, capture = Rounded(MoE(Gate(also_logits), 12).bfloat16()), Capture([fuse])
    torch.compile(model, backend=capture, fullgraph=True)(torch.randn(3, HIDDEN).bfloat16())
    (router,) = nodes_of(capture.after[0], "moe_router")
    (experts,) = nodes_of(capture.after[0], "moe_experts")
    assert router.args[0] is experts.args[0] and router.args[1].op == "placeholder"


# --- what it must leave


def by_temperature(gate: Gate, logits: Tensor) -> tuple[Tensor, ...]:
    weights, ids = (logits / 0.7).softmax(-1).topk(3)
    return weights, ids


def without_expert_0(gate: Gate, logits: Tensor) -> tuple[Tensor, ...]:
    weights, ids = logits.sigmoid()[:, 1:].topk(3)
    return weights, ids + 1


def the_worst(gate: Gate, logits: Tensor) -> tuple[Tensor, ...]:
    weights, ids = logits.sigmoid().topk(3, largest=False)
    return weights, ids


def biased_weights(gate: Gate, logits: Tensor) -> tuple[Tensor, ...]:
    weights, ids = (logits.sigmoid() + gate.bias).topk(3)
    return weights, ids


def read_once_more(gate: Gate, logits: Tensor) -> tuple[Tensor, ...]:
    scores = logits.sigmoid()
    choice = scores.clone()
    choice += gate.bias
    ids = choice.topk(3).indices
    return choice.sum(), scores.gather(1, ids), ids


def with_gates_bias(gate: Gate, logits: Tensor) -> tuple[Tensor, ...]:
    scores = F.linear(logits, torch.eye(12), gate.bias).sigmoid()
    weights, ids = scores.topk(3)
    return weights, ids


@pytest.mark.parametrize(
    "choose",
    [
        by_temperature,
        without_expert_0,
        the_worst,
        biased_weights,
        read_once_more,
        with_gates_bias,
    ],
)
def test_another_choice_is_left(choose: Callable, logged: Callable) -> None:
    assert not is_fused(compare(Gate(choose)))
    assert logged("fuse_router")[0].startswith("not fused: ")


class Halves(Gate):
    """Scores in the model's own dtype, which rounds them."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        weights, ids = self.proj(x).softmax(-1, dtype=torch.float32).topk(3)
        return weights, ids


def test_scores_in_half_precision_are_left() -> None:
    assert not is_fused(compare(Halves(also_logits), dtype=torch.bfloat16))


def test_where_the_op_has_no_kernel_nothing_changes() -> None:
    assert not is_fused(checked(MoE(Gate(of_the_best_alone), 12), [fuse_router], torch.randn(3, HIDDEN)))
