"""Makes the weights of layers with the same input adjacent in memory, so that the pass `fuse_linear` can join them.

A parameter stays the same object, with its name, values and gradient. It becomes a view of a tensor with both weights.
"""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from mla_compile.models.fp8 import FP8Linear
from mla_compile.ops.adjacent import lies_before
from mla_compile.torch_internals import storage_key

ADJACENT = (
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
)
"""Names of pairs of linear layers of a module that read the same input."""

_ALIGNMENT = 16
"""Bytes. Kernels are slower for weights at other addresses. Scales of FP8 weights are read one by one."""


def pack_adjacent(model: nn.Module) -> None:
    """Make the weights of the layers in `ADJACENT` adjacent, and the scales of those in FP8.

    Not moved: layers with a bias or of a subclass of `nn.Linear` (quantised by other libraries, parametrised), weights
    on the meta device, pairs of different dtypes or devices, and weights that share memory. So a second call changes
    nothing, unless `model.to` has separated them.
    """
    for first, second, alignment in _pairs(model):
        alike = (first.shape[1], first.dtype, first.device) == (second.shape[1], second.dtype, second.device)
        apart = all(w.is_contiguous() and w.untyped_storage().nbytes() == w.nbytes for w in (first, second))
        if alike and apart and first.nbytes % alignment == 0:
            with torch.inference_mode(False):  # inference tensors could not be trained
                both = torch.cat([first.data, second.data])
                first.data, second.data = both.split([len(first), len(second)])


def unpack_adjacent(model: nn.Module) -> None:
    """Give each weight that `pack_adjacent` has moved its own memory."""
    for first, second, _ in _pairs(model):
        if lies_before(first, second):
            with torch.inference_mode(False):
                first.data, second.data = first.data.clone(), second.data.clone()


def _pairs(model: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter, int]]:
    """Pairs of weights, or of their scales, that share memory with no other tensor of the model; and the alignment."""
    places = Counter(
        storage_key(tensor)
        for module in model.modules()
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None and type(tensor) in (nn.Parameter, torch.Tensor)
    )
    for module in model.modules():
        for names in ADJACENT:
            layers = (_weights(getattr(module, name, None)) for name in names)
            for first, second, alignment in zip(*layers, (_ALIGNMENT, 1), strict=False):
                keys = {storage_key(first), storage_key(second)}
                if first is not second and sum(places[key] for key in keys) == 2:
                    yield first, second, alignment


def _weights(layer: object) -> list[nn.Parameter]:
    """The weight of a linear layer, and the scales of an FP8 one, if they may be moved; empty for other layers."""
    parameters = (
        layer._parameters if isinstance(layer, nn.Module) and type(layer) in (nn.Linear, FP8Linear) else {}
    )
    found = [value for value in parameters.values() if value is not None]
    has_bias = parameters.get("bias") is not None
    return [] if has_bias or not all(map(_is_movable, found)) else found


def _is_movable(weight: nn.Parameter) -> bool:
    is_plain = type(weight) is nn.Parameter and weight.is_floating_point()
    return is_plain and not weight.is_meta and not weight.is_inference()
