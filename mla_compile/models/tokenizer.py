"""Loads a checkpoint's tokenizer from its files by transformers, without running code."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from mla_compile.errors import MLAError, first_line, is_request_error
from mla_compile.hub import find_checkpoint
from mla_compile.models.files import MAX_CONFIG, plain_file, read_object, read_text
from mla_compile.models.settings import FLAG, Rule, check_settings
from mla_compile.progress import announce_if_slow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONFIG = "tokenizer_config.json"
_TOKENIZER = "tokenizer.json"
_SPECIAL = "special_tokens_map.json"
_ADDED = "added_tokens.json"
_OTHER_FORMATS = (
    "tokenizer.model",
    "tiktoken.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
_MAX_TOKENIZER = 2**28  # bytes
_HINT = "pass a directory with a tokenizer.json as tokenizer (--tokenizer DIR), or prompts as token ids"


def _is_token(value: object) -> bool:
    return isinstance(value["content"] if isinstance(value, dict) and "content" in value else value, str)


def _is_template(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("name", "template"))


_TOKEN = Rule("a token's text, or an object with its content", _is_token)
_TOKENS_BY_NAME = Rule(
    "an object with a token for each name",
    lambda value: isinstance(value, dict) and all(map(_is_token, value.values())),
)
_TOKENS = Rule(
    "a list of tokens, or an object with a token for each name",
    lambda value: _TOKENS_BY_NAME.accepts(value) or (isinstance(value, list) and all(map(_is_token, value))),
)
_TEMPLATES = Rule(
    "a text, or a list of objects with a name and a template",
    lambda value: isinstance(value, str) or (isinstance(value, list) and all(map(_is_template, value))),
)
_TOKENS_BY_ID = Rule(
    "an object with a token, an object with its content, for each id",
    lambda value: (
        isinstance(value, dict)
        and all(id.isdecimal() and type(token) is dict and _is_token(token) for id, token in value.items())
    ),
)
_ID = Rule("a token id", lambda value: type(value) is int and 0 <= value < 2**31)
# The settings read from special_tokens_map.json and tokenizer_config.json, by transformers' names. Both may have other
# tokens of a model too: any other `..._token`.
_SPECIAL_TOKENS: dict[str, Rule] = {
    **{f"{kind}_token": _TOKEN for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")},
    "additional_special_tokens": _TOKENS,
    "extra_special_tokens": _TOKENS,
}
_SETTINGS: dict[str, Rule] = {
    **_SPECIAL_TOKENS,
    "model_specific_special_tokens": _TOKENS_BY_NAME,
    "added_tokens_decoder": _TOKENS_BY_ID,
    "chat_template": _TEMPLATES,
    "clean_up_tokenization_spaces": FLAG,
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": FLAG,
    "split_special_tokens": FLAG,
    "add_bos_token": FLAG,
    "model_max_length": Rule("a number >= 1", lambda value: type(value) in (int, float) and value >= 1),  # type: ignore[operator]
}


@announce_if_slow("loading the tokenizer")
def load_tokenizer(path: str | Path, name: str = "path") -> "PreTrainedTokenizerBase | None":
    """A checkpoint's tokenizer: `tokenizer.json`, with the tokens of the files beside it, as from `AutoTokenizer`.

    No code of the checkpoint runs, whatever its files contain; docs/checkpoints.md lists what is read. None if the
    directory has no tokenizer.

    path: a directory, or ORG/NAME of a model in the local Hugging Face cache. name: of this argument, for errors.

    Raises:
        MLAError: no such directory; a tokenizer that is code, or in another format; files that cannot be read.
    """
    directory = find_checkpoint(path, name)
    if not directory.is_dir():
        raise MLAError(name, "a directory in Hugging Face format", f"{directory}, which is none")
    config = read_object(directory, _CONFIG, most=MAX_CONFIG) or {}
    if config.get("auto_map"):
        code = f"{config['auto_map']!r:.80}, which is never run"
        raise MLAError(f"{directory / _CONFIG}: auto_map", "a tokenizer that is not code", code, _HINT)
    text = read_text(directory, _TOKENIZER, most=_MAX_TOKENIZER)
    if text is None:
        if other := next((name for name in _OTHER_FORMATS if plain_file(directory, name)), None):
            raise MLAError(str(directory), f"a tokenizer in {_TOKENIZER}", other, _HINT)
        return None
    return _tokenizer(text, _files(config, directory), directory)


def _files(config: dict[str, Any], directory: Path) -> dict[str, dict[str, Any]]:
    """The settings read from the files beside tokenizer.json, by file name."""
    config = {
        name: value
        for name, value in config.items()
        if value is not None or name.endswith(("_token", "_tokens"))  # tokens are numbered by their order
    }
    template = read_text(directory, "chat_template.jinja", most=MAX_CONFIG)
    if template is not None:
        config["chat_template"] = template
    config = _known(config, _SETTINGS, directory / _CONFIG)
    files = {_CONFIG: {name: _typed(name, value) for name, value in config.items()}}
    special = read_object(directory, _SPECIAL, most=MAX_CONFIG)
    if special is not None:
        files[_SPECIAL] = special = _known(special, _SPECIAL_TOKENS, directory / _SPECIAL)
        for name in special.keys() & {"additional_special_tokens"}:  # transformers converts the others
            special[name] = _typed(name, special[name])
    added = read_object(directory, _ADDED, most=MAX_CONFIG)
    if added is not None:
        check_settings(added, dict.fromkeys(added, _ID), f"{directory / _ADDED}: ")
        files[_ADDED] = added
    return files


def _known(values: dict[str, Any], rules: dict[str, Rule], file: Path) -> dict[str, Any]:
    check_settings({name: value for name, value in values.items() if value is not None}, rules, f"{file}: ")
    return {name: value for name, value in values.items() if name in rules or name.endswith("_token")}


def _typed(name: str, value: Any) -> Any:
    """A setting; tokens that are objects are marked as in files that transformers saves."""
    if name.endswith("_tokens") and isinstance(value, list):
        return [_typed("_token", token) for token in value]
    if name.endswith("_token") and isinstance(value, dict) and _is_token(value):
        return value | {"__type": "AddedToken"}
    return value


def _tokenizer(text: str, files: dict[str, dict[str, Any]], directory: Path) -> "PreTrainedTokenizerBase":
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    try:
        if '"added_tokens"' not in text:  # transformers requires it
            text = Tokenizer.from_str(text).to_str()
        # Not by AutoTokenizer, which may run code, and from copies of the checked contents, so that transformers opens
        # no file that a checkpoint names.
        with _copies(
            {_TOKENIZER: text} | {name: json.dumps(values) for name, values in files.items()}
        ) as path:
            tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(
                path, local_files_only=True
            )
        _set_bos(tokenizer, files[_CONFIG].get("add_bos_token"), directory / _CONFIG)
    except MLAError:
        raise
    except BaseException as error:  # tokenizers raises bare `Exception` for a malformed file, and panics
        if not is_request_error(error):
            raise
        expected = "a tokenizer that the tokenizers library can read, with the tokens of the files beside it"
        raise MLAError(str(directory / _TOKENIZER), expected, first_line(error), _HINT) from error
    tokenizer.name_or_path = tokenizer.init_kwargs["name_or_path"] = str(directory)
    return tokenizer


def _set_bos(tokenizer: "PreTrainedTokenizerBase", wanted: bool | None, file: Path) -> None:
    """Begin texts with the BOS token, or not, as tokenizer_config.json says; None leaves it to tokenizer.json.

    transformers 5 ignores `add_bos_token` beside a tokenizer.json, and DeepSeek's has only this flag for it.
    """
    from tokenizers.processors import TemplateProcessing

    token, token_id = tokenizer.bos_token, tokenizer.bos_token_id
    if wanted is None or token_id is None:
        return
    added: list[int] = tokenizer("")["input_ids"]
    if wanted == (token_id in added):
        return
    if set(added) - {token_id}:  # the template below would drop them
        tokens = tokenizer.convert_ids_to_tokens(added)
        expected = f"none beside a {_TOKENIZER} that adds other special tokens too, {tokens}"
        raise MLAError(f"{file}: add_bos_token", expected, wanted, "remove it from the file")
    # Not by transformers' setter, which reads the token's text as a part of the template.
    bos = {"id": "BOS", "ids": [token_id], "tokens": [token]}
    first = "BOS " * wanted
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{first}$A", pair=f"{first}$A $B", special_tokens=[bos] * wanted
    )


def _copies(files: dict[str, str]) -> "TemporaryDirectory[str]":
    try:
        directory = TemporaryDirectory()
        for name, text in files.items():
            Path(directory.name, name).write_bytes(text.encode())
    except OSError as error:
        raise MLAError("TMPDIR", "a directory with room for a copy of a tokenizer's files", error) from error
    return directory
