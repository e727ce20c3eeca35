"""`Accelerated`: what an accelerated model has beside its weights."""

from typing import Any

from transformers import PreTrainedModel

from mla_compile.engine import CaptureReport, Completion, Engine
from mla_compile.errors import MLAError
from mla_compile.integrations.transformers.requests import Request
from mla_compile.integrations.transformers.target import TransformersTarget


class Accelerated:
    """What an accelerated model has beside its weights, as `model.mla`: the target and the engine that serves it.

    completions: of the last call of `generate`, one a row, with the steps it took and its acceptance length.
    """

    own_class: type[PreTrainedModel]

    def __init__(
        self, target: TransformersTarget, drafts: int, rows: int, length: int, settings: dict[str, Any]
    ) -> None:
        """settings: those of every engine; drafts, rows, length: those of the first."""
        self.target = target
        self.completions: list[Completion] = []
        self._settings = settings
        self._drafts = drafts
        self._sizes = drafts, rows, length
        self._engine: Engine | None = self._new_engine(*self._sizes)

    def _new_engine(self, drafts: int, rows: int, length: int) -> Engine:
        return Engine(
            self.target,
            num_speculative_tokens=drafts,
            max_rows=rows,
            max_model_len=length,
            prefix_caching=False,  # weights may change between calls
            **self._settings,
        )

    def capture_report(self) -> CaptureReport | None:
        """`Engine.capture_report` of the engine that serves now; None where there was no memory for one."""
        return None if self._engine is None else self._engine.capture_report()

    def engine_for(self, request: Request) -> Engine:
        """The engine, a roomier one if it must be.

        Raises:
            MLAError: the MTP layer is asked for, and there is none.
        """
        use_mtp = request.config.use_mtp
        if use_mtp and not self.target.has_mtp:
            expected = "accelerate(model, num_speculative_tokens=...) first, with an MTP layer"
            raise MLAError("use_mtp", expected, use_mtp)
        drafts = 0 if use_mtp is False else self._drafts
        _, rows, length = self._sizes
        while rows < len(request.prompts):
            rows *= 2
        while length < request.longest:
            length *= 2
        sizes = drafts, rows, length
        if self._engine is None or sizes != self._sizes or not self.target.fits_its_caches():
            self._engine = None  # where there is no memory for a new one, the next call tries again
            self._engine = self._new_engine(*sizes)
            self._sizes = sizes
        return self._engine
