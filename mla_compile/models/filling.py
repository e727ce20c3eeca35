"""Reading a checkpoint's tensors, or a process's part of each, into their places in a model."""

import torch
from torch import Tensor

from mla_compile.models.deepseek import MLAForCausalLM
from mla_compile.models.fp8 import SCALE_SUFFIX
from mla_compile.models.names import destinations
from mla_compile.models.safetensor_files import FLOAT8, SafetensorFiles
from mla_compile.ops.fp8 import DTYPE
from mla_compile.ops.fp8 import dequantize as dequantize_weight
from mla_compile.ops.fp8 import quantize as quantize_weight
from mla_compile.progress import Advance


class Filling:
    """Fills a model's parameters, which are allocated, from files that fit it.

    The files are mapped. What is read goes from there to the device, a tensor at a time, and is converted there.
    """

    def __init__(
        self,
        model: MLAForCausalLM,
        files: SafetensorFiles,
        block: tuple[int, int] | None,
        device: str | torch.device,
    ) -> None:
        """block: of the checkpoint's FP8 weights, if it has any. device: of the parameters."""
        self._files, self._block, self._device = files, block, device
        self._parallel = model.parallel
        self._places = destinations(model)
        # Quantising makes scales that the files lack.
        self._names = [name for name in self._places if name in files.entries]

    @property
    def num_bytes(self) -> int:
        """What is read of the files."""
        return sum(map(self._num_bytes, self._names))

    def run(self, advance: Advance) -> None:
        """Read every tensor. advance: gets the number of bytes of each in the files."""
        for name in self._names:
            place, _ = self._places[name]
            is_fp8 = self._files.entries[name].dtype == FLOAT8
            if is_fp8 == (place.dtype == DTYPE):
                place.copy_(self._read(name).to(self._device))
            elif is_fp8:
                self._dequantize(name)
            else:
                self._quantize(name)
            advance(self._num_bytes(name))

    def _num_bytes(self, name: str) -> int:
        _, how = self._places[name]
        return self._files.entries[name].nbytes // (self._parallel.size if self._parallel and how else 1)

    def _read(self, name: str) -> Tensor:
        _, how = self._places[name]
        if how is None or self._parallel is None:
            return self._files.read(name)
        return self._files.read_range(name, *self._part(name))

    def _part(self, name: str) -> tuple[int, int, int]:
        """What this process has of a tensor of the files: along a dimension, the places from one to another."""
        _, how = self._places[name]
        shape = self._files.entries[name].shape
        if how is None or self._parallel is None:
            return 0, 0, shape[0]
        width, rank, size = shape[how.dim], self._parallel.rank, self._parallel.size
        return how.dim, width * rank // size, width * (rank + 1) // size

    def _quantize(self, name: str) -> None:
        places = (self._places[each][0] for each in (name, name + SCALE_SUFFIX))
        for place, result in zip(places, quantize_weight(self._read(name).to(self._device)), strict=True):
            place.copy_(result)

    def _dequantize(self, name: str) -> None:
        """Of the weight, the blocks are read that the part lies in: they need not end where it does."""
        place, _ = self._places[name]
        dim, begin, end = self._part(name)
        assert self._block is not None  # or a weight in FP8 would have been refused
        step, width = self._block[dim], self._files.entries[name].shape[dim]
        first, last = begin // step, -(-end // step)
        weight = self._files.read_range(name, dim, first * step, min(last * step, width))
        scale = self._files.read_range(name + SCALE_SUFFIX, dim, first, last)
        value = dequantize_weight(weight.to(self._device), scale.to(self._device), self._block)
        place.copy_(value.narrow(dim, begin - first * step, end - begin))
