"""Sweep training settings: each trial is a driver that lets Ray Train do one training.

Tune runs a driver function in each trial, and `jobs.train` builds the trainer inside it. Tune does
not reserve Train's workers, so the trial itself takes next to nothing and as many run at once as
the cluster holds workers for. A training writes its own checkpoints; one whose process or node died
goes on from the last. What it records is passed on to the sweep's driver, which alone writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from carryover.durable import write_whole
from carryover.errors import ConfigError, ServingError
from carryover.tracking import Run, Tracker
from sweeps.conductor import Listener, Task, report
from sweeps.halving import why_stop_at
from sweeps.ledger import Ledger, TrialEnd
from sweeps.loading import CONFIG_FILE
from sweeps.records import Records, record_answer, recorded
from sweeps.running import SearchedPlan, run_missing
from sweeps.search import Listed, OptunaSearch, Score, Search, sample
from sweeps.training_settings import (
    ACCEPTANCE,
    FINAL,
    Training,
    TrainingSweepConfig,
    train_with,
    trainings_of,
)
from sweeps.tuning import RunFigures, slots

# the trial only waits: its workers reserve cores and GPUs, of which any share that it took would
# be missing
DRIVER = {"memory": 512 * 2**20}
_EVALUATED = f"eval/{ACCEPTANCE}"


def open_ledger(config: TrainingSweepConfig) -> Ledger:
    """What the sweep's folder holds: a row for each evaluation, and one for each end.

    Raises:
        ConfigError: it holds another sweep.
    """
    config = config.absolute()
    return Ledger(config.out, config.identity(), kept=(ACCEPTANCE,), part=("at",))


def run(
    config: TrainingSweepConfig,
    *,
    tracker: Tracker | None = None,
    listeners: Sequence[Listener] = (),
    budget_s: float | None = None,
    retry_failed: bool = False,
    answer: Callable[[Ledger], Sequence[Path]] | None = None,
) -> RunFigures | None:
    """Train what a sweep still lacks; None if that is nothing.

    Args:
        config: the sweep.
        tracker: where to record it; None records nothing.
        listeners: are told of everything that happens.
        budget_s: after which nothing is started, and what runs is cut.
        answer: writes what was found to files, which are then recorded.
        retry_failed: try trainings again that failed for good.

    Raises:
        ConfigError: `out` holds another sweep's results, or there are no responses to train on.
        ServingError: no training of the sweep ended, or the cluster cannot hold one.
    """
    config = config.absolute()
    if config.train.data is None:
        raise ConfigError(
            "no responses to train on; set train.data, made with `platform data regenerate`"
        )
    ledger = open_ledger(config)
    write_whole(config.out / CONFIG_FILE, config.to_yaml())
    plan = TrainingPlan(config, ledger, retry_failed=retry_failed)
    with recorded(tracker, config.out, config.model_dump(mode="json")) as parent:
        figures = run_missing(
            plan,
            work=partial(work, config.model_dump(mode="json")),
            ledger=ledger,
            resources=config.resources,
            placement=lambda: {
                "bundle": DRIVER,
                "max_concurrent": trainings_at_once(config),
                "reuse": False,
            },
            records=None if parent is None else TrainingRecords(parent, config.out, ledger),
            tracker=tracker,
            listeners=listeners,
            budget_s=budget_s,
        )
        if not ledger.figures and not (figures and figures.out_of_time):
            raise ServingError(f"no training of the sweep was measured; see {ledger.trials_file}")
        record_answer(parent, ledger, answer)
    return figures


def trainings_at_once(config: TrainingSweepConfig) -> int:
    """For how many trainings the cluster holds workers."""
    resources = config.train.resources
    worker = {"CPU": resources.cpus_per_worker or 1.0}
    if resources.gpus_per_worker:
        worker["GPU"] = float(resources.gpus_per_worker)
    elif resources.cpus_per_worker is None:
        # workers of one training share a machine's cores, so no second one belongs there
        return 1
    held = max(1, slots(worker) // resources.num_workers)
    return min(held, config.resources.max_concurrent or held)


def work(
    config: Mapping[str, Any],
    task: Mapping[str, Any],
    parts: Sequence[tuple],
    ready: Callable[[], None],
) -> Iterator[dict[str, Any]]:
    """What a trial does; see `tuning.Work`."""
    from rich.console import Console

    from jobs.train import train
    from jobs.train_view import View

    began = time.monotonic()
    sweep = TrainingSweepConfig.parse(config)
    setting = Training(tuple((key, value) for key, value in task["values"]))
    settings = train_with(sweep.train, dict(setting.values)).model_copy(
        update={"name": setting.name, "runs_folder": str(sweep.out / "trainings")}
    )
    log = sweep.out / "logs" / f"{setting.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as said:
        outcome = train(
            settings,
            kind=sweep.kind,
            start_from=sweep.start_from,
            tracker=Relay(setting.name, ready),
            view=View(Console(file=said, width=120)),
        )
    progress = outcome.progress
    figures = {"steps": progress.step, "trained_s": progress.trained_s, "tokens": progress.tokens}
    if progress.best:
        figures |= {ACCEPTANCE: progress.best[ACCEPTANCE], "best_step": progress.best["step"]}
    yield _row(setting.name, FINAL, progress.step, figures, wall_s=time.monotonic() - began)


def _row(
    setting: str, at: str, step: int, figures: Mapping[str, Any], *, wall_s: float = 0.0
) -> dict[str, Any]:
    values = {name: float(value) for name, value in figures.items()}
    return {"setting": setting, "at": at, "step": step, "figures": values, "wall_s": wall_s}


class Relay:
    """A training's tracker, which reports its evaluations to the driver of the sweep."""

    uri = "relay"

    def __init__(self, setting: str, ready: Callable[[], None]) -> None:
        self._setting, self._ready = setting, ready

    def open(self, *experiments: str) -> None:
        """Nothing to open."""

    @contextmanager
    def run(self, **told: Any) -> Iterator[Any]:
        """The run of the training: only its evaluations are passed on."""

        def nothing(*_: Any, **__: Any) -> None:
            return None

        self._ready()
        yield SimpleNamespace(
            id=self._setting, url=None, log_params=nothing, log_text=nothing, log_dict=nothing,
            log_file=nothing, set_tags=nothing, log_metrics=self._log_metrics,
        )  # fmt: skip

    def _log_metrics(self, metrics: Mapping[str, Any], step: int = 0) -> None:
        if _EVALUATED in metrics:
            figures = {name.removeprefix("eval/"): value for name, value in metrics.items()}
            report("measured", row=_row(self._setting, str(step), step, figures))


