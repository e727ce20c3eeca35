"""Capture a call's graph before and after every pass, without running the call."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from torch import fx

from mla_compile.errors import MLAError, first_line
from mla_compile.explanation.layers import Layers, find_layers
from mla_compile.explanation.picture import draw
from mla_compile.explanation.text import describe
from mla_compile.passes import pipeline
from mla_compile.torch_internals import capture_graph, copy_graph, uncompiled


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`; print it, or `save` it as a picture.

    graphs: the graph that Dynamo captured, as "captured", and the graph after each pass that changed it, by the pass's
        name. Nodes have fake tensors in `meta["example_value"]`.
    layers: every attention call before and after the passes.
    """

    graphs: dict[str, fx.GraphModule]
    layers: Layers

    def __str__(self) -> str:
        return describe(self.graphs, self.layers)

    def save(self, path: str | Path) -> Path:
        """Write the picture, an SVG, and return its path.

        Raises:
            MLAError: a file name that does not end in .svg; a file that cannot be written.
        """
        given: object = path
        if not isinstance(given, str | Path) or Path(given).suffix.lower() != ".svg":
            raise MLAError("path", "a file name that ends in .svg", str(given))
        path = Path(given)
        try:
            path.write_text(draw(self.graphs, self.layers), encoding="utf-8")
        except OSError as error:
            raise MLAError("path", "a file that can be written", error, str(path)) from error
        return path


def explain(
    model: Callable[..., Any], *args: Any, passes: Sequence[pipeline.Pass] | None = None, **kwargs: Any
) -> Explanation:
    """Show the graphs of `model(*args, **kwargs)` under `torch.compile(model, backend="mla")`, before Inductor.

        print(mla_compile.explain(model, token_ids, positions, batch))
        mla_compile.explain(model, token_ids, positions, batch).save("split.svg")

    It runs no kernel, writes to no cache, and keeps compiled code. Sizes are fixed unless the arguments are marked
    (`torch._dynamo.mark_dynamic`); marked sizes are shown as `s0`, or as `u0` if unbacked.

    Args:
        model: a module or function, compiled or not.
        args, kwargs: the arguments of the call.
        passes: the passes to run instead of the backend's own, as in `torch.compile(options={"passes": [...]})`.

    Raises:
        MLAError: `model` cannot be called with the arguments; the call has no tensor operation; a pass fails, or leaves
            a broken graph.
        torch._dynamo.exc.Unsupported: the call has a graph break; the message explains it.
    """
    if not callable(model):
        raise MLAError("model", "a module or a function", repr(model))
    try:
        captured = capture_graph(uncompiled(model), args, kwargs)
    except Exception:
        _check_arguments(model, args, kwargs)
        raise
    if captured is None:
        raise MLAError("model", "a call with tensor operations", "one without any")
    gm, example_inputs = captured
    graphs = {"captured": copy_graph(gm)}
    for applied, result in pipeline.steps(gm, example_inputs, passes):
        if applied.changed:
            names = (f"{applied.name} {number}" if number > 1 else applied.name for number in count(1))
            graphs[next(name for name in names if name not in graphs)] = copy_graph(result)
    return Explanation(graphs, find_layers(graphs))


def _check_arguments(model: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise `MLAError` if a call that has failed lacks arguments, or has too many."""
    try:
        inspect.signature(getattr(model, "forward", model)).bind(*args, **kwargs)
    except TypeError as error:
        raise MLAError("args", "the arguments of a call of the model", first_line(error)) from error
    except ValueError:  # a built-in function without a signature
        return
