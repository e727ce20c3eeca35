"""Weights of layers that read the same input, side by side in memory, so that the pass `fuse_linear` may join them.

A parameter stays the same object, with its name, values and gradient. It becomes a view of one tensor of both.
"""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from mla_compile.models.fp8 import FP8Linear
from mla_compile.ops.adjacent import lies_before
from mla_compile.torch_internals import storage_key

SIDE_BY_SIDE = (
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
)
"""Names of two linear layers of a module that read the same input."""

_ALIGNMENT = 16
"""Bytes. Kernels for weights that begin elsewhere are slower. Scales of FP8 weights are read one by one."""


def pack_adjacent(model: nn.Module) -> None:
    """Move the weights of those layers of `model` that `SIDE_BY_SIDE` names, two at a time.

    Those of layers in FP8 with their scales. Left where they are: layers with a bias or of a subclass of `nn.Linear`
    (quantised by others, parametrised), weights without values, of other dtypes or devices than their neighbour's, and
    such as share memory. So a second call changes nothing, unless `model.to` has parted them.
    """
    for first, second, alignment in _pairs(model):
        alike = (first.shape[1], first.dtype, first.device) == (second.shape[1], second.dtype, second.device)
        apart = all(w.is_contiguous() and w.untyped_storage().nbytes() == w.nbytes for w in (first, second))
        if alike and apart and first.nbytes % alignment == 0:
            with torch.inference_mode(False):  # an inference tensor could not be trained
                both = torch.cat([first.data, second.data])
                first.data, second.data = both.split([len(first), len(second)])


def unpack_adjacent(model: nn.Module) -> None:
    """Give the weights that `pack_adjacent` has moved memory of their own."""
    for first, second, _ in _pairs(model):
        if lies_before(first, second):
            with torch.inference_mode(False):
                first.data, second.data = first.data.clone(), second.data.clone()


def _pairs(model: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter, int]]:
    """Two weights in whose memory nothing else of the model lies, or their scales; where the second may begin."""
    places = Counter(
        storage_key(tensor)
        for module in model.modules()
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None and type(tensor) in (nn.Parameter, torch.Tensor)
    )
    for module in model.modules():
        for names in SIDE_BY_SIDE:
            layers = (_weights(getattr(module, name, None)) for name in names)
            for first, second, alignment in zip(*layers, (_ALIGNMENT, 1), strict=False):
                keys = {storage_key(first), storage_key(second)}
                if first is not second and sum(places[key] for key in keys) == 2:
                    yield first, second, alignment


def _weights(layer: object) -> list[nn.Parameter]:
    """The weight of a plain linear layer, or of one in FP8 with its scales, if they may be moved; none of others."""
    parameters = (
        layer._parameters if isinstance(layer, nn.Module) and type(layer) in (nn.Linear, FP8Linear) else {}
    )
    found = [value for value in parameters.values() if value is not None]
    has_bias = parameters.get("bias") is not None
    return [] if has_bias or not all(map(_is_movable, found)) else found


def _is_movable(weight: nn.Parameter) -> bool:
    is_plain = type(weight) is nn.Parameter and weight.is_floating_point()
    return is_plain and not weight.is_meta and not weight.is_inference()
