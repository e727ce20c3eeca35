"""Write the decode backend that the user asked for into every decode call that does not name one.

    before                                         after

    q ─> mla_decode(..., softmax_scale, None)      q ─> mla_decode(..., softmax_scale, "triton")

It runs with `options={"decode_backend": ...}` only, after all other passes, so that it sees the calls that they emit.
The name is an argument of the node, so Inductor's caches tell graphs with different choices apart, and the op's fake
implementation refuses here, while compiling, a backend that cannot serve the call.
"""

from collections.abc import Sequence
from typing import Any

from torch import fx

from mla_compile.ops.attention import attention_op
from mla_compile.ops.decode import decode_op
from mla_compile.passes.emit import fake_mode_of, set_example_value
from mla_compile.passes.nodes import calls, op_arguments, with_arguments

# The unified op is left only where the user's passes do not split it.
_NAMED_BY = {decode_op: "backend", attention_op: "decode_backend"}


def choose_decode_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any] = (), *, backend: str
) -> fx.GraphModule:
    """Rewrite `gm` in place and return it; a graph without decode calls is left untouched.

    Raises:
        MLAError: the backend cannot serve one of the calls; it says why and which backends can.
    """
    for op, name in _NAMED_BY.items():
        for node in calls(gm.graph, op):
            if op_arguments(node)[name] is None:
                node.args, node.kwargs = with_arguments(node, **{name: backend})
                set_example_value(node, fake_mode_of(node))
    return gm
