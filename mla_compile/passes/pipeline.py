"""The passes of the `mla` backend, in order, and what is done once for all around each of them.

A pass is `name(gm, example_inputs) -> gm`, in a file of its own; its options are bound with `functools.partial`. It
rewrites nodes and no more: example values, the check of the graph, its code, timing and dumps are the business of
`steps`, for the passes of users too.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import fx

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
from mla_compile.passes.nodes import has_value, namespace_of, op_name
from mla_compile.passes.plan_decode import plan_decode
from mla_compile.passes.remove_noops import remove_noops
from mla_compile.passes.rotate_queries import rotate_queries
from mla_compile.passes.split_prefill_decode import split_prefill_decode
from mla_compile.torch_internals import trace_graph

log = logging.getLogger(__name__)

Pass = Callable[[fx.GraphModule, Sequence[Any]], fx.GraphModule]

PASSES: list[Pass] = [
    absorb_mla,  # first: it reads the graph as the user wrote it
    split_prefill_decode,
    fuse_norm_rope_append,  # after the split, which makes appends
    rotate_queries,
    fuse_router,
    fuse_shared_experts,
    fuse_rms_norm,  # after all that look for a norm's operations, or for what reads a norm
    fuse_all_reduce,  # after it: it looks for what it makes
    fuse_linear,  # the others look for single products
    remove_noops,  # of what all of these leave, before those that want a norm and its reader side by side
    fuse_norm_router,  # after `fuse_all_reduce`, which may take the norm
    fuse_norm_linear,  # after `fuse_linear`: it looks for what it makes
]


def passes_for(
    gm: fx.GraphModule,
    passes: Sequence[Pass] | None = None,
    decode_backend: str | None = None,
    batch_invariant: bool = False,
    captured: bool = True,
) -> list[Pass]:
    """The list for a graph: `passes` or the default ones, then those that an option asks for, bound to it.

    By default `PASSES` for a graph with an op of ours. Any other graph is searched for MLA written without it, and no
    more.

    captured: whether the graph is recorded in a CUDA graph.
    """
    ours = any(namespace_of(node.target) == "mla_compile" for node in gm.graph.nodes)
    if passes is None:
        passes = PASSES if ours else [absorb_mla]
    # After all others, so that they see the calls that those emit.
    bound: list[Pass] = []
    if ours:
        bound.append(partial(plan_decode, backend=decode_backend, captured=captured))
    if batch_invariant:
        # Norms that no kernel serves, too, and those of users' own lists of passes.
        bound += [partial(fuse_rms_norm, require_kernel=False), fuse_all_reduce, make_batch_invariant]
    return [*passes, *bound]


@dataclass(frozen=True)
class Applied:
    """What one pass did to a graph: how often each op is called before and after, and whether any node differs."""

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
    """As `run`, one pass at a time and without log: what it did, and the graph after it."""
    for graph_pass in passes_for(gm) if passes is None else passes:
        name, before, counts = pass_name(graph_pass), _snapshot(gm.graph), _count(gm.graph)
        known = set(gm.graph.nodes)
        start = time.perf_counter()
        with _blamed(name, "a graph module"):
            result: object = graph_pass(gm, example_inputs)
        if not isinstance(result, fx.GraphModule):
            raise MLAError(f"pass {name}", "a graph module", repr(result), "end it with `return gm`")
        gm = result
        _finish(name, gm, known)
        seconds = time.perf_counter() - start
        changed = _snapshot(gm.graph) != before
        yield Applied(name, seconds, changed, counts, _count(gm.graph)), gm


def pass_name(graph_pass: Pass) -> str:
    """`fuse_linear`, of a `partial` too; the class of an object that is called."""
    while isinstance(graph_pass, partial):
        graph_pass = graph_pass.func
    return str(getattr(graph_pass, "__name__", type(graph_pass).__name__))


def _snapshot(graph: fx.Graph) -> list[Any]:
    # Arguments as text: comparing a symbolic size would add a guard.
    return [(node.name, node.op, node.target, str(node.args), str(node.kwargs)) for node in graph.nodes]


def _count(graph: fx.Graph) -> Counter[str]:
    return Counter(op_name(node) for node in graph.nodes if node.op.startswith("call_"))


def _finish(name: str, gm: fx.GraphModule, known: set[fx.Node]) -> None:
    """Give new nodes the example values that they lack, check the graph and write its code.

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
    """Whatever goes wrong inside names the pass. An `MLAError` says itself what is wrong."""
    try:
        yield
    except MLAError as failure:
        failure.args = (f"{failure} (in pass {name})",)  # Dynamo shows no notes
        raise
    except Exception as failure:
        hint = "fix it, or leave it out of options={'passes': [...]}"
        raise MLAError(f"pass {name}", expected, f"{type(failure).__name__}: {failure}", hint) from failure
