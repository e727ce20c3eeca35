"""Write the backend that the user asked for into decode calls, and plan once for all layers where a backend plans.

    before                                   after

    q1 ─> mla_decode(..., backend=None)      lengths ─> mla_decode_plan ─┬───────────┐
    q2 ─> mla_decode(..., backend=None)      q1 ─> mla_decode(..., "flashinfer", plan)
                                             q2 ─> mla_decode(..., "flashinfer", plan)

After all other passes, so that it sees the calls that they emit. A call that names no backend gets the plan of the one
that will serve it, if that one plans.

The name and the plan are arguments of the node, so Inductor's caches tell graphs with different choices apart, and the
op's fake implementation refuses here, while compiling, a backend that cannot serve the call.
"""

from collections.abc import Sequence
from typing import Any

from torch import fx

from mla_compile.ops.attention.decode import decode_op, decode_plan_op
from mla_compile.ops.attention.decode_backends import decode_call, select_backend
from mla_compile.ops.attention.mla_attention import attention_op
from mla_compile.ops.attention.operands import DecodeOperands
from mla_compile.passes.emit import fake_mode_of, inline, set_example_value
from mla_compile.passes.nodes import calls, op_arguments, value_of, with_arguments

# The unified op is left only where the user's passes do not split it.
_NAMED_BY = {decode_op: "backend", attention_op: "decode_backend"}


def plan_decode(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any] = (),
    *,
    backend: str | None = None,
    captured: bool = True,
) -> fx.GraphModule:
    """Rewrite `gm` in place and return it; a graph without decode calls is left untouched.

    captured: whether the graph is recorded in a CUDA graph, so that no plan may need the host.

    Raises:
        MLAError: a backend that was asked for cannot serve one of the calls; it says why and which backends can.
    """
    for op, name in _NAMED_BY.items():
        for node in calls(gm.graph, op) if backend is not None else ():
            if op_arguments(node)[name] is None:
                _change(node, **{name: backend})
    plans: dict[str, Any] = {}
    for node in calls(gm.graph, decode_op):
        given = op_arguments(node)
        operands = DecodeOperands(*(given[name] for name in DecodeOperands._fields))
        values = DecodeOperands(
            *(value_of(x) if isinstance(x, fx.Node) else x for x in tuple[Any, ...](operands))
        )
        asked: str | None = given["backend"]
        # Where none was asked for, one that needs the host never serves.
        call = decode_call(
            values, captured=captured or asked is None, batch_invariant=given["batch_invariant"]
        )
        chosen = select_backend(call, asked).chosen
        if not chosen.planner or given["plan"] is not None:
            continue
        sizes = *values.q_latent.shape[1:], values.q_pe.shape[2], values.kv_cache.shape[1]
        # As text, since comparing symbolic sizes would add a guard.
        key = str((operands[3:], sizes, values.q_latent.dtype, chosen.name))
        if key not in plans:
            plans[key] = inline(node, decode_plan_op, (*operands, len(plans), chosen.name))
        _change(node, backend=chosen.name, plan=plans[key])
    return gm


def _change(node: fx.Node, **arguments: Any) -> None:
    node.args, node.kwargs = with_arguments(node, **arguments)
    set_example_value(node, fake_mode_of(node))
