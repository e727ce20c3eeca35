"""`Accelerated`: the state of an accelerated model."""

from dataclasses import replace

from mla_compile.engine import CaptureReport, Completion, Engine, EngineConfig
from mla_compile.errors import MLAError
from mla_compile.integrations.transformers.generate_call import GenerateCall
from mla_compile.integrations.transformers.target import TransformersTarget
from mla_compile.models.layout import pack_adjacent


class Accelerated:
    """The state of an accelerated model, `model.mla`: the target and the engine that runs it.

    completions: of the last call of `generate`, one per row, with its number of steps and acceptance length.
    is_generating: whether a call of `generate` is under way.
    """

    def __init__(self, target: TransformersTarget, config: EngineConfig) -> None:
        """config: of the first engine, with a number of drafts and a `max_model_len`."""
        self.target = target
        self.completions: list[Completion] = []
        self.is_generating = False
        self._drafts = config.num_speculative_tokens
        self._config, self._hooks = config, target.hooks()
        self._engine: Engine | None = self._made(config)

    def capture_report(self) -> CaptureReport | None:
        """`Engine.capture_report` of the current engine; None if there was no memory for one."""
        return None if self._engine is None else self._engine.capture_report()

    def engine_for(self, call: GenerateCall) -> Engine:
        """The engine for a call; a larger one replaces it if needed.

        Raises:
            MLAError: the call needs an MTP layer that is missing, or more positions than the model has.
        """
        use_mtp = call.config.use_mtp
        if use_mtp and not self.target.has_mtp:
            expected = "accelerate(model, num_speculative_tokens=...) first, with an MTP layer"
            raise MLAError("use_mtp", expected, use_mtp)
        positions = self.target.max_position_embeddings
        if positions is not None and call.longest > positions:
            hint = "shorten the prompt, or lower max_new_tokens"
            raise MLAError("max_length", f"at most the model's {positions} positions", call.longest, hint)
        rows, length = self._config.max_rows, self._config.max_model_len
        assert length is not None
        while rows < len(call.prompts):
            rows *= 2
        while length < call.longest:
            length *= 2
        length = min(length, positions or length)
        drafts = 0 if use_mtp is False else self._drafts
        config = replace(self._config, num_speculative_tokens=drafts, max_rows=rows, max_model_len=length)
        hooks = self.target.hooks()
        is_same = (config, hooks) == (self._config, self._hooks)
        if self._engine is None or not is_same or not self.target.fits_its_caches():
            self._engine = None  # if there is no memory for a new one, the next call retries
            self._engine = self._made(config)
            self._config, self._hooks = config, hooks
        return self._engine

    def _made(self, config: EngineConfig) -> Engine:
        """Make an engine, and pack adjacent weights again, which `model.to` separates."""
        engine = Engine(self.target, config)
        pack_adjacent(self.target)
        return engine
