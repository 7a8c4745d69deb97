"""Runs a sweep's trials through Ray Tune, each in a placement group of its own."""

from __future__ import annotations

import logging
import os
import shutil
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import ray
from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import FIFOScheduler

from carryover.durable import append_line
from carryover.errors import ServingError, UserError
from jobs.ray_cluster import start_ray
from sweeps.board import make_board
from sweeps.conductor import Conductor, Listener, Plan, report
from sweeps.ledger import Ledger

# tells Tune to leave Ctrl-C to us, to write no files for tools that are not used, and not to print
_TUNE_ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "TUNE_GLOBAL_CHECKPOINT_S": "86400",
    "RAY_AIR_NEW_OUTPUT": "0",
}

# measured parts of one trial: (row, ...) in order; gets what the trial is told, and `ready`
Work = Callable[[Mapping[str, Any], list[tuple], Callable[[], None]], Iterator[Mapping[str, Any]]]


class Scheduler(FIFOScheduler):
    """Ends trials that the conductor gives up, and hands free processes to the newest trial.

    Tune's own choice is any waiting trial, whose process, which may be starting, is then killed for
    it; with trials shorter than a process takes to start, most slots would never get one.
    """

    def __init__(self, conductor: Conductor) -> None:
        super().__init__()
        self._conductor = conductor
        self._waiting: list[Trial] = []

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: Mapping[str, Any]) -> str:
        """Called by Tune with each report, before the conductor, who can only listen."""
        self._conductor.on_trial_result(trial.trial_id, result)
        stop = self._conductor.is_to_be_cut(trial.trial_id)
        return FIFOScheduler.STOP if stop else FIFOScheduler.CONTINUE

    def __getstate__(self) -> dict[str, Any]:
        """Nothing, for the reason that the conductor gives."""
        return {}

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        """Called by Tune with each new trial."""
        self._waiting.append(trial)

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        """Called by Tune, in every round."""
        self._waiting = [trial for trial in self._waiting if trial.status == Trial.PENDING]
        return self._waiting[-1] if self._waiting else None


@dataclass(frozen=True)
class RunFigures:
    """How a run of a sweep went.

    Attributes:
        trials: that ended.
        slots: trials that the cluster holds at once.
        wall_s: from the first suggestion to the end.
        busy_s: time of the trials, as they count it.
        out_of_time: whether the budget ended it.
    """

    trials: int
    slots: int
    wall_s: float
    busy_s: float
    out_of_time: bool

    @property
    def overhead_s(self) -> float:
        """Time of a slot that passed, per trial, without a trial running on it."""
        slots = min(self.slots, self.trials)
        return max(0.0, slots * self.wall_s - self.busy_s) / self.trials if self.trials else 0.0


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Be connected to Ray: as this process is, else to `address`, else to a cluster made for it."""
    if ray.is_initialized():
        yield
        return
    start_ray(address)
    try:
        yield
    finally:
        ray.shutdown()


def run_tasks(
    plan: Plan,
    *,
    work: Work,
    ledger: Ledger,
    listener: Listener,
    bundle: Mapping[str, float],
    max_restarts: int,
    max_concurrent: int | None = None,
    reuse: bool = True,
    budget_s: float | None = None,
) -> RunFigures:
    """Run what a plan gives, to its end or that of the budget; Ray is connected.

    Args:
        plan: gives tasks.
        work: what a trial does; importable by the cluster's nodes.
        ledger: keeps what comes back.
        listener: is told.
        bundle: what each trial reserves.
        max_restarts: of a task whose process or node died.
        max_concurrent: trials at once; None: as many as fit.
        reuse: whether a process may run one trial after another.
        budget_s: after which nothing is started, and what runs is cut.

    Raises:
        ServingError: no node of the cluster can hold a trial.
    """
    os.environ.update({**_TUNE_ENVIRONMENT, **os.environ})
    for name in ("ray.tune", "ray.train"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    held = slots(bundle)
    if not held:
        raise ServingError(
            f"a trial needs a node with {_words(bundle)}, and the Ray cluster has none: "
            f"{'; '.join(_words(node) for node in _nodes())}; lower resources, or give "
            "resources.address of a larger cluster"
        )
    held = min(held, max_concurrent or held)
    # so that free resources are taken at once, and not one trial a round
    os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(min(held, 64))
    began = time.monotonic()
    board = make_board()
    conductor = Conductor(
        plan, ledger, listener, stop=lambda name: ray.get(board.stop.remote(name)),
        max_restarts=max_restarts, deadline_s=None if budget_s is None else began + budget_s,
    )  # fmt: skip
    # its own files are not read again: the ledger says what was measured
    name = f".tune-{os.getpid()}-{time.time_ns()}"
    try:
        tune.Tuner(
            tune.with_resources(
                tune.with_parameters(_trial, work=work, board=board),
                tune.PlacementGroupFactory([dict(bundle)]),
            ),
            tune_config=tune.TuneConfig(
                search_alg=conductor, scheduler=Scheduler(conductor), num_samples=-1,
                reuse_actors=reuse,
                time_budget_s=budget_s, max_concurrent_trials=max_concurrent,
                trial_name_creator=lambda trial: trial.trial_id,
                trial_dirname_creator=lambda trial: trial.trial_id,
            ),
            run_config=tune.RunConfig(name=name, storage_path=str(ledger.folder), verbose=0),
        ).fit()  # fmt: skip
    finally:
        shutil.rmtree(ledger.folder / name, ignore_errors=True)
        ray.kill(board)
    cut = budget_s is not None and time.monotonic() - began >= budget_s
    figures = RunFigures(
        conductor.num_trials, held, time.monotonic() - began, conductor.busy_s,
        conductor.out_of_time or cut,
    )  # fmt: skip
    append_line(ledger.folder / "runs.jsonl", {**asdict(figures), "overhead_s": figures.overhead_s})
    return figures


def _trial(told: Mapping[str, Any], *, work: Work, board: ray.actor.ActorHandle) -> None:
    """What Tune runs: the parts of one setting, until they are measured or it is told to stop."""
    began = time.monotonic()
    failure = None

    def ready() -> None:
        report("ready", start_s=time.monotonic() - began)

    parts = [tuple(part) for part in told["parts"]]
    report("began")
    try:
        measuring = work(told["task"], parts, ready)
        for row in measuring:
            report("measured", row=dict(row))
            if ray.get(board.is_stopped.remote(row["setting"])):
                measuring.close()
                break
    except Exception as error:
        failure = str(error) if isinstance(error, UserError) else traceback.format_exc()
    report("ended", wall_s=time.monotonic() - began, failure=failure)


def slots(bundle: Mapping[str, float]) -> int:
    """How many trials the cluster's nodes hold at once."""
    return sum(
        int(min(node.get(name, 0.0) / amount + 1e-6 for name, amount in bundle.items()))
        for node in _nodes()
    )


def smallest_node_cpus() -> float:
    """Cores of the smallest node that has any."""
    return min(node["CPU"] for node in _nodes() if node.get("CPU"))


def _nodes() -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _words(resources: Mapping[str, float]) -> str:
    named = [f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if resources.get(name)]
    if resources.get("memory"):
        named.append(f"{resources['memory'] / 2**30:.1f} GiB of memory")
    return ", ".join(named) or "nothing"
