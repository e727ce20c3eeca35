"""Errors that a caller can fix, and failures of a single request."""

import asyncio
import re
from math import inf


class MLAError(ValueError):
    """Bad input: the message has the argument's name, the expected and the actual value, and a hint on the fix.

    For an event `expected` is empty, and `got` is what happened: "rank 0: exited".
    """

    def __init__(self, name: str, expected: str, got: object, hint: str = "") -> None:
        self.name, self.expected, self.got, self.hint = name, expected, got, hint
        if isinstance(got, OSError) and got.strerror:
            got = got.strerror  # `name` is the file; the error may name a temporary one
        what = f"expected {expected}, got {got}" if expected else got
        super().__init__(f"{name}: {what}" + (f"; {hint}" if hint else ""))

    def __reduce__(self) -> tuple[type["MLAError"], tuple[str, str, object, str]]:
        return type(self), (self.name, self.expected, self.got, self.hint)


def check_integer(name: str, value: object, least: int, most: float = inf) -> None:
    """Raises `MLAError` for anything but an integer from `least` to `most`."""
    if type(value) is not int or not least <= value <= most:
        is_bounded = most < 2**31 - 1 or (type(value) is int and value > most)
        expected = f"an integer in [{least}, {most}]" if is_bounded else f"an integer >= {least}"
        raise MLAError(name, expected, repr(value))


def first_line(error: BaseException) -> str:
    """Another library's error message on one line, cut to 300 characters; the error's type if it has no message."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def of_pydantic(message: str) -> str:
    """A message of pydantic about a value in the words of `MLAError`: "expected ...", if it says what was expected."""
    message = message.removeprefix("Value error, ").replace("Input should be", "expected")
    message = re.sub(r"^\w+ should have", "expected", message).partition(" after validation")[0]
    return re.sub(r"a valid dictionary or instance of \w+", "an object", message)


class RequestError(Exception):
    """Host work for one request failed. The message is a sentence; the other requests continue."""


def is_request_error(error: BaseException) -> bool:
    """Whether an error during one request's work ends only that request.

    This includes a library's own BaseException, for example pyo3's PanicException.
    """
    return not isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit | asyncio.CancelledError)


def request_error(what: str, error: BaseException) -> RequestError:
    """The `RequestError` for the operation `what`, which failed with `error`; a cancellation or exit is raised."""
    if not is_request_error(error):
        raise error
    if isinstance(error, MLAError | RequestError):
        return RequestError(str(error))
    kind, message = type(error).__name__, first_line(error)
    return RequestError(f"{what}: {kind}" + (f": {message}" if message != kind else ""))
