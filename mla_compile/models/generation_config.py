"""A checkpoint's `generation_config.json`: how its requests are sampled by default, and the ids that end a text."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mla_compile.errors import MLAError
from mla_compile.models.files import MAX_CONFIG, read_object
from mla_compile.models.settings import GENERATION_SETTINGS, check_settings
from mla_compile.sampling_params import OF_GENERATION_CONFIG, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

log = logging.getLogger(__name__)

GENERATION_CONFIG = "generation_config.json"


def read_generation_config(
    directory: Path, config: "PreTrainedConfig", use: Literal["auto", "none"]
) -> tuple[dict[str, Any], list[int]]:
    """The file's sampling parameters, by the names of `SamplingParams`, and the ids that end a text.

    `do_sample: false` is greedy, as in transformers. Without `do_sample` a temperature counts, as in vLLM; it is 1 if
    only `do_sample: true` is given. Ids outside the vocabulary are left out.

    config: has the end-of-sequence ids if the file has none. use: "none" ignores the file.

    Raises:
        MLAError: a bad value, with the file and the key named; another `use`.
    """
    if use not in ("auto", "none"):
        raise MLAError("generation_config", "'auto' or 'none'", f"{use!r:.80}")
    found = read_object(directory, GENERATION_CONFIG, most=MAX_CONFIG) if use == "auto" else None
    raw, prefix = found or {}, f"{directory / GENERATION_CONFIG}: "
    check_settings(raw, GENERATION_SETTINGS, prefix)
    given = {name: raw[name] for name in OF_GENERATION_CONFIG if raw.get(name) is not None}
    if given.get("top_k") == -1:  # vLLM's value for all tokens
        given["top_k"] = 0
    try:
        SamplingParams(**given)
    except MLAError as error:
        raise MLAError(f"{prefix}{error.name}", error.expected, f"{error.got!s:.80}", error.hint) from None
    if raw.get("do_sample") is not None:
        given["temperature"] = given.get("temperature", 1.0) if raw["do_sample"] else 0.0
    ends = raw.get("eos_token_id")
    return given, _in_vocabulary(config.eos_token_id if ends is None else ends, config.vocab_size, directory)


def _in_vocabulary(ends: int | list[int] | None, vocab_size: int, directory: Path) -> list[int]:
    ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if outside := [id for id in ids if id >= vocab_size]:
        log.warning("%s: eos_token_id %s is outside of the vocabulary of %d", directory, outside, vocab_size)
    return [id for id in ids if id < vocab_size]
