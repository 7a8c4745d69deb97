"""From an HTTP request to a validated body, or to the error that says what is wrong with it."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from pydantic import ValidationError
from pydantic_core import from_json

from carryover.serving.openai_errors import ApiError, from_validation
from carryover.serving.preload import without_gc

with without_gc():
    from ray.llm._internal.serve.core.protocol import RawRequestInfo
    from starlette.requests import ClientDisconnect, Request

# Passed on to the engine; nothing else of a client's headers is its business.
_PASSED_ON = ("traceparent", "tracestate")
_LONGEST_ID = 128


async def read_body(request: Request, *, most: int) -> bytes:
    """Read a request's body.

    Raises:
        ApiError: 413 if it is longer than `most` bytes.
    """
    declared = request.headers.get("content-length")
    if declared is not None and declared.isdecimal() and int(declared) > most:
        raise _too_large(most)
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise _too_large(most)
            parts.append(part)
    except ClientDisconnect:
        raise ApiError(400, "the client went away before its request was complete") from None
    return parts[0] if len(parts) == 1 else b"".join(parts)


def parse_object(data: bytes) -> dict[str, Any]:
    """Read a JSON object, whatever the content type says.

    Raises:
        ApiError: 400.
    """
    try:
        values = from_json(data)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(values, dict):
        raise ApiError(
            400, f"the body must be a JSON object, got {_kind(values)}", code="invalid_json"
        )
    return values


def validate(model: type, values: dict[str, Any]) -> Any:
    """Make vLLM's request object; unknown fields are kept, as vLLM does.

    Raises:
        ApiError: 400 with the field and what is wrong with it.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise from_validation(error) from None
    except (ValueError, TypeError, AttributeError, KeyError, IndexError, RecursionError):
        # Some of vLLM's validators take the shape of what they check for granted.
        raise ApiError(400, "the body's fields do not have the types of OpenAI's API") from None


def request_id(request: Request) -> str:
    """The client's id of a request, which Ray Serve makes if there is none."""
    found = request.headers.get("x-request-id", "")
    return found if 0 < len(found) <= _LONGEST_ID and found.isprintable() else uuid4().hex


def info_of(request: Request, name: str) -> RawRequestInfo:
    """What the engine gets to know of the HTTP request."""
    headers = {"x-request-id": name}
    for header in _PASSED_ON:
        value = request.headers.get(header)
        if value is not None:
            headers[header] = value
    return RawRequestInfo(headers=headers)


def _too_large(most: int) -> ApiError:
    return ApiError(
        413, f"the request's body is longer than the {most} bytes that are taken here; shorten it"
    )


def _kind(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
