"""Detects that a model's weights have changed, since cached latents belong to the old weights."""

from collections.abc import Iterable

from torch import Tensor, nn

from mla_compile.torch_internals import memory_of


class Weights:
    """A snapshot of a model's parameters and saved buffers; empty if the model is not an `nn.Module`.

    A check takes some 0.5 us per tensor: it walks the modules, and reads each tensor's address and torch's count of
    writes. So it detects in-place writes, and tensors or modules that were replaced. torch does not count writes
    through `.data`, by fused optimizers, or to inference tensors.

    num_changes: checks that found a change.
    """

    def __init__(self, model: object, caches: Iterable[Tensor] = ()) -> None:
        """caches: they are no weights, although a model may have them as saved buffers."""
        self._model = model if isinstance(model, nn.Module) else None
        self._caches = list(caches)
        self._seen = memory_of(self._tensors())
        self.num_changes = 0

    def have_changed(self) -> bool:
        """Whether they have changed since the last call."""
        before, self._seen = self._seen, memory_of(self._tensors())
        changed = self._seen != before
        self.num_changes += changed
        return changed

    def _tensors(self) -> list[Tensor]:
        found: list[Tensor | None] = []
        modules = [self._model]
        for module in modules:  # which grows: `nn.Module.modules` takes three times as long
            if module is None:
                continue
            if module._modules:
                modules += module._modules.values()
            if module._parameters:
                found += module._parameters.values()
            if module._buffers:
                unsaved = module._non_persistent_buffers_set
                found += [x for name, x in module._buffers.items() if name not in unsaved]
        caches = set(map(id, self._caches))
        return [x for x in found if x is not None and id(x) not in caches]
