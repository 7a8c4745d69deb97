"""Send one chat request, streaming, and time what comes back.

Why not the client of vLLM's `bench serve`: it drops what this bench is about, the acceptance
figures that vLLM puts into each response, and also the finish reason and the body of an error; it
measures one model per run, so arms cannot alternate; and importing it costs 8 s. Its definitions
are kept, so that figures can be compared: a response's first token is its first chunk with a
choice, its end is the last such chunk (not the usage chunk that follows), and tokens are counted by
the server's `usage`, never by chunks, of which one may carry several tokens here.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

# A line of the stream holds one chunk, which may be longer than aiohttp's 64 KiB.
_READ_BUFFER_BYTES = 4 * 2**20
_ERROR_CHARACTERS = 500


@dataclass(frozen=True)
class Sampling:
    """How responses are generated; the same for every request of a run."""

    max_tokens: int
    temperature: float
    ignore_eos: bool = False


@dataclass
class Response:
    """What one request gave; times in seconds on the client's clock.

    Attributes:
        started_s: when it was sent, by `time.perf_counter`.
        ttft_s: from sending to the first token; None if none came.
        latency_s: from sending to the last token.
        prompt_tokens: the server's count.
        output_tokens: the server's count.
        finish: `stop` or `length`.
        text: the response.
        num_drafts: rounds of drafting and verification; 0 without speculation.
        num_draft_tokens: proposals.
        num_accepted_tokens: proposals accepted.
        accepted_histogram: entry j counts the rounds that accepted j proposals.
        status: HTTP status; None if the connection failed.
        error: why it failed; None if it did not.
    """

    started_s: float
    ttft_s: float | None = None
    latency_s: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish: str | None = None
    text: str = ""
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_histogram: list[int] = field(default_factory=list)
    status: int | None = None
    error: str | None = None

    def take_chunk(self, chunk: dict[str, Any], now_s: float) -> None:
        """Account for one chunk of the stream, received at `now_s`."""
        if "error" in chunk:
            self.error = _message(chunk)
            return
        if chunk.get("choices"):
            choice = chunk["choices"][0]
            if self.ttft_s is None:
                self.ttft_s = now_s - self.started_s
            self.latency_s = now_s - self.started_s
            self.text += (choice.get("delta") or {}).get("content") or ""
            self.finish = choice.get("finish_reason") or self.finish
        usage = chunk.get("usage")
        if usage:
            self.prompt_tokens = usage.get("prompt_tokens") or 0
            self.output_tokens = usage.get("completion_tokens") or 0
        speculative = (chunk.get("metrics") or {}).get("speculative_decoding")
        if speculative:
            self.num_drafts = speculative["num_spec_steps"]
            self.num_draft_tokens = speculative["num_draft_tokens"]
            self.num_accepted_tokens = speculative["num_accepted_draft_tokens"]
            self.accepted_histogram = list(speculative["acceptance_histogram"])

    def close(self) -> None:
        """Mark a stream that ended without what a whole response has."""
        if self.error is not None:
            return
        if self.ttft_s is None:
            self.error = "the response held no token"
        elif self.finish is None:
            self.error = "the stream ended before the response was finished"
        elif self.output_tokens == 0:
            self.error = "the server gave no usage, so tokens cannot be counted"


def open_session(*, timeout_s: float) -> aiohttp.ClientSession:
    """A session for any number of concurrent requests; `timeout_s` bounds each request."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        read_bufsize=_READ_BUFFER_BYTES,
    )


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    *,
    model: str,
    messages: list[dict[str, str]],
    sampling: Sampling,
) -> Response:
    """Send one request and read its stream to the end; failures are returned, not raised.

    Args:
        session: of `open_session`.
        url: base URL, without `/v1`.
        model: model id: the arm.
        messages: of the chat.
        sampling: how the response is generated.
    """
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if sampling.ignore_eos:
        body["ignore_eos"] = True
    response = Response(started_s=time.perf_counter())
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            response.status = answer.status
            if answer.status != 200:
                response.error = _message_of_text(await answer.text())
                return response
            async for line in answer.content:
                if not line.startswith(b"data:"):
                    continue
                data = line[len(b"data:") :].strip()
                if data == b"[DONE]":
                    break
                response.take_chunk(json.loads(data), time.perf_counter())
    except TimeoutError:
        response.error = "timed out"
    except (aiohttp.ClientError, OSError, ValueError) as error:
        response.error = f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]
    response.close()
    return response


async def closed_loop(tasks: Iterable[Callable[[], Awaitable[None]]], *, concurrency: int) -> float:
    """Keep `concurrency` tasks running until all are done; a new one starts when one ends.

    Returns:
        The time that it took, in seconds.
    """
    waiting = iter(tasks)
    started_s = time.perf_counter()

    async def client() -> None:
        for task in waiting:
            await task()

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(client())
    return time.perf_counter() - started_s


def _message_of_text(text: str) -> str:
    try:
        return _message(json.loads(text))
    except ValueError:
        return text.strip()[:_ERROR_CHARACTERS] or "empty answer"


def _message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:_ERROR_CHARACTERS]
