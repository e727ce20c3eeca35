"""The memory of a device, and what a model's weights leave of it."""

import os

import torch
from torch import Tensor, nn

from mla_compile.speculate import ServedModel

RESERVED = 0.05
"""The share of a GPU's memory reserved for CUDA itself, kernels' code, collectives' buffers and fragmentation."""


def available(gpu_memory: int) -> int:
    """A GPU's bytes without the reserved share."""
    return int(gpu_memory * (1 - RESERVED))


def usable_memory(device: torch.device) -> int:
    """Bytes of a GPU without the reserved share, or of the computer, whatever uses them now."""
    if device.type == "cuda":
        return available(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not on Windows
        return 8 * 2**30


def bytes_left(model: ServedModel) -> int:
    """Bytes of a model's device that its weights leave; on a GPU not more than are free now.

    Caches that the model has count as free, as a new engine replaces them.
    """
    device = model.device
    caches = {id(cache): cache for spec in model.cache_specs() if (cache := spec.layer.kv_cache) is not None}
    weights = sum(tensor.nbytes for _, tensor in named_tensors(model) if id(tensor) not in caches)
    left = usable_memory(device) - weights
    if device.type != "cuda":
        return left
    free = torch.cuda.mem_get_info(device)[0]
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(left, int(free + unused + sum(cache.nbytes for cache in caches.values())))


def named_tensors(module: object) -> list[tuple[str, Tensor]]:
    """Parameters and buffers; none of an object that is not a module."""
    if not isinstance(module, nn.Module):
        return []
    return [*module.named_parameters(), *module.named_buffers()]
