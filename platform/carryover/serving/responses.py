"""Answers on the wire: a whole one, and a stream of server-sent events.

They write ASGI messages themselves. Starlette's streaming response starts a task group for each
request to notice a client that went away; Ray Serve already cancels the request's task then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from starlette.responses import Response

from carryover.serving.answers import (
    cancel,
    is_error,
    is_usage,
    read_problem,
    read_refusal,
    read_usage,
)
from carryover.serving.call import OUTCOMES, Call
from carryover.serving.openai_errors import ApiError

_JSON = (b"content-type", b"application/json")
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # A buffering proxy in front would turn a stream into one answer at its end.
    (b"x-accel-buffering", b"no"),
]
_DONE = "data: [DONE]\n\n"

logger = logging.getLogger("ray.serve")


class ErrorAnswer(Response):
    """An error in OpenAI's form."""

    def __init__(self, error: ApiError, headers: list[tuple[bytes, bytes]] = ()) -> None:
        super().__init__(
            error.body(), error.status, headers=error.headers(), media_type="application/json"
        )
        self.raw_headers.extend(headers)


class JsonAnswer(Response):
    """A whole answer of an arm."""

    def __init__(self, call: Call, body: bytes) -> None:
        self._call, self.body = call, body
        self.status_code, self.background = 200, None
        self.raw_headers = [
            _JSON, (b"content-length", str(len(body)).encode()), *call.headers()
        ]  # fmt: skip

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send it."""
        try:
            await send(
                {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            )
            await send({"type": "http.response.body", "body": self.body})
        except BaseException:
            self._call.finish("disconnected")
            raise
        self._call.finish("ok")


class StreamAnswer(Response):
    """Passes on the chunks of an arm, from the first, which has arrived already.

    Args:
        call: the request.
        first: first item of the stream: a chunk or a list of chunks.
        stream: the rest.
        stall_s: longest time between two items.
        rename: model name in chunks, as vLLM writes it and as the client is to read it.
    """

    def __init__(
        self,
        call: Call,
        first: Any,
        stream: Any,
        *,
        stall_s: float,
        rename: tuple[str, str] | None,
    ) -> None:
        self._call, self._first, self._stream = call, first, stream
        self._stall_s, self._rename = stall_s, rename
        self._outcome, self._exhausted = "disconnected", False
        self.status_code, self.background = 200, None
        self.raw_headers = [*_EVENTS, *call.headers()]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the chunks as they come; ends with an error event if the arm fails."""
        try:
            await send(
                {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            )
            try:
                await self._pass_on(send)
            except Exception as error:
                self._outcome = await self._break_off(send, error)
            await send({"type": "http.response.body", "body": b""})
        finally:
            if not self._exhausted:
                cancel(self._stream)
            self._call.finish(self._outcome)

    async def _pass_on(self, send: Any) -> None:
        """Send all chunks.

        The outcome is settled with the last of them: many clients hang up at that one, and theirs
        are whole answers.
        """
        call, stream = self._call, self._stream
        loop, clock = asyncio.get_running_loop(), time.perf_counter
        items, outcome, done = self._first, "ok", False
        limit_s = self._stall_s
        refresh = 0.0
        async with asyncio.timeout(limit_s) as limit:
            while True:
                now = clock()
                chunks = items if type(items) is list else (items,)
                out = []
                for chunk in chunks:
                    if is_usage(chunk):
                        call.usage = read_usage(chunk)
                        if call.hides_usage:
                            continue
                    elif is_error(chunk):
                        outcome, chunk = "error", _reworded(chunk)
                    elif chunk == _DONE:
                        done = True
                    else:
                        call.last = now
                    out.append(chunk)
                if done:
                    self._outcome = outcome
                if out:
                    text = out[0] if len(out) == 1 else "".join(out)
                    if self._rename is not None:
                        text = text.replace(*self._rename)
                    await send(
                        {"type": "http.response.body", "body": text.encode(), "more_body": True}
                    )
                if now > refresh:
                    refresh = now + limit_s / 100
                    limit.reschedule(loop.time() + limit_s)
                try:
                    items = await stream.__anext__()
                except StopAsyncIteration:
                    self._outcome, self._exhausted = outcome, True
                    break
        if not done:
            await send(
                {"type": "http.response.body", "body": _DONE.encode(), "more_body": True}
            )

    async def _break_off(self, send: Any, error: Exception) -> str:
        """Tell the client that the arm failed midway; returns the outcome."""
        problem = read_problem(error)
        if problem is None:
            logger.error("a stream broke off: %s", type(error).__name__)
        status, outcome = (502, "error") if problem is None else (502, OUTCOMES[problem.why])
        what = "stopped writing" if outcome == "timeout" else "failed while it answered"
        said = ApiError(status, f"the arm {what}; what was sent so far is incomplete")
        await send({"type": "http.response.body", "body": said.event(), "more_body": True})
        return outcome


def _reworded(chunk: str) -> str:
    """vLLM's report of a failure, in OpenAI's form and without its internals."""
    return f"data: {read_refusal(chunk).body().decode()}\n\n"
