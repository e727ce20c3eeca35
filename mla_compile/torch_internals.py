"""Every private torch API that we lean on, in one place: where a torch release breaks us, the fix is here.

Used with torch 2.11 and 2.13. Inductor is imported on first use, so that `import mla_compile` stays light.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._logging import trace_structured


def statically_known_true(condition: Any) -> bool:
    """Whether a comparison of sizes, symbolic ones perhaps, is certain; asking adds no guard."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true as known

    return known(condition)


def inductor_modes() -> dict[str, dict[str, Any]]:
    """Inductor's options of each `torch.compile` mode."""
    from torch._inductor import list_mode_options

    modes: dict[str, dict[str, Any]] = list_mode_options()
    return modes


def inductor_options() -> set[str]:
    """Names that Inductor's config knows, as `torch.compile(options=...)` spells them (dots for nesting)."""
    from torch._inductor import config

    return set(config.get_config_copy())


def lower_with_inductor(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: dict[str, Any]
) -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor under the given config options."""
    from torch._inductor.compile_fx import compile_fx

    compiled: Callable[..., Any] = compile_fx(gm, example_inputs, config_patches=options)
    return compiled


def cpp_compiler() -> str | None:
    """The C++ compiler that Inductor calls for a graph on the CPU; None where it finds none."""
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        compiler: str = cpp_builder.get_cpp_compiler()
    except (InvalidCxxCompiler, OSError):  # OSError: `CXX` names something that cannot be run
        return None
    return compiler


def trace_graph(name: str, gm: fx.GraphModule) -> None:
    """Leave a graph in the structured trace, where `tlparse` shows it."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: gm.print_readable(print_output=False, include_stride=True, include_device=True),
    )


def is_mutable(op: object) -> bool:
    """Whether an op overload writes to one of its arguments, by its schema."""
    return isinstance(op, torch._ops.OpOverload) and bool(op._schema.is_mutable)
