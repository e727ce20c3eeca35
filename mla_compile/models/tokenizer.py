"""A checkpoint's tokenizer: its `tokenizer.json`, and never code."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_compile.errors import MLAError
from mla_compile.models.files import first_line, plain_file, read_object, read_text
from mla_compile.models.settings import FLAG, Rule, check_settings
from mla_compile.waits import told

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerBase

_CONFIG = "tokenizer_config.json"
_TOKENIZER = "tokenizer.json"
_OTHER_FORMATS = (
    "tokenizer.model",
    "tiktoken.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
_MOST_CONFIG = 2**24  # bytes
_MOST_TOKENIZER = 2**28  # bytes
_MEND = "name a directory with a tokenizer.json as tokenizer (--tokenizer DIR), or give prompts as token ids"


def _is_token(value: object) -> bool:
    return isinstance(value["content"] if isinstance(value, dict) and "content" in value else value, str)


_TOKEN = Rule("a token's text, or an object with its content", _is_token)
_TOKENS = Rule("a list of tokens", lambda value: isinstance(value, list) and all(map(_is_token, value)))
_TEMPLATES = Rule(
    "a text, or a list of objects with a name and a template",
    lambda value: (
        isinstance(value, str)
        or (
            isinstance(value, list)
            and all(
                isinstance(item, dict) and all(isinstance(item.get(key), str) for key in ("name", "template"))
                for item in value
            )
        )
    ),
)
# What is read of tokenizer_config.json, by the names that transformers gives its tokenizers' arguments.
_SETTINGS: dict[str, Rule] = {
    **{f"{kind}_token": _TOKEN for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")},
    "additional_special_tokens": _TOKENS,
    "chat_template": _TEMPLATES,
    "clean_up_tokenization_spaces": FLAG,
    "split_special_tokens": FLAG,
    "model_max_length": Rule("a number >= 1", lambda value: type(value) in (int, float) and value >= 1),  # type: ignore[operator]
}


@told("loading the tokenizer")
def load_tokenizer(path: str | Path) -> "PreTrainedTokenizerBase | None":
    """A checkpoint's tokenizer, as `tokenizer.json` and the special tokens of `tokenizer_config.json` make it.

    Nothing of the checkpoint runs, whatever its files say; docs/checkpoints.md says what is read. None where the
    directory holds no tokenizer.

    Raises:
        MLAError: no such directory; a tokenizer that is code, or in another format; files that cannot be read.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise MLAError(str(directory), "a directory in Hugging Face format", "no such directory")
    config = read_object(directory, _CONFIG, most=_MOST_CONFIG) or {}
    if config.get("auto_map"):
        code = f"{config['auto_map']!r:.80}, which is never run"
        raise MLAError(f"{directory / _CONFIG}: auto_map", "a tokenizer that is no code", code, _MEND)
    text = read_text(directory, _TOKENIZER, most=_MOST_TOKENIZER)
    if text is None:
        if other := next((name for name in _OTHER_FORMATS if plain_file(directory, name)), None):
            raise MLAError(str(directory), f"a tokenizer in {_TOKENIZER}", other, _MEND)
        return None
    return _tokenizer(text, _settings(config, directory), directory)


def _settings(config: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Arguments of a tokenizer; null counts as left out."""
    given = {name: value for name, value in config.items() if name in _SETTINGS and value is not None}
    template = read_text(directory, "chat_template.jinja", most=_MOST_CONFIG)
    if template is not None:
        given["chat_template"] = template
    check_settings(given, _SETTINGS, f"{directory / _CONFIG}: ")
    for name, rule in _SETTINGS.items():
        if name in given and rule is _TOKEN:
            given[name] = _added_token(given[name])
    given["extra_special_tokens"] = [_added_token(t) for t in given.pop("additional_special_tokens", ())]
    return given


def _added_token(token: str | dict[str, Any]) -> "str | AddedToken":
    from tokenizers import AddedToken

    if isinstance(token, str):
        return token
    flags = {flag: bool(token.get(flag)) for flag in ("single_word", "lstrip", "rstrip", "normalized")}
    return AddedToken(token["content"], special=True, **flags)


def _tokenizer(text: str, settings: dict[str, Any], directory: Path) -> "PreTrainedTokenizerBase":
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    try:
        # Not by AutoTokenizer, whose ways lead to code, to files elsewhere and to the network.
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(text), **settings)
    except Exception as error:  # tokenizers raises bare `Exception` for a malformed file
        expected = "a tokenizer that the tokenizers library can read"
        raise MLAError(str(directory / _TOKENIZER), expected, first_line(error), _MEND) from error
    tokenizer.name_or_path = str(directory)
    return tokenizer
