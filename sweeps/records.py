"""MLflow's records of a sweep: one parent, a child for each measurement and for each failure.

Written by the driver alone, in a thread of its own, so that a slow store delays no trial. What a
killed driver did not deliver is found in the ledger by the next one, which goes on in the same
parent run and adds the children that are missing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from carryover.durable import write_whole
from carryover.errors import ServingError
from carryover.tracking import Run, Tracker
from sweeps.conductor import Task
from sweeps.ledger import Ledger, TrialEnd
from sweeps.measuring import tail

EXPERIMENT = "sweeps"
# a value of parameters that a child does not have, so that all children have the same keys
ABSENT = "-"
_LOG_LINES = 2000

logger = logging.getLogger(__name__)


class Records:
    """A `conductor.Listener` that writes children of `parent`.

    Args:
        parent: of all.
        title: name of a measurement's run.
        load_params: what a measurement's row adds to the parameters of its setting.
        logs: folder of the engines' logs.
    """

    def __init__(
        self,
        parent: Run,
        *,
        title: Callable[[Mapping[str, Any]], str],
        load_params: tuple[str, ...],
        logs: Path,
    ) -> None:
        self.parent, self._title, self._load_params, self._logs = parent, title, load_params, logs
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="sweep-records", daemon=True)
        self._thread.start()

    def started(self, task: Task, attempt: int) -> None:
        """Nothing to record yet."""

    def ready(self, task: Task, start_s: float) -> None:
        """Nothing to record yet."""

    def measured(self, task: Task, row: Mapping[str, Any]) -> None:
        """A finished child."""
        self._waiting.put(lambda: self._record(task, row))

    def ended(self, task: Task, end: TrialEnd) -> None:
        """A failed child, with its log, if the setting failed for good."""
        if end.outcome == "failed":
            self._waiting.put(lambda: self._record_failure(task, end))

    def close(self) -> None:
        """Write what is waiting."""
        self._waiting.put(None)
        self._thread.join()

    def add_missing(self, ledger: Ledger, tasks: Mapping[str, Task], tracker: Tracker) -> None:
        """Add the children that an earlier driver did not come to write."""
        finished, failed = _children(tracker, self.parent.id)
        for row in ledger.rows():
            if row["setting"] in tasks and self._title(row) not in finished:
                self.measured(tasks[row["setting"]], row)
        for name, end in ledger.ends.items():
            if name in tasks and name not in failed | finished:
                self.ended(tasks[name], end)

    def _write(self) -> None:
        while (write := self._waiting.get()) is not None:
            try:
                write()
            except Exception:
                logger.exception("a record of the sweep was not written; resume to try again")

    def _record(self, task: Task, row: Mapping[str, Any]) -> None:
        with self.parent.child(self._title(row)) as child:
            child.log_params({**task.params, **{name: row[name] for name in self._load_params}})
            child.log_metrics({**row["figures"], "wall_s": row.get("wall_s", 0.0)})

    def _record_failure(self, task: Task, end: TrialEnd) -> None:
        with contextlib.suppress(ServingError), self.parent.child(task.name) as child:
            child.log_params({**task.params, **dict.fromkeys(self._load_params, ABSENT)})
            child.log_text(end.reason + "\n", "error.txt")
            log = self._logs / f"{task.name}.log"
            if log.exists():
                child.log_text(tail(log, _LOG_LINES) + "\n", "engine.log")
            raise ServingError(end.reason.strip().splitlines()[-1])


@contextmanager
def recorded(
    tracker: Tracker | None, folder: Path, params: Mapping[str, Any]
) -> Iterator[Run | None]:
    """The parent run, the one of an earlier driver if there is one in the same store."""
    if tracker is None:
        yield None
        return
    file = folder / "mlflow.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    run_id = known.get("run_id") if known.get("uri") == tracker.uri else None
    name = folder.name
    with tracker.run(
        experiment=EXPERIMENT, name=name, tags={"carryover.sweep": name}, run_id=run_id
    ) as parent:
        write_whole(file, json.dumps({"uri": tracker.uri, "run_id": parent.id}) + "\n")
        parent.log_params(params)
        yield parent


def record_answer(
    parent: Run | None, ledger: Ledger, answer: Callable[[Ledger], Sequence[Path]] | None
) -> None:
    """Write the answer, and store copies of its files in the parent run."""
    files = [] if answer is None else answer(ledger)
    if parent is not None:
        for file in files:
            parent.log_file(file)


def record_gains(tracker: Tracker, parent: Run, gains: Mapping[str, Mapping[str, float]]) -> None:
    """Add metrics to children that have ended, by name: gains are known once references are.

    What a child has already is left alone. A store that fails is logged, as the gains are in the
    answer too, and resuming adds them.
    """
    try:
        for run in _each_child(tracker, parent.id):
            for name, value in gains.get(run.info.run_name, {}).items():
                if name not in run.data.metrics:
                    tracker.client().log_metric(run.info.run_id, name, value)
    except Exception:
        logger.exception("gains were not added to MLflow's records; resume to try again")


def _children(tracker: Tracker, parent_id: str) -> tuple[set[str], set[str]]:
    """Names of the children that are whole: finished ones, and failed ones."""
    names: dict[str, set[str]] = {"FINISHED": set(), "FAILED": set()}
    for run in _each_child(tracker, parent_id):
        if run.info.status in names:
            names[run.info.status].add(run.info.run_name)
    return names["FINISHED"], names["FAILED"]


def _each_child(tracker: Tracker, parent_id: str) -> Iterator[Any]:
    client = tracker.client()
    experiment = client.get_run(parent_id).info.experiment_id
    token = None
    while True:
        page = client.search_runs(
            [experiment], filter_string=f"tags.`mlflow.parentRunId` = '{parent_id}'",
            max_results=1000, page_token=token,
        )  # fmt: skip
        yield from page
        token = page.token
        if not token:
            return
