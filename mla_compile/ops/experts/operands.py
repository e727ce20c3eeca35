"""Arguments of `moe_experts_op` as a named tuple, which its candidates take."""

from typing import NamedTuple

from torch import Tensor


class ExpertOperands(NamedTuple):
    """Arguments of `moe_experts_op`."""

    x: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    w_gate_up: Tensor
    w_down: Tensor
    row_lens: Tensor | None = None
    q_len: int = 1
    shared_gate: Tensor | None = None
    shared_up: Tensor | None = None
    shared_down: Tensor | None = None
    gate_up_scale: Tensor | None = None
    down_scale: Tensor | None = None
    shared_gate_scale: Tensor | None = None
    shared_up_scale: Tensor | None = None
    shared_down_scale: Tensor | None = None
    fp8_activations: bool = False

    @property
    def num_shared(self) -> int:
        """Width of the shared experts in routed experts: shared intermediate size / routed intermediate size."""
        return 0 if self.shared_gate is None else self.shared_gate.shape[0] // self.w_down.shape[2]
