"""Getting the first byte of an answer: from the assigned arm, or from one that may stand in.

Only before the first byte may another arm take over. An arm that cannot begin to answer goes down,
which keeps requests and sticky keys away from it, and is asked for one token until it gives it.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Mapping
from typing import Any

from carryover.serving.admission import Gate, Health
from carryover.serving.answers import (
    NoAnswer,
    NoReplica,
    Problem,
    cancel,
    read_problem,
    read_refusal,
)
from carryover.serving.call import OUTCOMES, Call
from carryover.serving.link import ControlLink
from carryover.serving.preload import without_gc
from carryover.serving.routing import substitutes

with without_gc():
    from ray.serve.llm.openai_api_models import CompletionRequest

_PROBE_EVERY_S = 0.5
# For a replica to take a request; it takes a millisecond where there is one.
_TAKE_S = 3.0
FULL = Problem("overloaded", False, "it has as many requests as it may")

logger = logging.getLogger("ray.serve")


class Dispatcher:
    """Asks arms.

    Args:
        handles: Serve handle of each arm.
        fallback: arms that may stand in, in order.
        first_token_timeout_s: for the first chunk of a stream, and for a probe.
        whole_timeout_s: for a whole answer.
        replicas: of each arm.
        link: gives the split in force, and has the audit log say which arms go down.
    """

    def __init__(
        self,
        handles: Mapping[str, Any],
        *,
        fallback: list[str],
        first_token_timeout_s: float,
        whole_timeout_s: float,
        replicas: int,
        gate: Gate,
        health: Health,
        link: ControlLink,
    ) -> None:
        self._handles, self._fallback = handles, fallback
        self._first_token_s, self._whole_s = first_token_timeout_s, whole_timeout_s
        self._replicas = replicas
        self._gate, self._health, self._link = gate, health, link
        self._methods: dict[tuple[str, str], Any] = {}
        self._probes: set[asyncio.Task] = set()

    def method(self, arm: str, kind: str) -> Any:
        """The arm's "chat" or "completions"."""
        found = self._methods.get((arm, kind))
        if found is None:
            handle = self._handles[arm]
            found = self._methods[arm, kind] = handle.options(stream=True, method_name=kind)
        return found

    async def ask(self, call: Call) -> tuple[Any, Any]:
        """Get the first byte from the assigned arm, or from one that may stand in for it.

        Returns:
            The first item of the answer, and the stream of the rest; `call` says of which arm.

        Raises:
            ApiError: no arm can answer, or the request is wrong in the engine's eyes.
        """
        route, weights = call.route, self._link.traffic.weights
        problem, answer = await self._try(call, route.arm)
        if answer is not None:
            return answer
        call.reason = f"fallback:{problem.why}"
        for arm in substitutes(route, weights, self._fallback):
            other, answer = await self._try(call, arm)
            if answer is not None:
                # Another arm could: so it was the arm's fault and not the request's.
                self._suspect(route.arm, problem)
                call.record_failure(route.arm, "fallback", assigned=True)
                return answer
            if other.why != "failed":
                self._suspect(arm, other)
            call.record_failure(arm, OUTCOMES[other.why], assigned=False)
        if problem.why != "failed":
            self._suspect(route.arm, problem)
        call.give_up()
        call.record_failure(route.arm, OUTCOMES[problem.why], assigned=True)
        raise problem.error()

    async def _try(self, call: Call, arm: str) -> tuple[Problem | None, tuple[Any, Any] | None]:
        """Ask one arm; gives why it did not begin to answer, or its answer."""
        gate, health = self._gate, self._health
        if arm in health.down:
            return Problem("down", True, health.down[arm]), None
        if not gate.enter(arm):
            return FULL, None
        call.arm = arm
        try:
            item, stream = await self._first(call, arm)
        except asyncio.CancelledError:
            call.finish("disconnected")
            raise
        except Exception as error:
            problem = read_problem(error)
            if problem is None:
                call.finish("error")
                raise
            gate.leave(arm)
            return problem, None
        refusal = read_refusal(item)
        if refusal is not None:
            if refusal.status < 500:
                call.leave()
                raise refusal
            cancel(stream)
            gate.leave(arm)
            return Problem("failed", False, "its engine answered with an error"), None
        health.succeeded(arm)
        return None, (item, stream)

    async def _first(self, call: Call, arm: str) -> tuple[Any, Any]:
        """First item of an arm's answer, and the stream of the rest."""
        body = call.body
        body.model = arm
        limit_s = self._first_token_s if body.stream else self._whole_s
        # Another replica of the arm may be alive.
        for attempt in range(min(2, self._replicas), 0, -1):
            stream = self.method(arm, call.kind).remote(body, call.info)
            try:
                return await _first_item(stream, limit_s), stream
            except Exception as error:
                problem = read_problem(error)
                if attempt > 1 and problem is not None and problem.why == "down":
                    continue
                raise
        raise AssertionError("there is always a last attempt")

    def _suspect(self, arm: str, problem: Problem) -> None:
        """Note that an arm did not answer; from some point on it gets no requests."""
        if problem.why == "overloaded":
            return
        if self._health.failed(arm, problem.text, definite=problem.definite):
            logger.warning("arm %s gets no requests: %s", arm, problem.text)
            self._link.note(arm, "down", problem.text)
            task = asyncio.get_running_loop().create_task(
                self._probe(arm), context=contextvars.Context()
            )
            self._probes.add(task)
            task.add_done_callback(self._probes.discard)

    async def _probe(self, arm: str) -> None:
        """Ask an arm that is down for one token, until it gives it."""
        limit_s = self._first_token_s
        while True:
            await asyncio.sleep(_PROBE_EVERY_S)
            body = CompletionRequest(model=arm, prompt="1", max_tokens=1, temperature=0)
            stream = self.method(arm, "completions").remote(body, None)
            try:
                item = await _first_item(stream, limit_s, take_s=limit_s)
            except Exception:
                continue
            refusal = read_refusal(item)
            if refusal is None or refusal.status < 500:
                break
        if self._health.recovered(arm):
            logger.warning("arm %s answers again", arm)
            self._link.note(arm, "up", "it answers again")


