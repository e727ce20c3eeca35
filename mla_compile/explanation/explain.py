"""Capture a call's graph before and after every pass, without running the call."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx

from mla_compile.errors import MLAError
from mla_compile.explanation.layers import Layers, find_layers
from mla_compile.explanation.picture import draw
from mla_compile.explanation.text import describe
from mla_compile.passes import pipeline
from mla_compile.passes.absorb_mla import absorb_mla
from mla_compile.passes.drop_trivial_topk import drop_trivial_topk
from mla_compile.passes.fuse_norm_rope_append import fuse_norm_rope_append
from mla_compile.torch_internals import capture_graph, uncompiled

_SHOWN_IF_FOUND = (absorb_mla, fuse_norm_rope_append, drop_trivial_topk)


@dataclass(frozen=True)
class Explanation:
    """What `explain` found; print it, or `save` it as a picture.

    graphs: the Dynamo graph after each pass by the pass's name, the one that Dynamo captured first, as "captured".
        Nodes carry fake tensors in `meta["example_value"]`.
    layers: every attention call before and after the passes.
    """

    graphs: dict[str, fx.GraphModule]
    layers: Layers

    def __str__(self) -> str:
        return describe(self.graphs, self.layers)

    def save(self, path: str | Path) -> Path:
        """Write the picture, an SVG, and return its path.

        Raises:
            MLAError: a file name that does not end in .svg.
        """
        path = Path(path)
        if path.suffix.lower() != ".svg":
            raise MLAError("path", "a file name that ends in .svg", str(path))
        path.write_text(draw(self.graphs, self.layers), encoding="utf-8")
        return path


def explain(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Show what `torch.compile(model, backend="mla")` would make of `model(*args, **kwargs)`, before Inductor.

        print(mla_compile.explain(model, token_ids, positions, batch))
        mla_compile.explain(model, token_ids, positions, batch).save("split.svg")

    Nothing runs: no kernel, no write to a cache; code that is compiled already stays so. Sizes are fixed unless the
    arguments are marked (`torch._dynamo.mark_dynamic`), and then they show as `s0`, or `u0` where unbacked.

    Args:
        model: a module or function, compiled or not.
        args, kwargs: what it would be called with.

    Raises:
        MLAError: the call has no tensor operation.
        torch._dynamo.exc.Unsupported: the call has a graph break, which it explains.
    """
    captured = capture_graph(uncompiled(model), args, kwargs)
    if captured is None:
        raise MLAError("model", "a call with tensor operations", "one without any")
    graphs = run_step_by_step(*captured)
    return Explanation(graphs, find_layers(graphs))


def run_step_by_step(
    gm: fx.GraphModule, example_inputs: Sequence[Any], passes: Sequence[pipeline.Pass] = ()
) -> dict[str, fx.GraphModule]:
    """The graph as it is and after each of `passes` (the backend's by default); `gm` itself stays as it is.

    Without those of `_SHOWN_IF_FOUND` that found nothing: most models that call our op have nothing for them, or
    nothing on the CPU.
    """
    graphs = {"captured": copy_graph(gm)}
    for graph_pass in passes or pipeline.default_passes(gm):
        before, gm = gm, graph_pass(copy_graph(gm), example_inputs)
        if graph_pass in _SHOWN_IF_FOUND and str(gm.graph) == str(before.graph):
            continue
        graphs[getattr(graph_pass, "__name__", type(graph_pass).__name__)] = gm
    return graphs


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph module of its own nodes, which have the names and metadata of the old ones."""
    graph = fx.Graph()
    result = graph.graph_copy(gm.graph, {}, return_output_node=True)
    assert isinstance(result, tuple), "a Dynamo graph has an output"
    graph.output(result[0])
    return fx.GraphModule(gm, graph)
