"""The passes of the `mla` backend, in order, and the work that is common to all of them.

A pass is `name(gm, example_inputs) -> gm`, in a file of its own; its options are bound with `functools.partial`. A pass
only rewrites nodes. `steps` computes missing example values, checks the graph, writes its code and measures the time,
for users' passes too.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, fx

from mla_compile.errors import MLAError
from mla_compile.passes.absorb_mla import absorb_mla
from mla_compile.passes.emit import fake_mode_in, set_example_value
from mla_compile.passes.fuse_all_reduce import fuse_all_reduce
from mla_compile.passes.fuse_linear import fuse_linear
from mla_compile.passes.fuse_norm_linear import fuse_norm_linear
from mla_compile.passes.fuse_norm_rope_append import fuse_norm_rope_append
from mla_compile.passes.fuse_norm_router import fuse_norm_router
from mla_compile.passes.fuse_rms_norm import fuse_rms_norm
from mla_compile.passes.fuse_router import fuse_router
from mla_compile.passes.fuse_shared_experts import fuse_shared_experts
from mla_compile.passes.make_batch_invariant import make_batch_invariant
from mla_compile.passes.nodes import has_value, namespace_of, op_name, values_of
from mla_compile.passes.plan_decode import plan_decode
from mla_compile.passes.provenance import where
from mla_compile.passes.quantize_activations import quantize_activations
from mla_compile.passes.remove_noops import remove_noops
from mla_compile.passes.rotate_queries import rotate_queries
from mla_compile.passes.split_prefill_decode import split_prefill_decode
from mla_compile.torch_internals import is_mutable, is_transformed, trace_graph

log = logging.getLogger(__name__)

Pass = Callable[[fx.GraphModule, Sequence[Any]], fx.GraphModule]

_CLOSED = ("cond", "invoke_subgraph", "map_impl", "scan", "while_loop")
"""Torch's higher-order ops whose subgraphs must not write to inputs through custom ops, such as to a latent cache."""

PASSES: list[Pass] = [
    absorb_mla,  # first: it reads the graph as the user wrote it
    split_prefill_decode,
    fuse_norm_rope_append,  # after the split, which makes appends
    rotate_queries,
    fuse_router,
    fuse_shared_experts,
    fuse_rms_norm,  # after all passes that match a norm's operations, or the readers of a norm
    fuse_all_reduce,  # after `fuse_rms_norm`: it matches its op
    fuse_linear,  # the passes before it match single products
    remove_noops,  # before the passes that match a norm and its reader without views in between
    fuse_norm_router,  # after `fuse_all_reduce`, which may replace the norm
    fuse_norm_linear,  # after `fuse_linear`: it matches its op
]


def passes_for(
    gm: fx.GraphModule,
    passes: Sequence[Pass] | None = None,
    decode_backend: str | None = None,
    batch_invariant: bool = False,
    captured: bool = True,
    fp8_activations: bool = False,
) -> list[Pass]:
    """The passes for a graph: `passes` or the default ones, then the passes of options, with these bound.

    The default is `PASSES` for a graph with an op of ours, unless `torch.func` transforms a part of it. For any other
    graph it is `absorb_mla` alone, which looks for MLA in plain torch.

    captured: whether a CUDA graph captures the compiled graph.

    Raises:
        MLAError: an option that the graph rules out, or an op that torch cannot compile where it is.
    """
    _check_subgraphs(gm)
    ours = any(namespace_of(node.target) == "mla_compile" for node in gm.graph.nodes)
    if ours and any(map(_is_transformed, gm.graph.nodes)):
        given = {
            "decode_backend": decode_backend,
            "batch_invariant": batch_invariant,
            "fp8_activations": fp8_activations,
        }
        for name, value in given.items():
            if value:
                expected = "no such option for a graph with vmap, grad or another transform of torch.func"
                raise MLAError(
                    f"options['{name}']", expected, repr(value), "compile the transformed part apart"
                )
        log.info("the graph has transforms of torch.func, so no pass of the package runs")
        return list(passes or [])
    if passes is None:
        passes = PASSES if ours else [absorb_mla]
    # They run last: they rewrite calls that other passes emit.
    bound: list[Pass] = []
    if batch_invariant:
        # This includes norms that have no kernel, and those that a user's list of passes has left.
        bound += [partial(fuse_rms_norm, require_kernel=False), fuse_all_reduce, make_batch_invariant]
    if fp8_activations:
        bound.append(quantize_activations)
    if ours:
        bound.append(partial(plan_decode, backend=decode_backend, captured=captured))
    return [*passes, *bound]


def _check_subgraphs(gm: fx.GraphModule) -> None:
    """Raises `MLAError` for an op of ours that writes to a cache in a subgraph of an op of `_CLOSED`."""
    for caller in [node for graph in _graphs(gm) for node in graph.nodes if op_name(node) in _CLOSED]:
        module = caller.graph.owning_module
        subgraphs = [getattr(module, str(given.target), None) for given in caller.all_input_nodes]
        for node in [node for each in subgraphs for graph in _graphs(each) for node in graph.nodes]:
            if namespace_of(node.target) == "mla_compile" and is_mutable(node.target):
                expected = f"a call outside of {op_name(caller)}, where torch cannot compile an op that writes a cache"
                hint = "move it out of torch.compiler.nested_compile_region, torch.cond or the loop"
                raise MLAError(op_name(node), expected, f"one in {where(caller)}", hint)


