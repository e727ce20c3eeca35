"""Where our custom ops are defined: one `torch.library.Library`, one way to add an op to it.

`Library.define` is used instead of `torch.library.custom_op` because a call costs 2.8 us instead of 14 us.
It checks nothing for us, so every op has an `opcheck` test.
"""

from collections.abc import Callable
from typing import Any

import torch

lib = torch.library.Library("mla_compile", "DEF")
implementations: dict[str, Callable[..., Any]] = {}
"""The Python function behind each op, by the op's name."""


def define_op(
    schema: str, *, fake: Callable[..., Any], tags: tuple[torch.Tag, ...] = ()
) -> Callable[[Callable[..., Any]], torch._ops.OpOverload[..., Any]]:
    """Define `mla_compile::<schema>`; the decorated function is its implementation on every device.

    Mutated arguments must be marked in the schema (`Tensor(a!) kv_cache`): an op that mutates without saying
    so is removed as dead code, silently.
    """
    name = schema.split("(", 1)[0]

    def register(implementation: Callable[..., Any]) -> torch._ops.OpOverload[..., Any]:
        implementations[name] = implementation
        lib.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
        lib.impl(name, implementation, "CompositeExplicitAutograd")
        torch.library.register_fake(f"mla_compile::{name}", fake, lib=lib)
        overload: torch._ops.OpOverload[..., Any] = getattr(torch.ops.mla_compile, name).default
        return overload

    return register
