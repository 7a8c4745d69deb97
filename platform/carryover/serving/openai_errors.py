"""Errors in OpenAI's form: one exception, one body, one stream event.

    {"error": {"message": "...", "type": "...", "param": ..., "code": ...}}

Pure: what a client or vLLM did wrong goes in, what the client reads comes out. Values that the
client sent are never repeated, so that no prompt ends up in a log of errors.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import ValidationError

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {
    401: "invalid_api_key", 404: "model_not_found", 413: "request_too_large",
    429: "rate_limit_exceeded", 502: "arm_failed", 503: "overloaded", 504: "timeout",
}  # fmt: skip
_TOO_LONG = re.compile(r"maximum (context|model) length", re.IGNORECASE)


class ApiError(Exception):
    """A request that is not answered as asked.

    Args:
        status: HTTP status.
        message: what was wrong, what was got, what to do.
        param: the field of the body, if one is to blame.
        code: a word for programs; None takes the status's usual one.
        retry_after_s: when to come back; None says nothing.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code or _CODES.get(status)
        self.retry_after_s = retry_after_s

    def content(self) -> dict[str, Any]:
        """The response's body."""
        kind = _TYPES.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def body(self) -> bytes:
        """The response's body as JSON."""
        return json.dumps(self.content()).encode()

    def event(self) -> bytes:
        """What a stream that has begun ends with; clients of OpenAI's raise it."""
        return b"data: " + self.body() + b"\n\ndata: [DONE]\n\n"

    def headers(self) -> dict[str, str]:
        """Headers that belong to the error."""
        found = {}
        if self.retry_after_s is not None:
            found["retry-after"] = str(max(1, round(self.retry_after_s)))
        if self.status == 401:
            found["www-authenticate"] = "Bearer"
        return found


def from_validation(error: ValidationError) -> ApiError:
    """What pydantic refused, by the field's name and without its value."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    first = problems[0]
    # Names of the alternatives of a union are pydantic's own business.
    place = [str(part) for part in first["loc"] if not _is_internal(part)]
    param = ".".join(place) or None
    message = first["msg"].removeprefix("Value error, ")
    return ApiError(400, message if param is None else f"{param}: {message}", param=param)


def from_engine(error: Any) -> ApiError:
    """vLLM's own refusal (`ErrorInfo`: message, type, param, code)."""
    status = error.code if isinstance(error.code, int) and 400 <= error.code < 600 else 500
    message = str(error.message)
    if status < 500 and _TOO_LONG.search(message):
        return ApiError(413, message, param=error.param, code="context_length_exceeded")
    if status >= 500:
        return ApiError(status, "the engine failed while it answered; try again")
    return ApiError(status, message, param=error.param)


def _is_internal(part: str | int) -> bool:
    return isinstance(part, str) and not re.fullmatch(r"[A-Za-z_]\w*", part)
