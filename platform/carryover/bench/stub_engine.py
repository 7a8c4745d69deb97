"""A server that answers like a `ray.serve.llm` deployment of vLLM, with no model behind it.

It yields what vLLM's would: lists of server-sent events for a stream, one response object for a
whole answer, usage and metrics where they were asked for. `bench.ingress` puts it behind two
fronts, so that what is measured is the fronts.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from carryover.serving.preload import without_gc

with without_gc():
    from ray.serve.llm.openai_api_models import (
        ChatCompletionRequest,
        ChatCompletionResponse,
        CompletionRequest,
        CompletionResponse,
    )

_ACCEPTED, _PROPOSED = 2, 3


class StubServer:
    """Answers with as many words as a request asks for.

    Args:
        arm: its name, which is the model in answers.
        token_s: time between two tokens, and before the first.
    """

    def __init__(self, arm: str, *, token_s: float = 0.0) -> None:
        self.arm, self.token_s = arm, token_s
        self.running = 0

    async def chat(self, request: ChatCompletionRequest, info: Any = None) -> AsyncIterator[Any]:
        """As `LLMServer.chat`: returns the iterator of answers."""
        tokens = request.max_completion_tokens or request.max_tokens or 16
        return self._answer(request, tokens, chat=True)

    async def completions(self, request: CompletionRequest, info: Any = None) -> AsyncIterator[Any]:
        """As `LLMServer.completions`: returns the iterator of answers."""
        return self._answer(request, request.max_tokens or 16, chat=False)

    async def check_health(self) -> None:
        """Called by Ray Serve."""

    async def _answer(self, request: Any, tokens: int, *, chat: bool) -> AsyncIterator[Any]:
        self.running += 1
        try:
            if request.stream:
                async for chunk in self._stream(request, tokens, chat=chat):
                    yield [chunk]
            else:
                if self.token_s:
                    await asyncio.sleep(self.token_s * tokens)
                yield self._whole(request, tokens, chat=chat)
        finally:
            self.running -= 1

    async def _stream(self, request: Any, tokens: int, *, chat: bool) -> AsyncIterator[str]:
        head = {
            "id": f"stub-{request.request_id}",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": int(time.time()),
            "model": self.arm,
        }
        for number in range(tokens):
            if self.token_s:
                await asyncio.sleep(self.token_s)
            choice: dict[str, Any] = {"index": 0, "finish_reason": None}
            if chat:
                choice["delta"] = {"content": " word"}
            else:
                choice["text"] = " word"
            if number == tokens - 1:
                choice["finish_reason"] = "length"
            yield _event({**head, "choices": [choice]})
        options = request.stream_options
        if options is not None and options.include_usage:
            usage, metrics = _usage(tokens), _metrics(tokens)
            yield _event({**head, "choices": [], "usage": usage, "metrics": metrics})
        yield "data: [DONE]\n\n"

    def _whole(self, request: Any, tokens: int, *, chat: bool) -> Any:
        text = " word" * tokens
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        if chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        make = ChatCompletionResponse if chat else CompletionResponse
        return make(
            id=f"stub-{request.request_id}", created=int(time.time()), model=self.arm,
            choices=[choice], usage=_usage(tokens), metrics=_metrics(tokens),
        )  # fmt: skip


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 8, "completion_tokens": tokens, "total_tokens": 8 + tokens}


def _metrics(tokens: int) -> dict[str, Any]:
    rounds = max(1, tokens // (_ACCEPTED + 1))
    histogram = [0] * (_PROPOSED + 1)
    histogram[_ACCEPTED] = rounds
    return {
        "speculative_decoding": {
            "mean_acceptance_length": _ACCEPTED + 1.0,
            "draft_acceptance_rate": _ACCEPTED / _PROPOSED,
            "acceptance_histogram": histogram,
            "num_spec_steps": rounds,
            "num_accepted_draft_tokens": _ACCEPTED * rounds,
            "num_draft_tokens": _PROPOSED * rounds,
            "num_spec_tokens": _PROPOSED,
        }
    }


def _event(values: dict[str, Any]) -> str:
    return f"data: {json.dumps(values, separators=(',', ':'))}\n\n"
