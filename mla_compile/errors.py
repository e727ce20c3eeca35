"""Mistakes that a caller can fix, and work on one request that fails."""

import asyncio


class MLAError(ValueError):
    """Bad input: the message names the argument, what was expected, what came and how to fix it."""

    def __init__(self, name: str, expected: str, got: object, hint: str = "") -> None:
        self.name, self.expected, self.got, self.hint = name, expected, got, hint
        if isinstance(got, OSError) and got.strerror:
            got = got.strerror  # the name says which file; the error may name a temporary one
        super().__init__(f"{name}: expected {expected}, got {got}" + (f"; {hint}" if hint else ""))

    def __reduce__(self) -> tuple[type["MLAError"], tuple[str, str, object, str]]:
        return type(self), (self.name, self.expected, self.got, self.hint)


def first_line(error: BaseException) -> str:
    """What another library's error says, short enough for a line of ours."""
    return " ".join(str(error).split())[:300] or type(error).__name__


class RequestError(Exception):
    """Work of the host on one request failed. The message is a sentence; the other requests go on."""


def is_request_error(error: BaseException) -> bool:
    """Whether an error of work on one request ends that request alone.

    A library's own BaseException does: pyo3's PanicException, say.
    """
    return not isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit | asyncio.CancelledError)


def request_error(what: str, error: BaseException) -> RequestError:
    """The error of one request, for which `what` failed with `error`; raises `error` where that must end more."""
    if not is_request_error(error):
        raise error
    if isinstance(error, MLAError | RequestError):
        return RequestError(str(error))
    kind, said = type(error).__name__, first_line(error)
    return RequestError(f"{what}: {kind}" + (f": {said}" if said != kind else ""))
