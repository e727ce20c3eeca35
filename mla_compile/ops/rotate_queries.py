"""`mla_rotate_queries`: rotate queries where they lie.

No model calls it: the pass `rotate_queries` puts it in the place of a rotation that makes new tensors.
"""

import torch
from torch import Tensor

from mla_compile.errors import MLAError
from mla_compile.ops import validate
from mla_compile.ops.implementations import FLOATS, SOME, UNIT, reference, triton
from mla_compile.ops.library import define_op
from mla_compile.ops.norm_rope import rotate_heads

ROTATE_QUERIES = (
    triton(
        "one launch, a token's heads a program",
        "mla_compile.ops.kernels.rotate_queries:rotate_queries_triton",
        takes={"dtype": FLOATS, "tokens": SOME, "heads": SOME, "q_pe.stride(2)": UNIT},
    ),
    reference("mla_compile.ops.rotate_queries:rotate_queries_torch"),
)


@define_op(
    table=ROTATE_QUERIES,
    layouts={
        "q_pe": "tokens, heads, qk_rope_head_dim",
        "cos": "float tokens, angles",
        "sin": "float tokens, angles",
    },
    mutates=("q_pe",),
    layout=torch.Tag.flexible_layout,
)
def mla_rotate_queries(
    q_pe: Tensor, cos: Tensor, sin: Tensor, *, interleaved_in: bool, interleaved_out: bool
) -> None:
    """Rotate every head of every token by the token's angles, in place.

    Args:
        q_pe: `[tokens, heads, qk_rope_head_dim]`, float, with any strides: columns of the projection's output.
        cos, sin: `[tokens, qk_rope_head_dim / 2]` or `[tokens, qk_rope_head_dim]` (see `rotate`), float.
        interleaved_in, interleaved_out: whether the two elements of a rotated pair are neighbours `(0, 1), (2, 3), ...`
            before, and afterwards; else they are halves apart.

    Raises:
        MLAError: an argument that is not so, named.
    """
    rope = q_pe.shape[2]
    if rope < 2 or rope % 2:
        raise MLAError("q_pe", "an even number of columns", rope)
    validate.angles(cos, sin, rope)


rotate_queries_op = torch.ops.mla_compile.mla_rotate_queries.default


def rotate_queries_torch(
    q_pe: Tensor, cos: Tensor, sin: Tensor, interleaved_in: bool, interleaved_out: bool
) -> None:
    """`mla_rotate_queries` in plain torch: every device and dtype."""
    rotate_heads(q_pe, cos, sin, interleaved_in, interleaved_out)
