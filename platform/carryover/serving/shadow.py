"""Copies of requests for another arm, whose answers nobody gets.

A copy begins when the primary's answer has been sent, runs in a task of its own that shares
nothing with the request, and is left out when too many are under way: it can neither slow nor fail
the primary.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable
from typing import Any

from carryover.serving.answers import (
    cancel,
    is_error,
    is_usage,
    read_problem,
    read_refusal,
    read_usage,
    usage_of,
)
from carryover.serving.call import OUTCOMES, Call

logger = logging.getLogger("ray.serve")


class Shadows:
    """Sends copies.

    Args:
        method: gives the arm's method for "chat" or "completions".
        most: copies under way at once.
        timeout_s: for one copy.

    Attributes:
        left_out: copies not made because too many were under way.
    """

    def __init__(
        self, method: Callable[[str, str], Any], *, most: int, timeout_s: float
    ) -> None:
        self._method, self._most, self._timeout_s = method, most, timeout_s
        self._tasks: set[asyncio.Task] = set()
        self.left_out = 0

    def send(self, call: Call) -> None:
        """Start a copy of a request; `call` is the copy's, with its own body."""
        if len(self._tasks) >= self._most:
            self.left_out += 1
            return
        # A fresh context: otherwise Serve would take the copy for a part of the request.
        task = asyncio.get_running_loop().create_task(
            self._run(call), context=contextvars.Context()
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, call: Call) -> None:
        outcome = "error"
        stream = None
        try:
            call.started = time.perf_counter()
            stream = self._method(call.arm, call.kind).remote(call.body, call.info)
            async with asyncio.timeout(self._timeout_s):
                outcome = await self._read(call, stream)
        except Exception as error:
            problem = read_problem(error)
            outcome = "error" if problem is None else OUTCOMES[problem.why]
            if problem is None:
                logger.warning("a shadow request failed: %s", type(error).__name__)
        finally:
            if stream is not None and outcome != "ok":
                cancel(stream)
            call.finish(outcome)

    async def _read(self, call: Call, stream: Any) -> str:
        async for item in stream:
            now = time.perf_counter()
            if not call.last and read_refusal(item) is not None:
                return "error"
            chunks = item if isinstance(item, list) else (item,)
            for chunk in chunks:
                if not isinstance(chunk, str):
                    call.usage = usage_of(chunk)
                elif is_usage(chunk):
                    call.usage = read_usage(chunk)
                elif is_error(chunk):
                    return "error"
                elif not chunk.startswith("data: [DONE]"):
                    call.first = call.first or now
                    call.last = now
        return "ok"
