"""Noticing that a model's weights have changed, as cached latents are those of the weights that they were made with."""

from collections.abc import Mapping

from torch import Tensor, nn


class Weights:
    """A model's parameters and saved buffers, as they were at the last look; none of what is no `nn.Module`.

    A look takes some 0.4 us a tensor: it reads an address and torch's count of writes. So it notices tensors that are
    written to in place, and others in their place. torch does not count what is written through `.data`, by fused
    optimizers, or to tensors of inference mode.
    """

    def __init__(self, model: object) -> None:
        self._places: list[tuple[Mapping[str, Tensor | None], str]] = []
        if isinstance(model, nn.Module):
            saved = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
            self._places = [
                (tensors, name)
                for module in model.modules()
                for tensors in (module._parameters, module._buffers)
                for name, tensor in tensors.items()
                if id(tensor) in saved and type(tensor) in (nn.Parameter, Tensor)
            ]
        self._seen = self._look()

    def have_changed(self) -> bool:
        """Whether they have since the last call."""
        before, self._seen = self._seen, self._look()
        return self._seen != before

    def _look(self) -> list[tuple[int, int]]:
        tensors = (tensors.get(name) for tensors, name in self._places)
        return [
            (0, 0) if x is None else (x.data_ptr(), -1 if x.is_inference() else x._version) for x in tensors
        ]
