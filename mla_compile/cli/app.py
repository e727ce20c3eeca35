"""The commands. A user's mistake gives one line on stderr and exit code 2, without a traceback."""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

import mla_compile
from mla_compile.cli import streams
from mla_compile.cli.commands import demo, env, generate, inspect, plan, serve
from mla_compile.errors import MLAError, of_pydantic
from mla_compile.suggest import did_you_mean

# typer's base class of usage errors, which typer does not export by name.
_UsageError: Any = typer.BadParameter.__mro__[1]


_OUT_OF_MEMORY = (
    "out of memory: use fewer or shorter prompts, a smaller --max-new-tokens or --dtype bfloat16 "
    "(inspect: smaller --rows or --prefill-tokens)"
)


class OneLineErrors(TyperGroup):
    """A group of commands that reports each error in one line."""

    def main(
        self, args: Sequence[str] | None = None, prog_name: str | None = None, *_: Any, **settings: Any
    ) -> Any:
        settings["standalone_mode"] = False
        try:
            sys.exit(super().main(args, prog_name, **settings))
        except _UsageError as error:
            _add_value(error)
            _fail(f"{error.format_message()} (see --help)")
        except MLAError as error:
            _fail(str(error))
        except OSError:
            # typer handles a closed pipe: it exits quietly with code 1.
            if why_not := streams.cannot_write():
                _fail(f"cannot write to standard output: {why_not}")
            raise
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            first_line = str(error).partition("\n")[0] or "MemoryError"
            _fail(f"{_OUT_OF_MEMORY}; {first_line}")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = [*args]
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            _add_suggestion(error, words, _names(self, ctx))
            unknown = getattr(error, "option_name", "")
            having = [name for name, command in self.commands.items() if unknown in _names(command, ctx)]
            if having:
                error.message = f"{unknown} must follow a command ({', '.join(having)})"
            raise

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except _UsageError as error:
            hint = did_you_mean(args[0], self.commands)
            error.message = error.message.rstrip(".") + hint
            raise


class InFlags(TyperCommand):
    """A command whose errors name its flags in place of the library's arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words, names = [*args], _names(self, ctx)
        ctx.allow_extra_args = True
        try:
            extra = super().parse_args(ctx, args)
        except _UsageError as error:
            _add_suggestion(error, words, names)
            raise
        if extra:
            flag = "--prompt" if "--prompt" in names and not os.access(extra[0], os.F_OK) else "--model"
            hint = f". Did you mean {flag} {shlex.quote(extra[0])}?" if flag in names else ""
            ctx.fail(f"Unexpected argument: {extra[0]}{hint}")
        return extra

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MLAError as error:
            options = (each for each in self.params if each.param_type_name == "option")
            flags = {str(option.name): option.opts[0] for option in options}
            raise _in_flags(error, flags) from error


def _names(command: Any, ctx: Any) -> list[str]:
    """The flags of a command, and the placeholders of its arguments."""
    found = []
    for each in command.get_params(ctx):
        found += [each.metavar] if each.param_type_name == "argument" else [*each.opts, *each.secondary_opts]
    return found


def _add_suggestion(error: Any, words: list[str], names: list[str]) -> None:
    """Name the unknown flag as typed (in `words`), and suggest similar ones of the command's `names`."""
    if not hasattr(error, "possibilities"):  # only the error of an unknown flag has it
        return
    given = next((word for word in words if word.startswith(error.option_name)), error.option_name)
    name = given.partition("=")[0]
    error.message = f"No such option: {name}{did_you_mean(name, names)}"
    error.possibilities = None  # typer's own suggestions


def _add_value(error: Any) -> None:
    """Say what came in place of a flag's value, in the words of the other errors, if typer's error has it."""
    details: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    if len(details) == 1 and {"msg", "input"} <= details[0].keys():
        what = of_pydantic(details[0]["msg"]).partition(", unable to")[0].rstrip(".")
        what = re.sub("^expected (?=greater|less)", "expected a number ", what)
        error.message = f"{what}, got {details[0]['input']!r}" if what.startswith("expected") else what


def _in_flags(error: MLAError, flags: dict[str, str]) -> MLAError:
    """The error with flags in place of arguments; unchanged if it names anything else, such as a line of a file."""
    names = error.name.split(", ")
    if not flags.keys() >= set(names):
        return error

    def in_flags(text: str) -> str:
        """Write `max_rows`, `max_rows=8` and `batch_invariant=True` as flags."""

        def flag(match: re.Match[str]) -> str:
            return flags[match[1]] + " " * (match[2] == "=") if match[1] in flags else match[0]

        return re.sub(r"\b([a-z]+(?:_[a-z]+)+)(=True\b|=|)", flag, text)

    return MLAError(
        ", ".join(flags[name] for name in names), in_flags(error.expected), error.got, in_flags(error.hint)
    )


def _is_out_of_memory(error: BaseException) -> bool:
    # Compares the name of `torch.OutOfMemoryError`, as torch may not be imported. On a CPU, torch raises a plain
    # RuntimeError if it cannot allocate memory or map a file.
    return type(error).__name__ in ("MemoryError", "OutOfMemoryError") or "allocate memory" in str(error)


def _fail(message: str) -> NoReturn:
    line = " ".join(message.split())
    with suppress(OSError):
        typer.echo(f"mla-compile: {line}", err=True)
    sys.exit(2)


app = typer.Typer(
    name="mla-compile",
    cls=OneLineErrors,
    help="MLA attention and MTP speculative decoding, native to torch.compile.",
    rich_markup_mode=None,
    add_completion=False,
    suggest_commands=False,  # `resolve_command` does
    pretty_exceptions_enable=False,  # a traceback is a bug of the package; a bug report needs the plain one
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mla-compile {mla_compile.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options that precede a command's name."""


for command in (generate, serve, plan, inspect, env, demo):
    app.command(cls=InFlags)(command)


def run() -> None:
    """Run the command as its own process."""
    streams.prepare()
    app()
