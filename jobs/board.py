"""Where a job's workers and its driver meet: records one way, a request to stop the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray


class Board:
    """The actor; it needs no core of its own."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._stop = False

    def report(self, event: dict[str, Any]) -> None:
        """Add a record."""
        self._events.append(event)

    def take(self) -> list[dict[str, Any]]:
        """Return the records since the last call."""
        events, self._events = self._events, []
        return events

    def request_stop(self) -> None:
        """Ask the workers to save and end."""
        self._stop = True

    def stop_requested(self) -> bool:
        """Whether they were asked to."""
        return self._stop


class BoardReporter:
    """The workers' end: a `carryover.training.checkpointed.Reporter`."""

    def __init__(self, board: ray.actor.ActorHandle) -> None:
        self._board = board

    def report(self, event: Mapping[str, Any]) -> None:
        """Add a record, and wait until it is there."""
        ray.get(self._board.report.remote(dict(event)))

    def stop_requested(self) -> bool:
        """Whether the run shall save a checkpoint and end."""
        return ray.get(self._board.stop_requested.remote())
