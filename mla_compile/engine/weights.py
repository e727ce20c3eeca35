"""Noticing that a model's weights have changed, as cached latents are those of the weights that they were made with."""

from torch import Tensor, nn

from mla_compile.torch_internals import memory_of


class Weights:
    """A model's parameters and saved buffers, as they were at the last look; none of what is no `nn.Module`.

    A look takes some 0.5 us a tensor: it walks the modules, and reads which memory each tensor has and torch's count of
    writes. So it notices tensors that are written to in place, and other tensors or modules in their place. torch does
    not count what is written through `.data`, by fused optimizers, or to tensors of inference mode.
    """

    def __init__(self, model: object) -> None:
        self._model = model if isinstance(model, nn.Module) else None
        self._seen: list[tuple[object, ...]] = []
        self.have_changed()

    def have_changed(self) -> bool:
        """Whether they have since the last call."""
        before, self._seen = self._seen, memory_of(self._tensors())
        return self._seen != before

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
        return [x for x in found if x is not None]
