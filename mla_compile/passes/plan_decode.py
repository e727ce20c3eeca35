"""Set the requested backend on decode calls, and plan once for all layers if the backend plans.

    before                                   after

    q1 ─> mla_decode(..., backend=None)      lengths ─> mla_decode_plan ─┬───────────┐
    q2 ─> mla_decode(..., backend=None)      q1 ─> mla_decode(..., "flashinfer", plan)
                                             q2 ─> mla_decode(..., "flashinfer", plan)

The pass runs last: batch-invariant calls have other backends. A call without a named backend gets the plan of its
automatic choice, if that one plans. The choice is left to the call, which knows its number of rows.

The name and the plan are arguments of the node, so graphs with different choices have different keys in Inductor's
caches. The op's fake implementation raises an error at compile time if a backend cannot run the call.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from torch import fx

from mla_compile.ops.attention.decode import decode_op, decode_plan_op
from mla_compile.ops.attention.decode_backends import QUERIES, decode_call, select_backend
from mla_compile.ops.attention.mla_attention import attention_op
from mla_compile.ops.attention.operands import DecodeOperands
from mla_compile.passes.effects import writer_between
from mla_compile.passes.emit import change_arguments, inline
from mla_compile.passes.nodes import calls, op_arguments, value_of

# The unified op is left only if the user's passes do not split it.
_NAMED_BY = {decode_op: "backend", attention_op: "decode_backend"}


def plan_decode(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any] = (),
    *,
    backend: str | None = None,
    captured: bool = True,
) -> fx.GraphModule:
    """Rewrite `gm` in place and return it; a graph without decode calls is left untouched.

    captured: whether a CUDA graph captures the compiled graph, in which no plan may need the host.

    Raises:
        MLAError: the requested backend cannot run one of the calls; the message names the reason and those that can.
    """
    for op, name in _NAMED_BY.items():
        for node in calls(gm.graph, op) if backend is not None else ():
            if op_arguments(node)[name] is None:
                change_arguments(node, **{name: backend})
    plans = dict[str, tuple[list[fx.Node], fx.Node]]()
    """The plan of each kind of call, and the last call that has it."""
    places = itertools.count()
    for node in calls(gm.graph, decode_op):
        given = op_arguments(node)
        operands = DecodeOperands(*(given[name] for name in DecodeOperands._fields))
        values: Any = fx.map_arg(operands, value_of)
        requested: str | None = given["backend"]
        # A backend that needs the host is never a default, so the call counts as captured.
        call = decode_call(
            values, captured=captured or requested is None, batch_invariant=given["batch_invariant"]
        )
        chosen = select_backend(call, requested).chosen
        if not chosen.planner or given["plan"] is not None:
            continue
        if requested is None and not chosen.constraints.keys() <= {*call.facts, QUERIES}:
            continue  # a size that is symbolic may rule it out in a call
        of_rows: tuple[Any, ...] = operands[3:]
        sizes = *values.q_latent.shape[1:], values.q_pe.shape[2], values.kv_cache.shape[1]
        # As text, since comparing symbolic sizes would add a guard.
        key = str((of_rows, sizes, values.q_latent.dtype, chosen.name))
        plan, last = plans.get(key, (None, node))
        read = [operand for operand in of_rows if isinstance(operand, fx.Node)]
        if plan is None or writer_between(last, node, read) is not None:
            plan = inline(node, _plan, (*operands, next(places), requested))
        change_arguments(node, plan=plan)
        plans[key] = plan, node
    return gm


def _plan(*args: Any) -> list[Any]:
    """The tensors of a plan, each a node: layers compiled once take tensors, not lists (`repeated_layers`)."""
    plan = decode_plan_op(*args)
    return [plan[i] for i in range(len(value_of(plan.node)))]
