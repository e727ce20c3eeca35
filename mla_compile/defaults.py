"""The defaults of all settings, which `Engine`, `generate`, `accelerate`, the commands and the server share.

Importing them takes no torch. docs/defaults.md has them as a table.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

SHIPPED_MODEL = Path(__file__).parent / "models" / "shipped"
SHIPPED_HEAD = SHIPPED_MODEL.with_name("shipped_eagle3")
"""An EAGLE-3 head for it."""
DEFAULT_DRAFTS = 3
"""Tokens drafted per step by default, if the model has an MTP layer or a drafter was given."""
MAX_DRAFTS = 32
"""Far more than is useful: each one is a pass of the MTP layer in the graph."""
DEFAULT_MAX_TOKENS = 128
"""New tokens per request."""
DEFAULT_MAX_ROWS = 8
"""Requests that run at once."""
LEAST_MAX_MODEL_LEN = 2048
"""Tokens of a request of a model that has as many positions, even if the cache then exceeds `DeviceDefaults`."""
DEFAULT_TOKENS_PER_STEP = 4096
"""Of decode rows and prompts together. It bounds the activations, and how long a prompt delays decode rows."""
LEAST_PROMPT_TOKENS = 512
"""Prompt tokens of a step by default, beside any number of decode rows."""

DrafterName = Literal["mtp", "ngram", "eagle3"]
"""The names in `speculate.drafter.DRAFTERS`."""
DtypeName = Literal["float32", "bfloat16"]
KvCacheDtype = Literal["auto", "fp8"]
"""Of latents: the dtype of the weights, or FP8 (`latents.py`)."""


@dataclass(frozen=True)
class DeviceDefaults:
    """The defaults that depend on the kind of device.

    dtype: of weights and caches, torch's name.
    page_size: tokens of a cache page.
    kept_bytes: for steps and CUDA graphs.
    cache_share: of the memory that weights and `kept_bytes` leave, for `max_rows` requests of `max_model_len` tokens.
    """

    dtype: DtypeName
    page_size: int
    kept_bytes: int
    cache_share: float

    def cache_bytes(self, left: int) -> int:
        """Bytes for `max_rows` requests of `max_model_len` tokens. left: bytes that the weights leave."""
        return max(0, int(self.cache_share * (left - self.kept_bytes)))


DEVICE_DEFAULTS = {
    "cuda": DeviceDefaults("bfloat16", page_size=64, kept_bytes=3 * 2**30, cache_share=0.5),
    # Its memory is the computer's, which other programs need too.
    "cpu": DeviceDefaults("float32", page_size=16, kept_bytes=0, cache_share=0.1),
}


_GPU, _CPU = DEVICE_DEFAULTS["cuda"], DEVICE_DEFAULTS["cpu"]
IN_WORDS = {
    "dtype": f"{_GPU.dtype} on GPUs, else {_CPU.dtype}",
    "num_speculative_tokens": f"{DEFAULT_DRAFTS} if the model has an MTP layer or a drafter is given, else 0",
    "drafter": "eagle3 with a drafter_model; else mtp if the model has an MTP layer; else ngram if "
    "num_speculative_tokens is given; else no drafts",
    "max_rows": f"{DEFAULT_MAX_ROWS}",
    "page_size": f"{_GPU.page_size} on GPUs, else {_CPU.page_size}",
    "max_model_len": "the model's positions, or fewer if memory is short",
    "num_pages": "enough for all rows at their longest",
    "max_tokens_per_step": f"{DEFAULT_TOKENS_PER_STEP}, or {LEAST_PROMPT_TOKENS} beside all decode rows if more",
}
"""The defaults for the help of flags, `mla-compile env` and docs/defaults.md."""


def defaults_on(device_type: str) -> DeviceDefaults:
    """The defaults on a kind of device; on others than GPUs those of a CPU."""
    return DEVICE_DEFAULTS.get(device_type, DEVICE_DEFAULTS["cpu"])


def default_dtype(device: "str | torch.device") -> "torch.dtype":
    """The dtype of weights and caches on a device."""
    import torch

    dtype: torch.dtype = getattr(torch, defaults_on(torch.device(device).type).dtype)
    return dtype


def default_max_model_len(positions: int | None, affordable: int) -> int:
    """The maximum tokens of a request: the model's positions, or a power of two if memory allows fewer.

    The size of the caches follows from it and is compiled in: few sizes let other processes find the compiled step.

    positions: the model's number of positions; None if it has no limit.
    affordable: tokens of a request for which memory allows `max_rows` such requests.
    """
    if positions is None or positions <= LEAST_MAX_MODEL_LEN:
        return positions or LEAST_MAX_MODEL_LEN
    if positions <= affordable:
        return positions
    return max(LEAST_MAX_MODEL_LEN, 1 << affordable.bit_length() - 1 if affordable > 0 else 0)


def setting(
    default: Any,
    commands: str,
    help: str,
    *,
    least: int | None = None,
    most: int = 2**31 - 1,
    kind: Any = None,
    **flag: Any,
) -> Any:
    """A field of a dataclass whose fields are settings.

    commands: the commands that have a flag for it. help: its help text. kind: the flag's type, if it differs from
    the field's type. flag: further arguments of `typer.Option`. least, most: bounds of an integer.
    """
    metadata = {"commands": commands.split(), "help": help, "least": least, "most": most, "kind": kind}
    return field(default=default, metadata=metadata | {"flag": flag})
