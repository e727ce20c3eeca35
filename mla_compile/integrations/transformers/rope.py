"""Rotary embeddings whose frequencies follow the length of the text, held still while a compiled step runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mla_compile.errors import MLAError


class FixedRope:
    """LongRoPE (MiniCPM3) has frequencies for short texts and for long ones. transformers looks at the positions in
    every forward, which a captured graph cannot; here a call of `generate` has the ones of its longest possible row.

    So they differ only for a text that grows over the border while it is generated: transformers changes them then
    and keeps the keys of the old ones; here they are the long ones throughout.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules: list[tuple[Any, Tensor]] = []
        for module in list[Any](model.modules()):
            rope_type = getattr(module, "rope_type", None)
            if rope_type == "longrope":
                # One tensor that stays where it is; transformers puts a new one in its place in each forward.
                self._modules.append((module, torch.empty_like(module.inv_freq)))
            elif isinstance(rope_type, str) and "dynamic" in rope_type:
                expected = "a rope_type whose frequencies do not depend on the length"
                raise MLAError("model", expected, rope_type)

    @contextmanager
    def fixed(self, longest: int) -> Iterator[None]:
        """The frequencies for rows of up to `longest` tokens."""
        before = [module.inv_freq for module, _ in self._modules]
        try:
            for module, inv_freq in self._modules:
                inv_freq.copy_(_frequencies(module, longest))
                module.inv_freq, module.rope_type = inv_freq, "default"
            yield
        finally:
            for (module, _), inv_freq in zip(self._modules, before, strict=True):
                module.inv_freq, module.rope_type = inv_freq, "longrope"


def _frequencies(module: Any, longest: int) -> Tensor:
    border = module.config.rope_parameters["original_max_position_embeddings"]
    if longest <= border:
        short: Tensor = module.original_inv_freq
        return short
    frequencies: Tensor = ROPE_INIT_FUNCTIONS["longrope"](
        module.config, module.inv_freq.device, seq_len=border + 1
    )[0]
    return frequencies
