"""`materialize`: a tensor that Inductor computes once.

Inductor computes a cheap elementwise value again wherever it is read, and copies it for each op that takes it. What all
layers read is better computed once. No model calls it: passes put it where they know.
"""

import torch
from torch import Tensor

from mla_compile.ops.library import define_op, empty


@define_op(run=lambda x: x.clone(memory_format=torch.contiguous_format))
def materialize(x: Tensor) -> Tensor:
    """A contiguous copy of `x`, of any shape and dtype."""
    return empty(x, x.shape)


materialize_op = torch.ops.mla_compile.materialize.default
