"""When an experiment is recorded elsewhere, and what happens if that fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

logger = logging.getLogger(__name__)


class Recorder(Protocol):
    """Keeps experiments somewhere; its methods may block."""

    def record(self, report: dict[str, Any], run_id: str | None, final: bool) -> str | None:
        """Record a report; returns the run's id, None while there is nothing worth one."""

    def close(self) -> None:
        """Let go of what is open."""


class Recording:
    """Records one report at a time, in a thread; a failure is kept for people to see.

    Args:
        recorder: None records nothing.

    Attributes:
        failed: why the last record failed; empty if it did not.
    """

    def __init__(self, recorder: Recorder | None) -> None:
        self.failed = ""
        self._recorder = recorder
        self._lock = asyncio.Lock()
        # The experiment that was recorded last, by its beginning, and its run.
        self._last: tuple[float, str] | None = None
        self._tasks: set[asyncio.Task] = set()

    @property
    def is_idle(self) -> bool:
        """Whether no record is being written or waiting."""
        return not self._tasks

    def begin(
        self, report: dict[str, Any], run_id: str | None, *, final: bool,
        started: Callable[[str], Awaitable[None]],
    ) -> asyncio.Task:  # fmt: skip
        """Record a report in the background.

        Args:
            report: without NaN.
            run_id: of the experiment; None before its first record.
            final: whether it is over.
            started: is told the id of a run that was started.
        """
        task = asyncio.create_task(self._record(report, run_id, final, started))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _record(
        self, report: dict[str, Any], run_id: str | None, final: bool,
        started: Callable[[str], Awaitable[None]],
    ) -> None:  # fmt: skip
        if self._recorder is None:
            return
        async with self._lock:
            # The run may have been started while this record waited for its turn.
            if self._last is not None and self._last[0] == report["began_s"]:
                run_id = self._last[1]
            try:
                found = await asyncio.to_thread(self._recorder.record, report, run_id, final)
                if found is not None:
                    self._last = (report["began_s"], found)
                if found is not None and found != run_id:
                    await started(found)
                self.failed = ""
            except Exception as error:
                logger.exception("experiment %s was not recorded", report["experiment"])
                self.failed = str(error) or type(error).__name__

    def close(self) -> None:
        """Let go of the recorder."""
        if self._recorder is not None:
            self._recorder.close()
