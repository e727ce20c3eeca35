"""`torch.compile(model, backend="mla")`: our graph passes, then Inductor."""

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from mla_compile.check_batches import checked, checks_of
from mla_compile.errors import MLAError
from mla_compile.ops.attention.decode_backends import check_name
from mla_compile.passes import pipeline
from mla_compile.passes.make_batch_invariant import INDUCTOR_OPTIONS
from mla_compile.repeated_layers import lower_layers_once
from mla_compile.torch_internals import (
    check_torch,
    errors_passed_on,
    inductor_modes,
    inductor_options,
    know_least_sizes,
    lower_with_inductor,
    needs_gradients,
    noted,
    trace_graph,
)

log = logging.getLogger(__name__)

_FLAGS = ("batch_invariant", "captured", "fp8_activations")
_OURS = ("passes", "decode_backend", *_FLAGS)
"""The options that are not Inductor's."""


def mla(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph; `torch.compile` calls it through the `torch_dynamo_backends` entry point.

    Args:
        gm: the graph; it is rewritten in place.
        example_inputs: the graph's fake inputs.
        mode: a mode of `torch.compile`; "default" arrives as None.
        options: Inductor's options, and `passes`: graph passes to run instead of `pipeline.PASSES`, `decode_backend`:
            the name of the backend for decode calls that do not name one, `batch_invariant`: whether a token's bits
            must not depend on the other tokens of the batch (see `passes/make_batch_invariant.py`), `captured`:
            whether the caller records calls in CUDA graphs, so that nothing may be computed on the host, and
            `fp8_activations`: whether products of many tokens by FP8 weights may quantise the tokens too.

    Raises:
        MLAError: an unknown mode, an unknown option, an object that is not a pass, a pass that fails or leaves a broken
            graph, a decode backend that is unknown or cannot run a call of the graph, a torch without an API that
            compiling needs.
    """
    with errors_passed_on():
        check_torch()
        settings = resolve_settings(mode, options)
        passes, decode_backend, *flags = (settings.pop(name, None) for name in _OURS)
        batch_invariant, captured, fp8_activations = map(bool, flags)
        tensors = [x for x in example_inputs if isinstance(x, Tensor)]
        has_graphs = bool(settings.get("triton.cudagraphs"))
        on_gpu = any(x.is_cuda for x in tensors)
        # Otherwise a GPU would wait for the calls of layers, each would be a CUDA graph, or autograd one node.
        once = not has_graphs and (captured or not on_gpu) and not needs_gradients(gm)
        captured = captured or has_graphs
        know_least_sizes(example_inputs)
        trace_graph("mla_before_passes", gm)
        checks = checks_of(gm)
        chosen = pipeline.passes_for(gm, passes, decode_backend, batch_invariant, captured, fp8_activations)
        gm = pipeline.run(gm, example_inputs, chosen)
        trace_graph("mla_after_passes", gm)
        log.debug("after the mla passes:\n%s", gm.graph)
        if once:
            call = lower_layers_once(gm, example_inputs, settings, lower_with_inductor, captured=on_gpu)
        else:
            call = lower_with_inductor(gm, example_inputs, settings)
        return noted(checked(call, checks))


def resolve_settings(mode: str | None, options: dict[str, Any] | None) -> dict[str, Any]:
    """The Inductor options of a mode and `options`, and our own options that are given."""
    modes = inductor_modes()
    if mode is not None and mode not in [*modes]:  # a list, as not every object can be hashed
        raise MLAError("mode", f"one of {', '.join(modes)}", repr(mode))
    # Partitions let CUDA graphs capture around an op that must not be captured; without them one tagged op turns
    # capture off for the whole graph. The folding of uniform constants tests whether a tensor is contiguous, which is
    # an error for an unbacked number of tokens (torch 2.13, with group-limited routing).
    # CPU loops read the number of threads when they run, not when they are compiled. So commands that differ only in
    # that number share compiled code.
    threads = {"cpp.dynamic_threads": True, "cpp.threads": os.cpu_count() or 1}
    defaults: dict[str, Any] = {"graph_partition": True, "joint_graph_constant_folding": False, **threads}
    given = options or {}
    for name in _FLAGS:
        if type(given.get(name, False)) is not bool:
            raise MLAError(f"options['{name}']", "True or False", repr(given[name]))
    if given.get("batch_invariant"):
        if given.get("fp8_activations"):
            expected = "False with batch_invariant=True, which has no kernel for them"
            raise MLAError("options['fp8_activations']", expected, True, "leave one of the two out")
        defaults |= INDUCTOR_OPTIONS
    else:
        # Otherwise Inductor times the tiles of a sum in its first run and selects the fastest. The choice, and with it
        # the order of the sum, would differ between processes.
        defaults["deterministic"] = not (mode or "").startswith("max-autotune")
    settings = {**defaults, **modes[mode or "default"], **given}
    if unknown := sorted(settings.keys() - inductor_options() - set(_OURS)):
        hint = f"see torch._inductor.config for the names; ours are {', '.join(map(repr, _OURS))}"
        raise MLAError("options", "Inductor's options or ours", ", ".join(unknown), hint)
    passes = settings.get("passes", [])
    if not isinstance(passes, Sequence) or not all(callable(p) for p in passes):
        raise MLAError("options['passes']", "a list of functions (gm, example_inputs) -> gm", repr(passes))
    check_name("options['decode_backend']", settings.get("decode_backend"))
    return settings
