"""One request on its way: which arm answers it, when, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from carryover.serving.answers import Usage
from carryover.serving.observations import Observation
from carryover.serving.routing import (
    ARM_HEADER,
    EXPERIMENT_HEADER,
    REASON_HEADER,
    Route,
)

if TYPE_CHECKING:
    from carryover.serving.admission import Gate
    from carryover.serving.telemetry import Telemetry

# Outcome of a request for each reason that no arm answered it.
OUTCOMES = {"overloaded": "shed", "slow": "timeout", "down": "error", "failed": "error"}


class Call:
    """State of one request in one ingress replica.

    Attributes:
        kind: "chat" or "completions".
        body: the validated request.
        route: the arm it is assigned.
        arm: the arm that answers.
        reason: as in the response's header; "fallback:WHY" if that is another one.
        started: `time.perf_counter()` at the request's arrival.
        first: the same at the first token; 0 before.
        last: the same at the last token so far.
        usage: filled at the end.
        hides_usage: whether the client did not ask for the last chunk.
    """

    __slots__ = (
        "_done", "_experiment", "_gate", "_split", "_telemetry", "after", "arm", "body", "first",
        "hides_usage", "info", "kind", "label", "last", "reason", "route", "shadow", "started",
        "usage",
    )  # fmt: skip

    def __init__(
        self,
        *,
        kind: str,
        body: Any,
        info: Any,
        route: Route,
        label: str | None,
        started: float,
        experiment: str,
        split: str,
        gate: Gate,
        telemetry: Telemetry,
        shadow: bool = False,
    ) -> None:
        self.kind, self.body, self.info, self.route = kind, body, info, route
        self.label, self.started, self.shadow = label, started, shadow
        self.arm, self.reason = route.arm, route.reason
        self.first = self.last = 0.0
        self.usage: Usage | None = None
        self.hides_usage = False
        self.after: Callable[[Call], None] | None = None
        self._experiment, self._split = experiment, split
        self._gate, self._telemetry = gate, telemetry
        self._done = False

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What the client is told about the choice."""
        return [
            (ARM_HEADER.encode(), self.arm.encode()),
            (EXPERIMENT_HEADER.encode(), self._experiment.encode()),
            (REASON_HEADER.encode(), self.reason.encode()),
        ]

    def finish(self, outcome: str) -> None:
        """Count the request out of its arm, and record it; later calls do nothing."""
        if self._done:
            return
        self._done = True
        if not self.shadow:
            self._gate.leave(self.arm)
            self._gate.total -= 1
        self._record(self.arm, outcome, self._reason(), usage=self.usage)
        if outcome == "ok" and self.after is not None:
            self.after(self)

    def leave(self) -> None:
        """End without a record: the request was the client's mistake."""
        if not self._done:
            self._done = True
            self._gate.leave(self.arm)
            self._gate.total -= 1

    def give_up(self) -> None:
        """End without an arm."""
        if not self._done:
            self._done = True
            self._gate.total -= 1

    def record_failure(self, arm: str, outcome: str, *, assigned: bool) -> None:
        """Record that an arm did not answer; the request may go on to another."""
        self._record(arm, outcome, self.route.reason if assigned else "fallback")

    def _reason(self) -> str:
        return self.route.reason if self.arm == self.route.arm else "fallback"

    def _record(self, arm: str, outcome: str, reason: str, usage: Usage | None = None) -> None:
        now = time.perf_counter()
        usage = usage or Usage()
        ttft, tpot = usage.engine_ttft_s, usage.engine_tpot_s
        if self.first:
            ttft = self.first - self.started
            more = usage.output_tokens - 1
            tpot = (self.last - self.first) / more if more > 0 else None
        self._telemetry.add(
            Observation(
                time_s=time.time(), arm=arm, assigned=self.route.arm, reason=reason,
                split=self._split, outcome=outcome, shadow=self.shadow, label=self.label,
                unit=self.route.unit, ttft_s=ttft, tpot_s=tpot, e2e_s=now - self.started,
                prompt_tokens=usage.prompt_tokens, output_tokens=usage.output_tokens,
                rounds=usage.rounds, accepted=usage.accepted, proposed=usage.proposed,
                accepted_per_position=usage.accepted_per_position,
            ),
            experiment=self._experiment,
        )  # fmt: skip
