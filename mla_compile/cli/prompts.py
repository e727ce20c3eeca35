"""Input and output files of `mla-compile generate`: one JSON object per line. Does not import torch."""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mla_compile.errors import MLAError
from mla_compile.sampling_params import SamplingParams, check_token_ids

if TYPE_CHECKING:
    from mla_compile.engine import Completion

STDIN = Path("-")
_PROMPTS = ("prompt", "prompt_token_ids")
_LINE = 'one of {"prompt": TEXT} and {"prompt_token_ids": [ID, ...]}, with optional settings'
_SETTINGS = [field.name for field in fields(SamplingParams)]
"""Further keys that a line may have."""

Write = Callable[[Iterable[str]], None]


@dataclass(frozen=True)
class GivenPrompt:
    """A prompt, the sampling parameters that it was given, and its name in errors, such as "prompts.jsonl, line 3".

    line: its number in the file; None if it is not from a file.
    """

    prompt: str | list[int]
    settings: dict[str, Any]
    name: str
    line: int | None = None

    def sampling(self, default: dict[str, Any]) -> SamplingParams:
        """Its parameters. default: those of the checkpoint, which the given ones override."""
        return SamplingParams(**{**default, **self.settings})

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Puts its name before the names of errors."""
        try:
            yield
        except MLAError as error:
            raise MLAError(f"{self.name}: {error.name}", error.expected, error.got, error.hint) from error


def read_prompts(prompt: str | None, input_file: Path | None, settings: dict[str, Any]) -> list[GivenPrompt]:
    """The prompt, or every line of the file ("-" is standard input) that is not blank.

    settings: sampling parameters, which a line's own override.

    Raises:
        MLAError: neither or both are given; a malformed line, named with its file and key.
    """
    if prompt is not None and input_file is None:
        check_text(prompt, "--prompt")
        return [GivenPrompt(prompt, settings, "--prompt")]
    if prompt is not None or input_file is None:
        raise MLAError("--prompt, --input", "one of them", "neither" if prompt is None else "both")
    file = "stdin" if input_file == STDIN else str(input_file)
    text = _read_text(f"--input {input_file}", input_file)
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise MLAError(f"--input {input_file}", "at least one prompt, one per line", "none")
    return [_parse(line, f"{file}, line {number}", number, settings) for number, line in lines]


def _read_text(name: str, file: Path) -> str:
    if file == STDIN and sys.stdin is None:  # the process was started with it closed
        raise MLAError(name, "an open standard input", "a closed one")
    try:
        raw = sys.stdin.buffer.read() if file == STDIN else file.read_bytes()
        return raw.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise MLAError(name, "a readable file in UTF-8", error) from error


def _parse(line: str, name: str, number: int, settings: dict[str, Any]) -> GivenPrompt:
    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise MLAError(f"{name}: {_shorten(key)}", "a single occurrence", keys.count(key))
        return dict(pairs)

    try:
        value = json.loads(line, object_pairs_hook=without_duplicates)
    except MLAError:
        raise
    except (ValueError, RecursionError) as error:
        why = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise MLAError(name, 'a JSON object such as {"prompt": TEXT}', f"{_shorten(line)} ({why})") from error
    if not isinstance(value, dict) or sum(key in value for key in _PROMPTS) != 1:
        raise MLAError(name, _LINE, _shorten(value))
    (key,) = value.keys() & set(_PROMPTS)
    prompt = value.pop(key)
    if key == "prompt":
        check_text(prompt, name)
    else:
        check_token_ids(f"{name}: prompt_token_ids", prompt)
    for key in (key for key in value if key not in _SETTINGS):
        known = ", ".join((*_PROMPTS, *_SETTINGS))
        raise MLAError(f"{name}: {_shorten(key)}", f"one of {known}", "an unknown key")
    given = GivenPrompt(prompt, {**settings, **value}, name, number)
    with given.named_in_errors():
        given.sampling({})
    return given


def check_text(prompt: object, name: str) -> None:
    """Raise `MLAError` unless it is a string without lone surrogates (an argument's bytes that are not UTF-8)."""
    if not isinstance(prompt, str):
        raise MLAError(f"{name}: prompt", "a string", _shorten(prompt))
    if re.search("[\ud800-\udfff]", prompt):
        raise MLAError(f"{name}: prompt", "valid Unicode text", _shorten(prompt))


def _shorten(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:60] + "..."


def read_grammar(files: dict[str, Path | None], regex: str | None) -> tuple[str, str] | None:
    """A grammar's flag and text: those of --regex, or of the one of `files` that is given.

    Raises:
        MLAError: several are given, or a file cannot be read.
    """
    given = {flag: value for flag, value in {**files, "--regex": regex}.items() if value is not None}
    if len(given) > 1:
        raise MLAError(", ".join(given), "one of them", "both" if len(given) == 2 else f"{len(given)}")
    for flag, value in given.items():
        return flag, value if isinstance(value, str) else _read_text(f"{flag} {value}", value)
    return None


def result_line(given: GivenPrompt, completions: Sequence["Completion"]) -> str:
    """A prompt's completions as an output line: an object with the keys of the only one, or with "completions".

    It begins with "line" if the prompt is from a file. Escapes keep it on one line, even with U+2028.
    """
    results = [_result(completion) for completion in completions]
    origin = {} if given.line is None else {"line": given.line}
    return json.dumps(origin | (results[0] if len(results) == 1 else {"completions": results}))


def _result(completion: "Completion") -> dict[str, Any]:
    result: dict[str, Any] = {
        "token_ids": completion.token_ids,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "acceptance_length": completion.acceptance_length,
    }
    if completion.logprobs is not None:
        result["logprobs"] = [
            {str(token): asdict(logprob) for token, logprob in place.items()} for place in completion.logprobs
        ]
    if completion.error is not None:
        result["error"] = completion.error
    return result


def result_writer(output_file: Path | None, input_file: Path | None, *, streamed: bool) -> Write:
    """A function to call once, which writes JSON lines to the file, else to stdout unless the text is streamed there.

    The file is replaced at once by a temporary file beside it: it has all lines, or keeps its contents.

    Raises:
        MLAError: the file cannot be written (here or from the function), or is the input file.
    """
    if output_file is None:
        return lambda lines: None if streamed else typer.echo("\n".join(lines))
    try:
        target = Path(os.path.realpath(output_file))  # a symbolic link stays; its target is written
        # A link is left of a loop of links alone.
        is_other = target.is_symlink() or (target.exists() and not target.is_file())
    except OSError as error:
        raise MLAError(f"--output {output_file}", "a file that can be written", error) from error
    if input_file not in (None, STDIN) and input_file.resolve() == target:
        raise MLAError("--output", "another file than --input", output_file)
    if is_other:
        hint = "leave it out to write to stdout"
        raise MLAError(f"--output {output_file}", "a regular file", "something else", hint)
    temporary = target.with_name(f".mla-compile.{os.getpid()}.tmp")  # not longer than a file's name may be

    def write(lines: Iterable[str]) -> None:
        try:
            with temporary.open("w", encoding="utf-8") as file:
                if target.exists():
                    shutil.copymode(target, temporary)  # before it has any content
                file.writelines(f"{line}\n" for line in lines)
            temporary.replace(target)
        except OSError as error:
            raise MLAError(f"--output {output_file}", "a file that can be written", error) from error
        finally:
            temporary.unlink(missing_ok=True)

    try:  # finds an unwritable directory before the model runs
        temporary.touch(exist_ok=False)
        temporary.unlink()
    except OSError as error:
        raise MLAError(f"--output {output_file}", "a file that can be written", error) from error
    return write
