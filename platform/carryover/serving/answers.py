"""What an arm answers, read as cheaply as possible: usage, acceptance, and what went wrong."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from carryover.serving.openai_errors import ApiError, from_engine
from carryover.serving.preload import without_gc

with without_gc():
    from ray.exceptions import RayActorError, RayError, RayTaskError
    from ray.serve.exceptions import (
        BackPressureError,
        DeploymentUnavailableError,
        ReplicaUnavailableError,
    )

logger = logging.getLogger("ray.serve")

# In JSON a quote inside a string is escaped, so no generated text can look like this.
_NO_CHOICES = '"choices":[]'
_ERROR_CHUNK = 'data: {"error"'


class NoAnswer(Exception):
    """An arm's answer that ended before it began."""


class NoReplica(Exception):
    """No replica of an arm took a request."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Why an arm did not answer.

    Attributes:
        why: "down", "overloaded", "slow" or "failed".
        definite: whether the arm itself is known to be at fault, and not this request.
        text: for the log; holds nothing of the request.
    """

    why: str
    definite: bool
    text: str

    def error(self, retry_after_s: float = 2.0) -> ApiError:
        """What the client is told if nothing else can answer."""
        if self.why == "overloaded":
            return ApiError(
                503, "too many requests at once; come back shortly", retry_after_s=retry_after_s
            )
        if self.why == "down":
            return ApiError(
                503, "no arm can answer at the moment; come back shortly",
                code="unavailable", retry_after_s=retry_after_s,
            )  # fmt: skip
        if self.why == "slow":
            return ApiError(504, "no answer in time; try again", retry_after_s=retry_after_s)
        return ApiError(502, "the arm failed before it answered; try again")


@dataclass(slots=True)
class Usage:
    """What vLLM tells about a finished request."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    rounds: int = 0
    accepted: int = 0
    proposed: int = 0
    accepted_per_position: tuple[int, ...] = ()
    engine_ttft_s: float | None = None
    engine_tpot_s: float | None = None


def read_problem(error: BaseException) -> Problem | None:
    """What an exception of a call to an arm says of the arm; None if it says nothing."""
    if isinstance(error, BackPressureError):
        return Problem("overloaded", False, "its queue is full")
    if isinstance(
        error, RayActorError | DeploymentUnavailableError | ReplicaUnavailableError
    ):
        return Problem("down", True, f"its replica is gone ({type(error).__name__})")
    if isinstance(error, NoReplica):
        return Problem("down", True, "it has no replica that takes requests")
    if isinstance(error, TimeoutError):
        return Problem("slow", False, "no answer in time")
    if isinstance(error, RayTaskError):
        cause = type(error.cause).__name__ if error.cause is not None else type(error).__name__
        # vLLM's name for an engine that will never answer again.
        dead = "EngineDead" in f"{cause} {error}"
        return Problem("down" if dead else "failed", dead, f"its engine raised {cause}")
    if isinstance(error, NoAnswer):
        return Problem("failed", False, str(error))
    if isinstance(error, RayError):
        return Problem("failed", False, f"Ray raised {type(error).__name__}")
    return None


def read_refusal(item: Any) -> ApiError | None:
    """The error that an arm's first item is; None if it is an answer."""
    first = item[0] if isinstance(item, list) else item
    if isinstance(first, str):
        if not first.startswith(_ERROR_CHUNK):
            return None
        return from_engine(_Info(from_json(first[6:])["error"]))
    # Ray has two classes of this form; an answer has no such field.
    error = getattr(first, "error", None)
    return None if error is None else from_engine(error)


class _Info:
    """An error chunk with the attributes of vLLM's `ErrorInfo`."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.message = values.get("message", "")
        self.param = values.get("param")
        self.code = values.get("code")


def is_usage(chunk: str) -> bool:
    """Whether a stream's chunk is the last one, with usage and metrics and no text."""
    return _NO_CHOICES in chunk


def is_error(chunk: str) -> bool:
    """Whether a stream's chunk is vLLM's report of a failure."""
    return chunk.startswith(_ERROR_CHUNK)


def read_usage(chunk: str) -> Usage:
    """Read the chunk that `is_usage` found."""
    values = from_json(chunk[6:])
    usage, metrics = values.get("usage") or {}, values.get("metrics") or {}
    return _usage(
        usage.get("prompt_tokens", 0),
        usage.get("completion_tokens", 0),
        metrics,
        metrics.get("speculative_decoding"),
    )


def usage_of(response: Any) -> Usage:
    """Read a whole answer (vLLM's response object)."""
    metrics = getattr(response, "metrics", None)
    usage = response.usage
    timing = {} if metrics is None else metrics.__dict__
    drafts = timing.get("speculative_decoding")
    return _usage(
        usage.prompt_tokens,
        usage.completion_tokens or 0,
        timing,
        None if drafts is None else drafts.__dict__,
    )


def _usage(
    prompt: int, output: int, timing: Mapping[str, Any], drafts: Mapping[str, Any] | None
) -> Usage:
    found = Usage(prompt, output)
    first, queued = timing.get("time_to_first_token_ms"), timing.get("queue_time_ms")
    if first is not None:
        found.engine_ttft_s = (first + (queued or 0)) / 1000
    if timing.get("mean_itl_ms") is not None:
        found.engine_tpot_s = timing["mean_itl_ms"] / 1000
    if drafts is not None:
        found.rounds = drafts["num_spec_steps"]
        found.accepted = drafts["num_accepted_draft_tokens"]
        found.proposed = drafts["num_draft_tokens"]
        # Rounds that accepted exactly j proposals, to rounds that accepted at least k + 1.
        exactly = drafts["acceptance_histogram"]
        at_least, left = [], sum(exactly)
        for count in exactly[:-1]:
            left -= count
            at_least.append(left)
        found.accepted_per_position = tuple(at_least)
    return found


def cancel(stream: Any) -> None:
    """Have an arm stop working on an answer, if it still does."""
    try:
        stream.cancel()
    except Exception as error:
        # Serve raises here what ended the answer.
        logger.debug("nothing to cancel: %s", type(error).__name__)
