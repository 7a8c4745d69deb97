"""Leads the trials of a sweep: what each does, what becomes of it, what is tried again.

Ray Tune asks for suggestions and passes reports on; all that must survive is in the ledger. A trial
reports each part of its setting as it is measured, and asks the board whether to go on. One whose
process or node died is tried again with the parts that are missing; one that says why it cannot be
measured is not.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ray import tune
from ray.tune.search import Searcher

from sweeps.ledger import Ledger, TrialEnd
from sweeps.search import Wait

# the one key of a trial's report: text, because Tune keeps statistics of every number it is given
NEWS = "news"


@dataclass(frozen=True)
class Task:
    """One trial's work.

    Attributes:
        name: of the setting.
        payload: JSON-able; what the trial is told.
        params: for records; the same keys for every task of a sweep.
        parts: what is to be measured, in order, as the ledger tells them apart.
    """

    name: str
    payload: Mapping[str, Any]
    params: Mapping[str, Any]
    parts: tuple[tuple, ...]


class Plan(Protocol):
    """What a sweep tries.

    Attributes:
        cuts: whether a trial that is to stop is ended by Tune; else it ends itself, in order.
    """

    cuts: bool

    def next(self) -> Task | Wait | None:
        """The next task, `Wait.WAIT` if that depends on running ones, None at the end."""

    def why_stop(self, task: Task) -> str | None:
        """Why a task is not worth going on with, after a part of it was measured."""

    def ended(self, task: Task, end: TrialEnd) -> None:
        """A task is over for good."""


class Listener(Protocol):
    """Is told of everything, after it is in the ledger."""

    def started(self, task: Task, attempt: int) -> None:
        """A trial has its resources, and begins."""

    def ready(self, task: Task, start_s: float) -> None:
        """Its engine answers."""

    def measured(self, task: Task, row: Mapping[str, Any]) -> None:
        """A part was measured."""

    def ended(self, task: Task, end: TrialEnd) -> None:
        """A trial ended, however."""


def report(kind: str, **news: Any) -> None:
    """Called in a trial: tell the conductor; returns when it has heard."""
    tune.report({NEWS: json.dumps({"kind": kind, **news})})


class Conductor(Searcher):
    """What Tune asks and tells.

    Args:
        plan: gives tasks.
        ledger: keeps what comes back.
        listener: is told.
        stop: asks the trial of a setting to end after the part that it has just reported.
        max_restarts: how often a task whose process died is tried again.
        deadline_s: `time.monotonic` at which nothing more is started.

    Attributes:
        num_trials: that ended.
        busy_s: their time, as they count it.
        out_of_time: whether the deadline kept something from being started or measured.
    """

    def __init__(
        self,
        plan: Plan,
        ledger: Ledger,
        listener: Listener,
        *,
        stop: Callable[[str], object],
        max_restarts: int,
        deadline_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.plan, self.ledger, self.listener, self._stop = plan, ledger, listener, stop
        self.num_trials, self.busy_s, self.out_of_time = 0, 0.0, False
        self._max_restarts, self._deadline_s, self._clock = max_restarts, deadline_s, clock
        self._running: dict[str, _Running] = {}
        self._again: deque[Task] = deque()
        self._attempts: Counter[str] = Counter()
        self._longest_start_s = self._longest_part_s = 0.0

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """Called by Tune for the next trial; None means to ask again later."""
        if self._deadline_s is not None:
            expected_s = self._longest_start_s + self._longest_part_s
            if self._clock() + expected_s >= self._deadline_s:
                self.out_of_time = True
                return Searcher.FINISHED
        task = self._again.popleft() if self._again else self.plan.next()
        if task is Wait.WAIT or (task is None and self._running):
            # what runs may have to be tried again
            return None
        if task is None:
            return Searcher.FINISHED
        self._attempts[task.name] += 1
        missing = [part for part in task.parts if not self.ledger.has(task.name, part)]
        self._running[trial_id] = _Running(task, self._attempts[task.name], self._clock())
        return {"task": dict(task.payload), "parts": [list(part) for part in missing]}

    def on_trial_result(self, trial_id: str, result: Mapping[str, Any]) -> None:
        """Called by Tune with a report, while its trial waits."""
        running = self._running.get(trial_id)
        if running is None or NEWS not in result:
            return
        task, news = running.task, json.loads(result[NEWS])
        if news["kind"] == "began" and not running.began:
            running.began, running.since_s = True, self._clock()
            self.listener.started(task, running.attempt)
        elif news["kind"] == "ready" and running.start_s is None:
            running.start_s = news["start_s"]
            self._longest_start_s = max(self._longest_start_s, news["start_s"])
            self.listener.ready(task, news["start_s"])
        elif news["kind"] == "measured" and self.ledger.add(news["row"]):
            self._longest_part_s = max(self._longest_part_s, news["row"].get("wall_s", 0.0))
            self.listener.measured(task, news["row"])
            running.stopped = self.plan.why_stop(task)
            if self._deadline_s is not None and self._clock() >= self._deadline_s:
                self.out_of_time = running.out_of_time = True
            if (running.stopped and not self.plan.cuts) or running.out_of_time:
                self._stop(task.name)
        elif news["kind"] == "ended":
            running.wall_s, running.failure = news["wall_s"], news["failure"]

    def is_to_be_cut(self, trial_id: str) -> bool:
        """Whether Tune is to end a trial now."""
        running = self._running.get(trial_id)
        return self.plan.cuts and running is not None and running.stopped is not None

    def on_trial_complete(
        self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False
    ) -> None:
        """Called by Tune when a trial is over."""
        if result is not None:
            self.on_trial_result(trial_id, result)
        running = self._running.pop(trial_id, None)
        if running is None:
            return
        task, start_s = running.task, running.start_s
        died = error or (running.wall_s is None and running.stopped is None)
        wall_s = running.wall_s
        if wall_s is None:
            wall_s = self._clock() - running.since_s
        late = self._deadline_s is not None and self._clock() >= self._deadline_s
        self.num_trials += 1
        self.busy_s += wall_s

        def end(outcome: str, reason: str = "") -> TrialEnd:
            made = TrialEnd(
                task.name, outcome, reason, running.attempt, start_s, wall_s, time.time()
            )
            self.ledger.end(made)
            self.listener.ended(task, made)
            return made

        if running.failure is not None:
            self.plan.ended(task, end("failed", running.failure))
        elif all(self.ledger.has(task.name, part) for part in task.parts):
            self.plan.ended(task, end("done"))
        elif running.stopped:
            self.plan.ended(task, end("stopped", running.stopped))
        elif running.out_of_time or (late and not error):
            # nothing to record: the parts that are missing are measured when the sweep goes on
            return
        elif not died:
            self.plan.ended(task, end("failed", "the trial ended without measuring all"))
        elif running.attempt <= self._max_restarts:
            end("died", f"the trial's process or node died (attempt {running.attempt})")
            self._again.append(task)
        else:
            times = f"{running.attempt} times" if running.attempt > 1 else "once"
            reason = f"the trial's process or node died {times}; most often memory ran out"
            self.plan.ended(task, end("failed", reason))

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: Tune pickles its searcher for a resuming of its own, which is not used."""
        return {}

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the state is a function of the ledger."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing, for the same reason."""


@dataclass
class _Running:
    task: Task
    attempt: int
    since_s: float
    began: bool = False
    start_s: float | None = None
    wall_s: float | None = None
    failure: str | None = None
    stopped: str | None = None
    out_of_time: bool = False
