"""Rotary embeddings whose frequencies depend on the text's length, fixed during a call of `generate`."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mla_compile.errors import MLAError


class FixedRope:
    """LongRoPE (MiniCPM3) has frequencies for short and for long texts. transformers chooses by the positions in every
    forward, which a captured graph cannot do; here the longest possible row of a call of `generate` decides.

    Results differ if a row may cross the limit during generation, even if it ends before: transformers changes
    frequencies at the limit and keeps the keys of the old ones; here the long ones are used throughout.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules: list[tuple[Any, Tensor]] = []
        for module in list[Any](model.modules()):
            rope_type = getattr(module, "rope_type", None)
            if rope_type == "longrope":
                # A tensor with a static address; transformers assigns a new one in each forward.
                self._modules.append((module, torch.empty_like(module.inv_freq)))
            elif isinstance(rope_type, str) and "dynamic" in rope_type:
                expected = "a rope_type with frequencies independent of the length"
                raise MLAError("model", expected, rope_type)

    def fix(self, longest: int, stack: ExitStack) -> None:
        """Use the frequencies for rows of up to `longest` tokens until the stack is closed."""
        for module, inv_freq in self._modules:
            limit = module.config.rope_parameters["original_max_position_embeddings"]
            frequencies = module.original_inv_freq
            if longest > limit:
                init = ROPE_INIT_FUNCTIONS["longrope"]
                frequencies, _ = init(module.config, module.inv_freq.device, seq_len=limit + 1)
            inv_freq.copy_(frequencies)
            for name, value in (("inv_freq", inv_freq), ("rope_type", "default")):
                stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, value)
