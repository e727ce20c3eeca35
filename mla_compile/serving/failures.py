"""Errors of requests: each has an HTTP status and a body in the form of OpenAI's API."""

from typing import Any

from starlette.responses import JSONResponse

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class Failure(Exception):
    """An error of a request. Its message may have characters that UTF-8 cannot encode.

    status: of HTTP. param: the field. code: OpenAI's code of the error, if it has one.
    retry_after: seconds after which the client may retry.
    """

    message = "internal server error"
    status = 500
    retry_after: int | None = None

    def __init__(
        self,
        message: str = "",
        param: str | None = None,
        code: str | None = None,
        status: int = 0,
        retry_after: int | None = None,
    ) -> None:
        self.message, self.param, self.code = message or self.message, param, code
        self.status, self.retry_after = status or self.status, retry_after or self.retry_after
        super().__init__(self.message)

    def body(self) -> dict[str, Any]:
        """The JSON object of the error."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        message = self.message.encode(errors="backslashreplace").decode()
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The HTTP response."""
        headers = None if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return JSONResponse(self.body(), self.status, headers)


class BadRequest(Failure):
    """A bad request; long messages are cut."""

    def __init__(
        self, message: str, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message[:500], param and param[:100], code, status)


class BadField(BadRequest):
    """A bad field of the body; the message begins with its name."""

    def __init__(self, param: str, message: str, code: str | None = None) -> None:
        super().__init__(f"{param}: {message}", param, code)


class CompletionFailed(Failure):
    """The engine ended a completion for a reason other than its text; the message has the reason."""


class Busy(Failure):
    """The queue of waiting requests is full."""

    message, status, retry_after = "too many requests are waiting; retry later", 429, 1


class NotReady(Failure):
    """The engine, or the grammar check, is starting or restarting."""

    message, status, retry_after = "the server is not ready; retry later", 503, 5


class BodiesFull(Failure):
    """The bodies of all requests exceed their bound, and this one is the largest."""

    message = "the bodies of all requests together are too large; retry later"
    status, retry_after = 503, 1
