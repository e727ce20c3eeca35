"""Reads a checkpoint's tensors, or a process's part of each, into a model's parameters."""

from collections.abc import Iterator

import torch
from torch import Tensor

from mla_compile.models.deepseek import MLAForCausalLM
from mla_compile.models.fp8 import SCALE_SUFFIX
from mla_compile.models.names import destinations
from mla_compile.models.safetensor_files import FLOAT8, SafetensorFiles
from mla_compile.ops.linear.fp8 import DTYPE
from mla_compile.ops.linear.fp8 import dequantize as dequantize_weight
from mla_compile.ops.linear.fp8 import quantize as quantize_weight
from mla_compile.progress import Advance


class WeightLoader:
    """Fills a model's allocated parameters from checked files.

    The files are memory-mapped. Tensors are copied to the device one at a time, and converted there.
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
        parallel = model.parallel
        self._rank, self._size = (0, 1) if parallel is None else (parallel.rank, parallel.size)
        self._places = destinations(model, files.entries)
        # The files lack the scales of weights that are quantised here.
        self._names = [name for name in self._places if name in files.entries]

    @property
    def num_bytes(self) -> int:
        """Bytes read from the files."""
        return sum(map(self._num_bytes, self._names))

    def run(self, advance: Advance) -> None:
        """Read every tensor. advance: called with each one's number of bytes in the files.

        Raises:
            MLAError: a file has changed meanwhile.
        """
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
        self._files.check_unchanged()

    def _num_bytes(self, name: str) -> int:
        _, how = self._places[name]
        return self._files.entries[name].nbytes // (1 if how is None else self._size)

    def _read(self, name: str) -> Tensor:
        _, how = self._places[name]
        if how is None:
            return self._files.read(name)
        return self._files.read_part(name, how, self._rank, self._size)

    def _quantize(self, name: str) -> None:
        place, scale_place = (self._places[each][0] for each in (name, name + SCALE_SUFFIX))
        for source, *to in _matrices(self._read(name), place, scale_place):
            # Gate and up in one tensor have separate blocks.
            halves = source.to(self._device).unflatten(0, (2 if name.endswith("gate_up_proj") else 1, -1))
            for destination, result in zip(to, quantize_weight(halves), strict=True):
                destination.copy_(result.flatten(0, 1))

    def _dequantize(self, name: str) -> None:
        """Read all blocks that overlap this process's part: the part need not end at a block's end."""
        place, how = self._places[name]
        shape, block = self._files.entries[name].shape, self._block
        assert block is not None  # `load_model` rejects FP8 weights without it
        dim = 0 if how is None else how.dim
        ranges = [(0, shape[0])] if how is None else how.ranges(shape[dim], self._rank, self._size)
        in_matrix = dim - len(shape)  # -2: output features; -1: input features; -3: whole matrices
        step = block[in_matrix] if in_matrix >= -2 else 1
        at = 0
        for begin, end in ranges:
            first, last = begin // step, -(-end // step)
            weight = self._files.read_range(name, dim, first * step, min(last * step, shape[dim]))
            scale = self._files.read_range(name + SCALE_SUFFIX, dim, first, last)
            into = place.narrow(dim, at, end - begin)
            for one, its_scale, destination in _matrices(weight, scale, into):
                value = dequantize_weight(one.to(self._device), its_scale.to(self._device), block)
                if in_matrix >= -2:
                    value = value.narrow(in_matrix, begin - first * step, end - begin)
                destination.copy_(value)
            at += end - begin


def _matrices(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The matrices of stacks, one after another, as a conversion takes several times the memory of its input."""
    return zip(*tensors, strict=True) if tensors[0].dim() > 2 else iter([tensors])