async def _first_item(stream: Any, limit_s: float, *, take_s: float = _TAKE_S) -> Any:
    """First item of an arm's answer; without one, the arm's work on it is cancelled.

    Args:
        stream: Serve's response generator.
        limit_s: for the item.
        take_s: for a replica to take the request: Serve waits without end for one that is alive.

    Raises:
        NoReplica: none took it.
        NoAnswer: the answer ended before it began.
        TimeoutError: the item did not come.
    """
    loop = asyncio.get_running_loop()
    # Private, but what `__anext__` waits for first: Serve tells nowhere else that it waits.
    taking = asyncio.wrap_future(stream._replica_result_future)
    taken = False
    try:
        async with asyncio.timeout(min(take_s, limit_s)) as limit:
            await asyncio.shield(taking)
            taken = True
            limit.reschedule(loop.time() + limit_s)
            return await stream.__anext__()
    except TimeoutError:
        cancel(stream)
        if not taken:
            raise NoReplica from None
        raise
    except asyncio.CancelledError:
        task = asyncio.current_task()
        ours = task is not None and task.cancelling() > 0
        if ours and not taken:
            # Serve loses a request that is cancelled in the instant in which a replica takes it.
            taking.add_done_callback(lambda _: cancel(stream))
            loop.call_later(take_s, cancel, stream)
        else:
            cancel(stream)
        if ours:
            raise
        raise NoAnswer("its answer was cancelled") from None
    except StopAsyncIteration:
        raise NoAnswer("its answer was empty") from None
    except BaseException:
        cancel(stream)
        raise
