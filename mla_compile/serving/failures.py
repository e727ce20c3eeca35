"""Why a request gets no completion: each reason is an error as OpenAI's API has it, with a status of HTTP."""

from typing import Any

from starlette.responses import JSONResponse

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class Failure(Exception):
    """An error of a request. Its message may come from anywhere, so it may have what UTF-8 has not.

    status: of HTTP. param: the field. code: OpenAI's word for the mistake, where it has one.
    retry_after: seconds after which the client may ask again.
    """

    message = "the server has made a mistake"
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
        """The object that tells the client."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        message = self.message.encode(errors="backslashreplace").decode()
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The answer to the request."""
        headers = None if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return JSONResponse(self.body(), self.status, headers)


class BadRequest(Failure):
    """What is wrong with a request; the message is cut to what a client can read."""

    def __init__(
        self, message: str, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message[:500], param and param[:100], code, status)


class CompletionFailed(Failure):
    """The engine ended a completion for another reason than its text; the message says which."""


class Busy(Failure):
    """As many requests as may wait do."""

    message, status, retry_after = "as many requests wait as may; ask again later", 429, 1


class NotReady(Failure):
    """What answers a request loads, or has failed and loads again."""

    message, status, retry_after = "the server is not ready; ask again later", 503, 5


class BodiesFull(Failure):
    """The bodies of all requests exceed their bound, and this one is the largest."""

    message = "the bodies of all requests together are too large; ask again later"
    status, retry_after = 503, 1
