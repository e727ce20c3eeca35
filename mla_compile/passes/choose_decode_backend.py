"""Write the decode backend that the user asked for into every decode call that does not name one.

    before                                         after

    q ─> mla_decode(..., softmax_scale, None)      q ─> mla_decode(..., softmax_scale, "triton")

It runs with `options={"decode_backend": ...}` only, after all other passes, so that it sees the calls that they emit.
The name is an argument of the node, so Inductor's caches tell graphs with different choices apart, and the op's fake
implementation refuses here, while compiling, a backend that cannot serve the call.
"""

from torch import fx

from mla_compile.ops.attention import attention_op
from mla_compile.ops.decode import decode_op
from mla_compile.passes.emit import fake_mode_of, set_example_value


def choose_decode_backend(gm: fx.GraphModule, backend: str) -> fx.GraphModule:
    """Rewrite `gm` in place and return it; a graph without decode calls is left untouched.

    Raises:
        MLAError: the backend cannot serve one of the calls; it says why and which backends can.
    """
    # Both ops end in the backend's name. The unified op is left only where the user's passes do not split it.
    for op in (decode_op, attention_op):
        *_, last = op._schema.arguments
        before = len(op._schema.arguments) - 1
        for node in gm.graph.nodes:
            # A packet where the user called `torch.ops.mla_compile...` without an overload.
            if node.op != "call_function" or node.target not in (op, op.overloadpacket):
                continue
            if [*node.args[before:], node.kwargs.get(last.name)] in ([None], [None, None]):
                node.args, node.kwargs = node.args[:before], {**node.kwargs, last.name: backend}
                if len(node.args) == before:
                    node.args, node.kwargs = (*node.args, node.kwargs[last.name]), {}
                set_example_value(node, fake_mode_of(node))
    gm.recompile()
    return gm
