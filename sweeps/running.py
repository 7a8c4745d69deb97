"""Run what a sweep still lacks, and record it: what sweeps of decoding and of training share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from carryover.tracking import Tracker
from sweeps.conductor import Listener, Task
from sweeps.ledger import Ledger, TrialEnd
from sweeps.listeners import Listeners
from sweeps.records import Records
from sweeps.search import Score, Search, Wait
from sweeps.settings import SweepConfig, TrialResources
from sweeps.training_settings import TrainingResources, TrainingSweepConfig
from sweeps.tuning import RunFigures, Work, connected, run_tasks


class SearchedPlan(ABC):
    """A `conductor.Plan` whose tasks come from a search.

    Attributes:
        cuts: see `conductor.Plan`.
        config: the sweep.
        search: gives settings, and is told scores.
        settings: that there may be, by name.
        tasks: of them, by name.
    """

    cuts: bool
    config: SweepConfig | TrainingSweepConfig
    search: Search
    settings: Mapping[str, Any]
    tasks: Mapping[str, Task]

    def unfinished(self) -> bool:
        """Whether there may be anything to do; what Optuna wants next is known only by asking."""
        return self.config.search.kind == "optuna" or any(
            not self.is_over(setting) for setting in self.settings.values()
        )

    def next(self) -> Task | Wait | None:
        """See `conductor.Plan`."""
        found = self.search.next()
        return found if found is None or isinstance(found, Wait) else self.tasks[found.name]

    def ended(self, task: Task, end: TrialEnd) -> None:
        """See `conductor.Plan`."""
        self.search.tell(task.name, self.score(task.name) if end.outcome == "done" else None)

    @abstractmethod
    def why_stop(self, task: Task) -> str | None:
        """See `conductor.Plan`."""

    @abstractmethod
    def is_over(self, setting: Any) -> bool:
        """Whether nothing is left to do for a setting."""

    @abstractmethod
    def score(self, name: str) -> Score | None:
        """What the search is told of a task; None before it has one."""


def run_missing(
    plan: SearchedPlan,
    *,
    work: Work,
    ledger: Ledger,
    resources: TrialResources | TrainingResources,
    placement: Callable[[], Mapping[str, Any]],
    records: Records | None,
    tracker: Tracker | None,
    listeners: Sequence[Listener],
    budget_s: float | None,
) -> RunFigures | None:
    """Run a plan's tasks on Ray; None if the ledger has all of them.

    Args:
        plan: gives tasks.
        work: what a trial does; importable by the cluster's nodes.
        ledger: keeps what comes back.
        resources: the cluster, and restarts of a task whose process or node died.
        placement: `bundle`, `max_concurrent` and `reuse` of `run_tasks`, asked for once Ray is
            connected; what the ledger has already is recorded before that.
        records: writes to MLflow; closed at the end, whatever happens.
        tracker: of the store that `records` writes to.
        listeners: are told of everything that happens.
        budget_s: after which nothing is started, and what runs is cut.

    Raises:
        ServingError: no node of the cluster can hold a trial.
    """
    try:
        if records is not None:
            records.add_missing(ledger, plan.tasks, tracker)
        if not plan.unfinished():
            return None
        with connected(resources.address):
            return run_tasks(
                plan,
                work=work,
                ledger=ledger,
                listener=Listeners([*([records] if records else []), *listeners]),
                max_restarts=resources.max_restarts,
                budget_s=budget_s,
                **placement(),
            )
    finally:
        if records is not None:
            records.close()