def _graphs(module: Any) -> list[fx.Graph]:
    """The graph of a graph module and those of its subgraphs; empty for anything else."""
    modules = module.modules() if isinstance(module, fx.GraphModule) else ()
    return [each.graph for each in modules if isinstance(each, fx.GraphModule)]


def _is_transformed(node: fx.Node) -> bool:
    return any(isinstance(value, Tensor) and is_transformed(value) for value in values_of(node))


@dataclass(frozen=True)
class Applied:
    """The effect of one pass on a graph: the calls of each op before and after, and whether any node differs."""

    name: str
    seconds: float
    changed: bool
    before: Counter[str]
    after: Counter[str]

    def __str__(self) -> str:
        """`split_prefill_decode: + mla_append x 3, mla_decode x 3 - mla_attention x 3 (2.1 ms)`."""
        counts = [self.after - self.before, self.before - self.after]
        listed = [", ".join(f"{op} x {n}" for op, n in sorted(count.items())) for count in counts]
        what = " ".join(f"{sign} {ops}" for sign, ops in zip("+-", listed) if ops)
        if not what:
            what = "the same ops with other arguments or order" if self.changed else "changed nothing"
        return f"{self.name}: {what} ({1e3 * self.seconds:.1f} ms)"


def run(
    gm: fx.GraphModule, example_inputs: Sequence[Any], passes: Sequence[Pass] | None = None
) -> fx.GraphModule:
    """Run `passes` on a Dynamo graph, in place; by default those of `passes_for`. Each is logged and dumped.

    Raises:
        MLAError: a pass refuses the graph, fails, or leaves it broken.
    """
    result = gm
    for applied, result in steps(gm, example_inputs, passes):
        log.debug("%s", applied)
        if applied.changed:
            trace_graph(f"mla_after_{applied.name}", result)
    return result


def steps(
    gm: fx.GraphModule, example_inputs: Sequence[Any], passes: Sequence[Pass] | None = None
) -> Iterator[tuple[Applied, fx.GraphModule]]:
    """Like `run`, but yields the effect of each pass and the graph after it, and writes no log."""
    after, counts = _snapshot(gm.graph), _count(gm.graph)
    for graph_pass in passes_for(gm) if passes is None else passes:
        name, before, counts_before, known = pass_name(graph_pass), after, counts, set(gm.graph.nodes)
        start = time.perf_counter()
        with _blamed(name, "a graph module"):
            result: object = graph_pass(gm, example_inputs)
        if not isinstance(result, fx.GraphModule):
            raise MLAError(f"pass {name}", "a graph module", repr(result), "end it with `return gm`")
        gm = result
        _finish(name, gm, known)
        seconds = time.perf_counter() - start
        after, counts = _snapshot(gm.graph), _count(gm.graph)
        yield Applied(name, seconds, after != before, counts_before, counts), gm


def pass_name(graph_pass: Pass) -> str:
    """The name of a pass, also of a `partial`: `fuse_linear`; for a callable object, its class."""
    while isinstance(graph_pass, partial):
        graph_pass = graph_pass.func
    return str(getattr(graph_pass, "__name__", type(graph_pass).__name__))


def _snapshot(graph: fx.Graph) -> list[Any]:
    # Arguments as text: comparing a symbolic size would add a guard.
    return [(node.name, node.op, node.target, str(node.args), str(node.kwargs)) for node in graph.nodes]


def _count(graph: fx.Graph) -> Counter[str]:
    return Counter(op_name(node) for node in graph.nodes if node.op.startswith("call_"))


def _finish(name: str, gm: fx.GraphModule, known: set[fx.Node]) -> None:
    """Compute missing example values of new nodes, check the graph and write its code.

    Without the values the shapes of later nodes are unknown, and AOTAutograd may bypass its cache.
    """
    fake_mode = fake_mode_in(gm.graph)
    for node in gm.graph.nodes if fake_mode is not None else ():
        if node not in known and node.op in ("call_function", "call_method") and not has_value(node):
            with _blamed(name, f"a new node that runs on its example values: {node.format_node()}"):
                set_example_value(node, fake_mode)
    with _blamed(name, "a graph that graph.lint() accepts"):
        gm.graph.lint()
    gm.recompile()


@contextmanager
def _blamed(name: str, expected: str) -> Iterator[None]:
    """Add the pass's name to any error raised inside; an `MLAError` keeps its own message before it."""
    try:
        yield
    except MLAError as failure:
        failure.args = (f"{failure} (in pass {name})",)  # Dynamo shows no notes
        raise
    except Exception as failure:
        hint = "fix the pass, or remove it from options={'passes': [...]}"
        raise MLAError(f"pass {name}", expected, f"{type(failure).__name__}: {failure}", hint) from failure