class TrainingPlan(SearchedPlan):
    """Trainings from the search, stopped early where that is asked for."""

    cuts = True

    def __init__(
        self, config: TrainingSweepConfig, ledger: Ledger, *, retry_failed: bool = False
    ) -> None:
        self.config, self.ledger, self._retry = config, ledger, retry_failed
        every = trainings_of(config)
        if config.search.kind == "random":
            every = sample(every, config.search)
        self.tasks = {
            training.name: Task(
                training.name, {"values": training.values}, training.params, ((FINAL,),)
            )
            for training in every
        }
        self.settings = {training.name: training for training in every}
        self.search: Search = Listed(every, over=self.is_over)
        if config.search.kind == "optuna":
            self.search = OptunaSearch(
                {training.values: training for training in every},
                config.search, config.out / "optuna.db", over=self.is_over, score=self.score,
            )  # fmt: skip

    @property
    def size(self) -> int:
        """How many trainings there will be."""
        wanted = self.config.search.num_settings
        return len(self.settings) if wanted is None else min(wanted, len(self.settings))

    def why_stop(self, task: Task) -> str | None:
        """See `conductor.Plan`."""
        rule = self.config.early_stop
        if rule is None or self.ledger.has(task.name, (FINAL,)):
            return None
        curves = {
            name: {int(at): values[0] for (at,), values in parts.items() if at != FINAL}
            for name, parts in self.ledger.figures.items()
        }
        return why_stop_at(task.name, curves, rule.after_steps, rule.reduction_factor)

    def is_over(self, training: Training) -> bool:
        """See `SearchedPlan`."""
        over = self.ledger.is_over(training.name, retry_failed=self._retry)
        return over or self.ledger.has(training.name, (FINAL,))

    def score(self, name: str) -> Score | None:
        """See `SearchedPlan`."""
        return self.ledger.figures.get(name, {}).get((FINAL,))


class TrainingRecords(Records):
    """A child for each training, with the curve of its evaluations."""

    def __init__(self, parent: Run, folder: Path, ledger: Ledger) -> None:
        self._ledger = ledger
        super().__init__(
            parent, title=lambda row: row["setting"], load_params=(), logs=folder / "logs"
        )

    def measured(self, task: Task, row: Mapping[str, Any]) -> None:
        """A finished child, once the training has ended."""
        if row["at"] == FINAL:
            super().measured(task, row)

    def ended(self, task: Task, end: TrialEnd) -> None:
        """A child for one that was stopped as well, which has no last row."""
        if end.outcome == "stopped":
            row = {"setting": task.name, "figures": {}, "step": 0, "wall_s": end.wall_s}
            self._waiting.put(lambda: self._record(task, row, {"carryover.stopped": end.reason}))
        else:
            super().ended(task, end)

    def _record(
        self, task: Task, row: Mapping[str, Any], tags: Mapping[str, str] | None = None
    ) -> None:
        curve = [r for r in self._ledger.rows() if r["setting"] == task.name and r["at"] != FINAL]
        with self.parent.child(task.name, tags=tags) as child:
            child.log_params(task.params)
            for evaluation in curve:
                child.log_metrics(evaluation["figures"], evaluation["step"])
            child.log_metrics({**row["figures"], "wall_s": row["wall_s"]}, row["step"])
