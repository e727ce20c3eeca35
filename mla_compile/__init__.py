"""MLA attention and MTP speculative decoding, native to `torch.compile`.

The import is light and does not import torch: each name imports its module on first access.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `_PARTS` for type checkers
    from mla_compile.batch import DecodeSegment as DecodeSegment
    from mla_compile.batch import MLABatch as MLABatch
    from mla_compile.batch import PrefillSegment as PrefillSegment
    from mla_compile.engine import Completion as Completion
    from mla_compile.engine import Engine as Engine
    from mla_compile.engine import Grammar as Grammar
    from mla_compile.engine import follow as follow
    from mla_compile.engine import generate as generate
    from mla_compile.errors import MLAError as MLAError
    from mla_compile.explanation import Explanation as Explanation
    from mla_compile.explanation import explain as explain
    from mla_compile.models import Parallel as Parallel
    from mla_compile.models import load_model as load_model
    from mla_compile.models import load_tokenizer as load_tokenizer
    from mla_compile.ops import decode_segment as decode_segment
    from mla_compile.ops import mla_append as mla_append
    from mla_compile.ops import mla_attention as mla_attention
    from mla_compile.ops import mla_decode as mla_decode
    from mla_compile.ops import mla_prefill as mla_prefill
    from mla_compile.ops import mla_select_keys as mla_select_keys
    from mla_compile.ops import prefill_segment as prefill_segment
    from mla_compile.packing import PackedBatch as PackedBatch
    from mla_compile.packing import pack_batch as pack_batch
    from mla_compile.sampling_params import SamplingParams as SamplingParams

__version__ = "0.1.0"

_PARTS = {
    "batch": ("DecodeSegment", "MLABatch", "PrefillSegment"),
    "engine": (
        "Completion",
        "Engine",
        "Grammar",
        "follow",
        "generate",
    ),
    "errors": ("MLAError",),
    "explanation": ("Explanation", "explain"),
    "models": ("Parallel", "load_model", "load_tokenizer"),
    "ops": (
        "decode_segment",
        "mla_append",
        "mla_attention",
        "mla_decode",
        "mla_prefill",
        "mla_select_keys",
        "prefill_segment",
    ),
    "packing": ("PackedBatch", "pack_batch"),
    "sampling_params": ("SamplingParams",),
    "backend": (),
    "passes": (),
    "testing": (),
}
"""The submodules that are attributes of the package, and the public names that each one defines."""
_PART_OF = {name: part for part, names in _PARTS.items() for name in names}
__all__ = sorted(_PART_OF)  # noqa: PLE0605

if not TYPE_CHECKING:  # with a `__getattr__`, type checkers would accept any name

    def __getattr__(name):
        if name in _PARTS:
            return import_module(f"{__name__}.{name}")
        if name not in _PART_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_PART_OF[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_PARTS, *(name for name in globals() if name.startswith("__"))})


if "torch" in sys.modules:  # register `torch.ops.mla_compile`; else the first name that needs torch does
    import_module("mla_compile.ops")
