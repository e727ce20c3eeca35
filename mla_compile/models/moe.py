"""Mixture of experts with DeepSeek's routings."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mla_compile.batch import MLABatch
from mla_compile.models.architecture import Architecture, Routing
from mla_compile.models.layers import MLP, KeepsDtype, random_parameter
from mla_compile.ops.experts.moe import moe_experts
from mla_compile.ops.experts.routing import choose_experts


class Router(KeepsDtype):
    """Computes each token's experts and their weights by a `Routing`."""

    kept = ("e_score_correction_bias",)
    e_score_correction_bias: Tensor

    def __init__(self, hidden_size: int, routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        self.weight = random_parameter(routing.num_experts, hidden_size, std=hidden_size**-0.5)
        if routing.scoring == "sigmoid":
            # In float32 for every dtype of the model: bfloat16 would lose the small steps of its training.
            self.register_buffer(
                "e_score_correction_bias", torch.zeros(routing.num_experts, dtype=torch.float32)
            )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`x` `[tokens, hidden_size]` to weights (float32 at least) and expert ids (int64), `[tokens, topk]` each.

        Scores are computed in float32 at least: in bfloat16 near-ties would choose other experts.
        """
        routing = self.routing
        dtype = torch.promote_types(x.dtype, torch.float32)
        return choose_experts(
            F.linear(x.to(dtype), self.weight.to(dtype)),
            self.e_score_correction_bias if routing.scoring == "sigmoid" else None,
            routing.topk,
            routing.num_groups,
            routing.topk_groups,
            routing.scoring == "softmax",
            routing.normalize,
            routing.scaling_factor,
        )


class Experts(nn.Module):
    """The routed experts' weights, stacked."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        sizes = num_experts, 2 * intermediate_size, hidden_size
        self.w_gate_up = random_parameter(*sizes, std=hidden_size**-0.5)
        sizes = num_experts, hidden_size, intermediate_size
        self.w_down = random_parameter(*sizes, std=intermediate_size**-0.5)

    def forward(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, batch: MLABatch) -> Tensor:
        return moe_experts(x, topk_weights, topk_ids, self.w_gate_up, self.w_down, batch)


class MoE(nn.Module):
    """Routed experts, and shared experts, which run for every token."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        size = arch.moe_intermediate_size
        self.gate = Router(arch.hidden_size, arch.routing)
        self.experts = Experts(arch.routing.num_experts, arch.hidden_size, size)
        self.shared_experts = MLP(arch.hidden_size, size * arch.num_shared_experts)
        self.own_experts: range | None = None
        """This process's experts with expert parallelism; the caller sums over processes. None for all."""

    def forward(self, x: Tensor, batch: MLABatch) -> Tensor:
        """`[tokens, hidden_size]` to the same shape; only the shared experts run for padding of the batch."""
        weights, ids = self.gate(x)
        if self.own_experts is not None:
            # Experts of other ranks get weight 0 and a valid placeholder id.
            own = (ids >= self.own_experts.start) & (ids < self.own_experts.stop)
            weights = torch.where(own, weights, 0)
            ids = torch.where(own, ids - self.own_experts.start, 0)
        out: Tensor = self.experts(x, weights, ids, batch) + self.shared_experts(x)
        return out
