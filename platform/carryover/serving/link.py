"""The link from an ingress replica to the controller: a heartbeat, and the split in force.

The replica serves without the controller: it keeps the last split, and observations wait in a
bounded buffer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from carryover.serving.admission import Gate, Health
from carryover.serving.observations import split_name
from carryover.serving.telemetry import Telemetry
from carryover.serving.timing import HEARTBEAT_S
from carryover.serving.traffic import Traffic

_ANSWER_TIMEOUT_S = 10.0
_MOST_EVENTS = 1_000

logger = logging.getLogger("ray.serve")


class ControlLink:
    """Tells the controller what happened, and takes over the splits that it decides.

    Args:
        controller: Serve handle of the `TrafficController`; None for a replica on its own.
        traffic: split to begin with.
        replica: unique id of this ingress replica.

    Attributes:
        traffic: the split in force.
        split: its name in observations.
        revoked: ids of keys that no longer count.
    """

    def __init__(
        self,
        controller: Any | None,
        traffic: Traffic,
        *,
        replica: str,
        telemetry: Telemetry,
        gate: Gate,
        health: Health,
    ) -> None:
        self._controller = controller
        self._replica = replica
        self._telemetry, self._gate, self._health = telemetry, gate, health
        # The newest split known; it may not be in force yet.
        self._known = 0
        self._sequence = 0
        self._batch: list[list[Any]] | None = None
        self._events: list[tuple[float, str, str, str]] = []
        self._lost = False
        self._task: asyncio.Task | None = None
        self._take_over(traffic)

    async def start(self, *, timeout_s: float) -> None:
        """Take the split from the controller, then keep in step in the background.

        Waits so long for the controller's answer: a replica that begins after a roll-back must not
        begin with the weights of the configuration.
        """
        if self._task is not None:
            return
        deadline = time.monotonic() + timeout_s
        while self._controller is not None and not await self._exchange():
            if time.monotonic() > deadline:
                logger.warning(
                    "the traffic controller does not answer; serving the configured weights"
                )
                break
            await asyncio.sleep(HEARTBEAT_S)
        self._task = asyncio.get_running_loop().create_task(self._beat())

    def note(self, arm: str, change: str, text: str) -> None:
        """Have the audit log say that an arm went "down" or "up"."""
        if len(self._events) < _MOST_EVENTS:
            self._events.append((time.time(), arm, change, text))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                self._telemetry.publish(
                    experiment=self.traffic.experiment, weights=self.traffic.weights,
                    in_flight=self._gate.in_flight, down=self._health.down,
                )  # fmt: skip
                if self._controller is not None:
                    await self._exchange()
            except Exception:
                logger.exception("heartbeat failed")

    async def _exchange(self) -> bool:
        """One exchange; returns whether the controller answered."""
        if self._batch is None:
            self._batch = [seen.to_row() for seen in self._telemetry.take()]
            self._sequence += 1
        events = list(self._events)
        response = self._controller.exchange.remote(
            # Confirmed once it is in force, so that whoever changed it sees it at work.
            self._replica, self.traffic.version, self._batch, self._telemetry.dropped,
            self._sequence, events,
        )  # fmt: skip
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                newer = await response
        except asyncio.CancelledError:
            raise
        except Exception as error:
            response.cancel()
            if not self._lost:
                self._lost = True
                logger.warning("the traffic controller is away: %s", type(error).__name__)
            return False
        if self._lost:
            self._lost = False
            logger.warning("the traffic controller is back")
        self._batch = None
        del self._events[: len(events)]
        if newer is not None:
            self._expect(Traffic.model_validate(newer))
        return True

    def _expect(self, traffic: Traffic) -> None:
        if traffic.version <= self._known:
            return
        self._known = traffic.version
        wait_s = traffic.effective_at - time.time()
        if wait_s > 0:
            asyncio.get_running_loop().call_later(wait_s, self._take_over, traffic)
        else:
            self._take_over(traffic)

    def _take_over(self, traffic: Traffic) -> None:
        # A later one may have come into force at once.
        if getattr(self, "traffic", None) is not None and traffic.version < self.traffic.version:
            return
        self.traffic = traffic
        self.split = split_name(traffic.weights)
        self.revoked = frozenset(traffic.revoked)
