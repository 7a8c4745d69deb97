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
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

# A line of the stream holds one chunk, which may be longer than aiohttp's 64 KiB.
_READ_BUFFER_BYTES = 4 * 2**20
ARM_HEADER = "x-carryover-arm"
API_KEY_VARIABLE = "CARRYOVER_API_KEY"
TOP_LOGPROBS = 5
_ERROR_CHARACTERS = 500


@dataclass(frozen=True)
class Sampling:
    """How responses are generated; the same for every request of a condition.

    Attributes:
        max_tokens: longest response.
        temperature: 0 is greedy.
        ignore_eos: generate `max_tokens` always.
        thinking: told to the chat template as `enable_thinking`; None leaves it to the template.
    """

    max_tokens: int
    temperature: float
    ignore_eos: bool = False
    thinking: bool | None = None

    def body(self) -> dict[str, Any]:
        """The fields of an OpenAI request."""
        body: dict[str, Any] = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self.thinking}
        return body


@dataclass(frozen=True)
class Choice:
    """One token of a response and what it was chosen among.

    Attributes:
        token: its text or number.
        logprob: natural logarithm of its probability.
        others: the likeliest tokens at its place, itself included, with theirs.
    """

    token: str
    logprob: float
    others: dict[str, float]


@dataclass
class Response:
    """What one request gave; times in seconds on the client's clock.

    Attributes:
        started_s: when it was sent, by `time.perf_counter`.
        ttft_s: from sending to the first token; None if none came.
        latency_s: from sending to the last token.
        prompt_tokens: the server's count.
        cached_tokens: of the prompt, found in the prefix cache; None if the server does not tell.
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
    cached_tokens: int | None = None
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
            delta = choice.get("delta") or {}
            # thinking is text too, wherever the server's parser puts it
            thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
            self.text += thought + (delta.get("content") or "")
            self.finish = choice.get("finish_reason") or self.finish
        usage = chunk.get("usage")
        if usage:
            self.prompt_tokens = usage.get("prompt_tokens") or 0
            self.output_tokens = usage.get("completion_tokens") or 0
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        speculative = (chunk.get("metrics") or {}).get("speculative_decoding")
        if speculative:
            self.take_speculation(speculative)

    def take_speculation(self, figures: dict[str, Any]) -> None:
        """Account for what vLLM tells about a request's rounds."""
        self.num_drafts = figures["num_spec_steps"]
        self.num_draft_tokens = figures["num_draft_tokens"]
        self.num_accepted_tokens = figures["num_accepted_draft_tokens"]
        self.accepted_histogram = list(figures["acceptance_histogram"])

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
    """A session for any number of concurrent requests; `timeout_s` bounds each request.

    A key in the variable CARRYOVER_API_KEY is sent with each of them.
    """
    return aiohttp.ClientSession(
        headers=authorization(),
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
    cache_salt: str | None = None,
) -> Response:
    """Send one request and read its stream to the end; failures are returned, not raised.

    Args:
        session: of `open_session`.
        url: base URL, without `/v1`.
        model: model id: the arm.
        messages: of the chat.
        sampling: how the response is generated.
        cache_salt: vLLM finds prefixes of other requests in its cache only under the same salt.
    """
    body = {
        "model": model,
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        **sampling.body(),
    }
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    response = Response(started_s=time.perf_counter())
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            response.status = answer.status
            if answer.status != 200:
                response.error = _message_of_text(await answer.text())
                return response
            answered = answer.headers.get(ARM_HEADER, model)
            if answered != model:
                response.error = f"arm {answered!r} answered in place of {model!r}"
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


async def open_loop(
    tasks: Sequence[Callable[[], Awaitable[None]]], *, arrivals_s: Sequence[float]
) -> float:
    """Start each task at its time, whatever has become of the others.

    Args:
        tasks: in the order of their arrival.
        arrivals_s: when each starts, in seconds from now, rising.

    Returns:
        The time until the last one ended, in seconds.
    """
    started_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for task, arrival_s in zip(tasks, arrivals_s, strict=True):
            await asyncio.sleep(max(0.0, started_s + arrival_s - time.perf_counter()))
            group.create_task(task())
    return time.perf_counter() - started_s


async def ask_choices(
    session: aiohttp.ClientSession,
    url: str,
    *,
    model: str,
    messages: list[dict[str, str]],
    sampling: Sampling,
) -> list[Choice] | None:
    """Ask for a response with the probabilities of its tokens; None where that is not offered."""
    body = {
        "model": model, "messages": messages, "logprobs": True, "top_logprobs": TOP_LOGPROBS,
        **sampling.body(),
    }  # fmt: skip
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            if answer.status != 200:
                return None
            content = (await answer.json())["choices"][0]["logprobs"]["content"]
        return [
            Choice(
                token=each["token"],
                logprob=each["logprob"],
                others={other["token"]: other["logprob"] for other in each["top_logprobs"]},
            )
            for each in content
        ]
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, TypeError):
        return None


def authorization() -> dict[str, str]:
    """The header with the user's key, if there is one."""
    key = os.environ.get(API_KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


def _message_of_text(text: str) -> str:
    try:
        return _message(json.loads(text))
    except ValueError:
        return text.strip()[:_ERROR_CHARACTERS] or "empty answer"


def _message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:_ERROR_CHARACTERS]
