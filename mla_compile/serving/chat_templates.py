"""Chat templates: one of a file, and the variables that a request sets. transformers renders them, in its sandbox."""

import inspect
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mla_compile.errors import MLAError
from mla_compile.models.files import MAX_CONFIG
from mla_compile.serving.failures import BadField

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SWITCHES = ("enable_thinking", "thinking")
"""Variables of templates, GLM's and DeepSeek's, that turn reasoning on and off."""
_FUNCTIONS = {"raise_exception", "strftime_now"}  # of transformers; jinja2 has its own


class _Generation(Extension):
    """Parses `{% generation %}`, which marks the model's own text for training."""

    tags = {"generation"}  # noqa: RUF012, as in jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_PARSER = ImmutableSandboxedEnvironment(extensions=[_Generation, loopcontrols])


def read_chat_template(file: Path) -> str:
    """The template in a file.

    Raises:
        MLAError: a file that cannot be read, or is no template.
    """
    name = "chat_template"
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_CONFIG + 1)
        text = content.decode("utf-8")
        _PARSER.parse(text)
    except (OSError, UnicodeDecodeError) as error:
        raise MLAError(name, "a readable file in UTF-8", error, str(file)) from error
    except TemplateSyntaxError as error:
        raise MLAError(
            name, "a Jinja template", f"{error.message}, line {error.lineno}", str(file)
        ) from error
    if len(content) > MAX_CONFIG:
        raise MLAError(name, f"at most {MAX_CONFIG} bytes", "more", str(file))
    return text


def template_variables(
    tokenizer: "PreTrainedTokenizerBase", given: dict[str, Any], effort: str | None
) -> dict[str, Any]:
    """The variables of a request for the tokenizer's chat template.

    given: its `chat_template_kwargs`. effort: its `reasoning_effort`, which also sets the switches that the template
    reads and `given` lacks: "none" turns them off, any other effort on.

    Raises:
        BadField: a variable that the template does not read, or that is not the client's to set: the messages,
            special tokens and functions; an effort other than "none" for a template without any of these variables.
    """
    readable = _readable(tokenizer.get_chat_template())
    for name in given:
        if name not in readable:
            known = ", ".join(sorted(readable)) or "none"
            expected = f"expected a variable that the model's chat template reads, which are: {known}"
            raise BadField("chat_template_kwargs", f"{expected}; got {name!r:.100}")
    if effort is None:
        return given
    if "reasoning_effort" in given:
        raise BadField("reasoning_effort", "expected in one place, got it in chat_template_kwargs too")
    of_effort: dict[str, Any] = {"reasoning_effort": effort} | dict.fromkeys(_SWITCHES, effort != "none")
    found = {name: value for name, value in of_effort.items() if name in readable}
    if not found and effort != "none":
        message = "the model's chat template does not read it; remove it"
        raise BadField("reasoning_effort", message, "unsupported_parameter")
    return found | given


@lru_cache(maxsize=8)
def _readable(template: str) -> frozenset[str]:
    """The variables that a template reads and a client may set."""
    from transformers import PreTrainedTokenizerBase

    arguments = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys()
    taken = {"messages"} | arguments | _FUNCTIONS | _PARSER.globals.keys()
    names = find_undeclared_variables(_PARSER.parse(template)) - taken
    return frozenset(name for name in names if not name.endswith(("_token", "_tokens")))
