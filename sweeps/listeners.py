"""Tells several listeners of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sweeps.conductor import Listener, Task
from sweeps.ledger import TrialEnd


class Listeners:
    """Tells several listeners."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = list(listeners)

    def started(self, task: Task, attempt: int) -> None:
        """See `conductor.Listener`."""
        for listener in self._listeners:
            listener.started(task, attempt)

    def ready(self, task: Task, start_s: float) -> None:
        """See `conductor.Listener`."""
        for listener in self._listeners:
            listener.ready(task, start_s)

    def measured(self, task: Task, row: Mapping[str, Any]) -> None:
        """See `conductor.Listener`."""
        for listener in self._listeners:
            listener.measured(task, row)

    def ended(self, task: Task, end: TrialEnd) -> None:
        """See `conductor.Listener`."""
        for listener in self._listeners:
            listener.ended(task, end)
