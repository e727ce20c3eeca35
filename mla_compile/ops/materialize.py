"""`materialize`: a tensor that Inductor computes once.

Inductor recomputes a cheap elementwise value for each reader, and copies it for each op that takes it. A value that all
layers read is better computed once. Passes insert this op; no model calls it.
"""

import torch
from torch import Tensor

from mla_compile.ops.library import define_op, empty


@define_op(run=lambda x: x.clone(memory_format=torch.contiguous_format))
def materialize(x: Tensor) -> Tensor:
    """A contiguous copy of `x`, of any shape and dtype."""
    return empty(x, x.shape)


materialize_op = torch.ops.mla_compile.materialize.default
