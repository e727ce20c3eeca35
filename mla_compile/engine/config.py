"""The configuration of an engine: one frozen object that the engine, the command and integrations share."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor, nn

from mla_compile.backend import resolve_settings
from mla_compile.caches import CacheSpec
from mla_compile.defaults import (
    DEFAULT_DRAFTS,
    DEFAULT_TOKENS_PER_STEP,
    LEAST_MAX_MODEL_LEN,
    LEAST_PROMPT_TOKENS,
    DeviceDefaults,
    default_max_model_len,
    defaults_on,
)
from mla_compile.engine.device_memory import bytes_left
from mla_compile.engine_settings import EngineFields, EngineSettings
from mla_compile.errors import MLAError
from mla_compile.ops.attention.decode_backends import check_name, select_backend
from mla_compile.ops.attention.segments import MAX_KEYS
from mla_compile.ops.dispatch import Call, describe_device
from mla_compile.ops.linear import fp8
from mla_compile.ops.linear.fp8_linear import BY_FP8
from mla_compile.speculate import Drafter, DrafterKind, DrafterSettings, ServedModel
from mla_compile.speculate.drafter import check_drafter, select_drafter
from mla_compile.suggest import suggestions


@dataclass(frozen=True, kw_only=True)
class EngineConfig(EngineFields):
    __doc__ = EngineFields.__doc__

    def __post_init__(self) -> None:
        super().__post_init__()
        check_drafter(self.drafter, self.drafter_model)
        if self.batch_invariant and self.compile is False:
            expected = "True with batch_invariant=True, which needs compiled steps"
            raise MLAError("compile", expected, False, "leave one of the two out")
        if self.fp8_activations and (self.batch_invariant or self.compile is False):
            other = "batch_invariant=True" if self.batch_invariant else "compile=False"
            raise MLAError("fp8_activations", f"False with {other}", True, "leave one of the two out")
        if self.compile is not False or self.mode != EngineFields.mode:  # the check takes a second
            resolve_settings(self.mode, None)
        check_name("decode_backend", self.decode_backend)

    @property
    def captures(self) -> bool:
        """Whether CUDA graphs are recorded on a device that has them."""
        return self.compile is not False and bool(resolve_settings(self.mode, None).get("triton.cudagraphs"))

    @property
    def compile_options(self) -> dict[str, Any]:
        """The options of `torch.compile`. The engine records CUDA graphs itself: one holds several compiled calls."""
        names = "batch_invariant", "fp8_activations"
        options = {"captured": self.captures} | {name: getattr(self, name) for name in names}
        return {**resolve_settings(self.mode, options), "triton.cudagraphs": False}

    def stored(self, specs: Iterable[CacheSpec]) -> list[CacheSpec]:
        """The caches of a model and its drafter with latents of `kv_cache_dtype`.

        Raises:
            MLAError: sizes of latents that do not fit it.
        """
        given = list(specs)
        for spec in given:
            if not isinstance(spec, CacheSpec):
                raise MLAError("cache_specs", "CacheSpecs, one for each cache", f"a {type(spec).__name__}")
        return [spec.stored_as(self.kv_cache_dtype) for spec in given]

    def fitted_to(
        self, model: ServedModel, *, device_type: str | None = None, left: int | None = None
    ) -> "FittedConfig":
        """These settings for one model, with defaults filled in.

        device_type, left: of a device to plan for: "cuda" or "cpu", and its bytes that the weights leave. By default
            of the model's own device.

        Raises:
            MLAError: a setting that the model or its device rules out, named.
        """
        _check_model(model)
        specs = self.stored(model.cache_specs())  # before anything is allocated
        _check_layers(model, specs)
        ranks = [spec.kv_lora_rank for spec in specs if spec.owner == "target"]
        if self.kv_cache_dtype == "fp8" and not any(ranks):
            expected = "'auto' for a model whose CacheSpecs have no kv_lora_rank"
            hint = "give the CacheSpec of each layer its `kv_lora_rank`"
            raise MLAError("kv_cache_dtype", expected, "'fp8'", hint)
        on = defaults_on(device_type or model.device.type)
        page_size, k, given = self.page_size or on.page_size, self._drafts(model), self
        # Without drafts the model need not support any drafter.
        kind = select_drafter(
            self.drafter if k > 0 else None,
            has_mtp=model.has_mtp,
            has_model=k > 0 and self.drafter_model is not None,
        )
        longest = self._longest(model, on, page_size=page_size, kind=kind if k > 0 else None, left=left)
        pages_per_row = -(-longest // page_size)
        if model.is_recurrent:
            given = self._fitted_to_recurrent(k, longest)
        if getattr(model, "selects_keys", False):
            self._check_for_selected_keys()
        device = describe_device(model.device)  # other constraints are checked when the model runs
        if self.fp8_activations:
            _check_for_fp8_activations(model)
        call = Call(*device, captured=self.captures, batch_invariant=self.batch_invariant)
        select_backend(call, self.decode_backend, "decode_backend")
        num_pages = given.num_pages or 1 + self.max_rows * pages_per_row
        if num_pages < 1 + pages_per_row:
            expected = f"at least {1 + pages_per_row}, for one row of max_model_len = {longest} tokens"
            raise MLAError("num_pages", expected, num_pages)
        if given.num_pages is None and num_pages >= 2**31:
            raise MLAError("max_rows, max_model_len, page_size", "fewer than 2**31 pages in all", num_pages)
        of_decode_rows = self.max_rows * (1 + k)
        default_tokens = max(DEFAULT_TOKENS_PER_STEP, of_decode_rows + LEAST_PROMPT_TOKENS)
        tokens = given.max_tokens_per_step or default_tokens
        if tokens < of_decode_rows:
            expected = f"at least max_rows * (1 + num_speculative_tokens) = {of_decode_rows}"
            raise MLAError("max_tokens_per_step", expected, tokens)
        settings = {field.name: getattr(given, field.name) for field in fields(EngineConfig)}
        return FittedConfig(
            **settings
            | {
                "drafter": kind,
                "drafter_model": self.drafter_model if k > 0 else None,
                "num_speculative_tokens": k,
                "page_size": page_size,
                "max_model_len": longest,
                "num_pages": num_pages,
                "max_tokens_per_step": tokens,
            },
            pages_per_grant=pages_per_row if model.is_recurrent else 1,
        )

    def _drafts(self, model: ServedModel) -> int:
        if self.num_speculative_tokens is not None:
            return self.num_speculative_tokens
        has_mtp = model.has_mtp and not model.is_recurrent
        drafts = has_mtp or self.drafter is not None or self.drafter_model is not None
        return DEFAULT_DRAFTS if drafts else 0

    def _longest(
        self,
        model: ServedModel,
        on: DeviceDefaults,
        *,
        page_size: int,
        kind: DrafterKind | None,
        left: int | None,
    ) -> int:
        """`max_model_len`; `kind` drafts."""
        positions = getattr(model, "max_position_embeddings", None)
        check_max_model_len(self.max_model_len, positions)
        if self.max_model_len is not None:
            return self.max_model_len
        affordable = 0
        if positions is not None and positions > LEAST_MAX_MODEL_LEN:
            specs = [spec for spec in model.cache_specs() if kind is not None or spec.owner == "target"]
            of_token = sum(spec.bytes_per_token for spec in self.stored(specs))
            left = bytes_left(model) if left is None else left
            if kind is not None and kind.sizes is not None and self.drafter_model is not None:
                weights, of_its_token = kind.sizes(self.drafter_model, model)
                left, of_token = left - weights, of_token + of_its_token
            affordable = on.cache_bytes(left) // max(1, self.max_rows * of_token)
        if self.num_pages is not None:
            affordable = min(affordable, (self.num_pages - 1) * page_size)
        return default_max_model_len(positions, affordable)

    def _check_for_selected_keys(self) -> None:
        """Raises `MLAError` for a setting that attention over selected keys rules out."""
        if self.batch_invariant:
            expected = "False for a model with indexers, whose scores have no batch-invariant kernel"
            raise MLAError("batch_invariant", expected, True)
        if self.decode_backend is not None:
            expected = "None for a model with indexers: no decode backend serves selected keys"
            raise MLAError("decode_backend", expected, self.decode_backend)

    def _fitted_to_recurrent(self, k: int, longest: int) -> "EngineConfig":
        """A row keeps one block of pages, which locates its state, and its prompt runs in one piece."""
        if self.batch_invariant:
            expected = "False for a model with recurrent layers, whose kernels are not batch-invariant"
            raise MLAError("batch_invariant", expected, True)
        if k > 0:
            expected = "0 for a model with recurrent layers, whose state cannot roll back a rejected draft"
            raise MLAError("num_speculative_tokens", expected, k)
        for name in ("num_pages", "max_tokens_per_step"):
            if getattr(self, name) is not None:
                raise MLAError(name, "None for a model with recurrent layers", getattr(self, name))
        return replace(self, prefix_caching=False, max_tokens_per_step=self.max_rows * (1 + longest))


@dataclass(frozen=True, kw_only=True)
class FittedConfig(EngineConfig):
    """Settings for one model, with all defaults filled in.

    pages_per_grant: cache pages per page of the scheduler.
    """

    num_speculative_tokens: int
    drafter: DrafterKind
    max_model_len: int
    page_size: int
    num_pages: int
    max_tokens_per_step: int
    pages_per_grant: int

    @property
    def captured_prompt_tokens(self) -> int:
        """The most prompt tokens of a step that is captured: with more, kernels take longer than launching them.

        Graphs share memory, so the longest captured step decides how much. A budget for graphs lasts for more of them
        if that step is shorter.
        """
        return 8192 if self.capture_budget is None else 4096

    def build_drafter(self, model: ServedModel) -> Drafter | None:
        """The drafter of an engine; None without drafts.

        Raises:
            MLAError: it reads the output of a layer that the model's forward does not return.
        """
        k = self.num_speculative_tokens
        if k == 0:
            return None
        settings = DrafterSettings(model, k, self.page_size, self.decode_backend, self.drafter_model)
        drafter = self.drafter.build(settings)
        num_layers = getattr(model, "num_aux_layers", 0)
        if type(num_layers) is not int:
            raise MLAError("model", "a whole number as its `num_aux_layers`", f"{num_layers!r:.80}")
        for layer in getattr(drafter, "aux_layers", ()):
            if type(layer) is not int or not 0 <= layer < num_layers:
                expected = f"indices of the {num_layers} layers whose outputs the model's forward can return"
                hint = "" if num_layers else "give the model `num_aux_layers`: see docs/own-module.md"
                raise MLAError("aux_layers", expected, repr(layer), hint)
        return drafter

    @property
    def pages_per_row(self) -> int:
        """Cache pages of a request of `max_model_len` tokens."""
        return -(-self.max_model_len // self.page_size)

    @property
    def max_keys_per_step(self) -> int | None:
        """See `Scheduler`."""
        return MAX_KEYS if self.pages_per_grant == 1 else None

    @property
    def prompt_tokens_per_step(self) -> int:
        """Prompt tokens of a step in which all rows decode; a step with fewer rows pads long prompts to as many."""
        return self.max_tokens_per_step - self.max_rows * (1 + self.num_speculative_tokens)


def check_max_model_len(given: int | None, positions: int | None) -> None:
    """Raises `MLAError` for more than the model's number of positions, if it has one."""
    if given is not None and positions is not None and given > positions:
        raise MLAError("max_model_len", f"at most the model's {positions} positions", given)


