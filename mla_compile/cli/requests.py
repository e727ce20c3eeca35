"""The files of `mla-compile generate`: prompts in, completions out, one JSON object a line."""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mla_compile.engine import Completion
from mla_compile.errors import MLAError

_LINE = 'one of {"prompt": TEXT} and {"prompt_token_ids": [ID, ...]}'


@dataclass(frozen=True)
class Request:
    """A prompt, and what to call it in an error: "prompts.jsonl, line 3"."""

    prompt: str | list[int]
    name: str


def read_requests(file: Path) -> list[Request]:
    """Every line of a file, or an error that names the first malformed one."""
    try:
        lines = file.read_text(encoding="utf-8-sig").rstrip().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise MLAError(f"--input {file}", "a readable file in UTF-8", error) from error
    if lines == [""]:
        raise MLAError(f"--input {file}", "at least one line", "an empty file")
    # An empty line inside is a mistake: skipped, it would shift the output's lines against the input's.
    return [_parse(line, f"{file}, line {number}") for number, line in enumerate(lines, start=1)]


def _parse(line: str, name: str) -> Request:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MLAError(name, "a JSON object", error if line.strip() else "an empty line") from error
    if not isinstance(value, dict) or value.keys() not in ({"prompt"}, {"prompt_token_ids"}):
        raise MLAError(name, _LINE, _shorten(value))
    ((key, prompt),) = value.items()
    if key == "prompt":
        check_text(prompt, name)
    elif not isinstance(prompt, list) or any(type(token) is not int for token in prompt):
        raise MLAError(f"{name}: prompt_token_ids", "a list of integers", _shorten(prompt))
    return Request(prompt, name)


def check_text(prompt: object, name: str) -> None:
    """Refuse what is no text: another type, or half of a surrogate pair (a byte that is not UTF-8, in an argument)."""
    try:
        if isinstance(prompt, str):
            prompt.encode()
            return
    except UnicodeEncodeError:
        pass
    raise MLAError(f"{name}: prompt", "valid Unicode text", _shorten(prompt))


def _shorten(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:60] + "..."


def result_line(completion: Completion) -> str:
    """A completion as an output line. JSON's escapes keep it one line for every reader, U+2028 and all."""
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
    return json.dumps(result)


@contextmanager
def whole_file(path: Path) -> Iterator[Callable[[Iterable[str]], None]]:
    """Give a function to call once, with lines; `path` gets all of them, or keeps what it held.

    They go to a file beside it that takes its name then. That file is made at once, so that a directory which cannot
    be written to is found before the work, not after it.
    """
    target = path.resolve()  # through a link, not over it
    if target.exists() and not target.is_file():
        raise MLAError(
            f"--output {path}", "a regular file", "something else", "leave it out to write to stdout"
        )
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")

    def write(lines: Iterable[str]) -> None:
        with _errors_named(path):
            temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            temporary.replace(target)

    with _errors_named(path):
        temporary.touch(exist_ok=False)
    try:
        yield write  # what goes wrong in between is not the file's fault
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _errors_named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MLAError(f"--output {path}", "a file that can be written", error) from error