def config_of(config: EngineConfig | None, settings: EngineSettings) -> EngineConfig:
    """The config that a caller gave as an object or by keyword arguments.

    Raises:
        MLAError: both, or something else; an unknown name, with the closest known ones.
    """
    names = {f"--{field.name.replace('_', '-')}": field.name for field in fields(EngineConfig)}
    for name in settings:
        if name not in names.values():
            near = " or ".join(names[each] for each in suggestions(name, names))
            hint = f"did you mean {near}?" if near else "the settings are " + ", ".join(names.values())
            raise MLAError(name, "a setting of an engine", "an unknown name", hint)
    if config is None:
        return EngineConfig(**settings)
    if not isinstance(config, EngineConfig):
        raise MLAError("config", "an EngineConfig or None", type(config).__name__)
    if settings:
        raise MLAError("config", "None with other settings", ", ".join(settings), "use dataclasses.replace")
    return config


def _check_model(model: object) -> None:
    needed = (
        "logits",
        "cache_specs",
        "prepare",
        "vocab_size",
        "device",
        "has_mtp",
        "is_recurrent",
    )
    missing = [name for name in needed if not hasattr(model, name)]
    if not callable(model) or missing:
        got = f"{type(model).__name__} without {', '.join(missing) or '__call__'}"
        hint = "pass what `load_model` returns, or a model with all members of `ServedModel`"
        raise MLAError("model", "a model that an engine can serve", got, hint)


def _check_layers(model: object, specs: Sequence[CacheSpec]) -> None:
    """Raises `MLAError` for a layer with a `kv_cache` that no spec names: the engine would not allocate it."""
    known = {id(spec.layer) for spec in specs}
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(getattr(module, "kv_cache", None), Tensor) and id(module) not in known:
            raise MLAError("cache_specs", f"a CacheSpec of the layer {name}, which has a kv_cache", "none")


def _check_for_fp8_activations(model: ServedModel) -> None:
    """Raises `MLAError` where `fp8_activations` would change nothing: on another device, without FP8 weights."""
    if (reason := BY_FP8.why_not_on(*describe_device(model.device))) is not None:
        raise MLAError("fp8_activations", f"False on this device, as it {reason}", True)
    if isinstance(model, nn.Module) and not any(weight.dtype == fp8.DTYPE for weight in model.parameters()):
        hint = "load the model with quantize='fp8', or a checkpoint in FP8"
        raise MLAError("fp8_activations", "False for a model without FP8 weights", True, hint)
