"""Runs the workers of a training job through Ray Train and relays what they report."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import ray
from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchTrainer

from carryover import errors
from carryover.errors import EnvironmentProblem, UserError
from carryover.runtime import usable_cores
from carryover.training.config import ResourceSettings
from jobs.board import Board
from jobs.ray_cluster import start_ray
from jobs.train_records import Recorder

POLL_S = 0.2


@dataclass(frozen=True)
class WorkerJob:
    """What the workers of a job do, and where.

    Attributes:
        run: what each worker calls, with `told` and the `board` to report to.
        told: what every worker is told.
        resources: how many there are, and what each has.
        folder: the run's folder, absolute; Ray Train keeps its own files in it.
    """

    run: Callable[[dict[str, Any]], None]
    told: Mapping[str, Any]
    resources: ResourceSettings
    folder: Path


def run_workers(job: WorkerJob, recorder: Recorder) -> None:
    """Train until the workers are done.

    Raises:
        UserError: a worker found wrong input, or the cluster cannot hold the workers.
        KeyboardInterrupt: asked to stop by Ctrl-C or SIGTERM; a checkpoint was written first.
        RuntimeError: workers failed more often than `resources.max_restarts` allows.
    """
    owns_ray = not ray.is_initialized()
    if owns_ray:
        start_ray(job.resources.address)
    try:
        _run(job, recorder, may_leave=owns_ray)
    finally:
        if owns_ray:
            ray.shutdown()


def _run(job: WorkerJob, recorder: Recorder, *, may_leave: bool) -> None:
    """Follow the workers to their end; with `may_leave` not beyond a user's error, which restarts
    of the workers would only repeat."""
    resources = job.resources
    per_worker = _resources_per_worker(resources)
    require_resources(resources.num_workers, per_worker)
    board = ray.remote(Board).options(num_cpus=0).remote()
    trainer = _trainer(job, per_worker, board)
    failure: list[BaseException] = []

    def fit() -> None:
        try:
            trainer.fit()
        except BaseException as error:
            failure.append(error)

    # In a thread of its own, because in the main thread Ray answers Ctrl-C by ending the workers
    # at once, and they shall write a checkpoint first.
    thread = threading.Thread(target=fit, name="ray-train", daemon=True)
    thread.start()
    stopping = False
    with _Interrupts() as interrupts:
        while True:
            if interrupts.count and not stopping:
                stopping = True
                recorder.view.stopping()
                board.request_stop.remote()
            alive = thread.is_alive()
            for event in ray.get(board.take.remote()):
                recorder.take(event)
            if not alive or (recorder.error is not None and may_leave):
                break
            thread.join(POLL_S)
    if recorder.error is not None:
        kind, message = recorder.error
        raise getattr(errors, kind, UserError)(message)
    if failure:
        raise _explained(failure[0], resources, per_worker) from failure[0]
    if stopping:
        raise KeyboardInterrupt


class _Interrupts:
    """Counts Ctrl-C instead of raising, so that no record is lost half-way; the second raises.

    Does nothing but in the main thread, which alone gets signals.
    """

    def __init__(self) -> None:
        self.count = 0
        self._before: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _interrupt(self, *_: object) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt


def _trainer(
    job: WorkerJob, per_worker: dict[str, float], board: ray.actor.ActorHandle
) -> TorchTrainer:
    resources = job.resources
    # Read by Ray Train's controller; there is no argument for it.
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(resources.start_timeout_s)
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "1")
    threads = str(max(1, int(per_worker["CPU"])))
    return TorchTrainer(
        job.run,
        train_loop_config={**job.told, "board": board},
        scaling_config=ScalingConfig(
            num_workers=resources.num_workers,
            use_gpu=resources.gpus_per_worker > 0,
            resources_per_worker=per_worker,
        ),
        run_config=RunConfig(
            storage_path=str(job.folder),
            name=".ray",
            failure_config=FailureConfig(
                max_failures=resources.max_restarts, controller_failure_limit=0
            ),
            worker_runtime_env={"env_vars": {"OMP_NUM_THREADS": threads}},
            logging_config=LoggingConfig(log_level="ERROR"),
        ),
    )


def _resources_per_worker(resources: ResourceSettings) -> dict[str, float]:
    cpus = resources.cpus_per_worker
    if cpus is None:
        cpus = max(1, len(usable_cores()) // resources.num_workers)
    found = {"CPU": cpus}
    if resources.gpus_per_worker:
        found["GPU"] = resources.gpus_per_worker
    return found


def require_resources(num_workers: int, per_worker: dict[str, float]) -> None:
    """Check that the cluster can ever hold the workers: Ray would wait for ever.

    Raises:
        EnvironmentProblem: it cannot.
    """
    has = ray.cluster_resources()
    for name, amount in per_worker.items():
        if amount * num_workers > has.get(name, 0):
            raise EnvironmentProblem(
                f"{num_workers} workers with {amount:g} {name} each need "
                f"{amount * num_workers:g} {name}, and the Ray cluster has {has.get(name, 0):g}; "
                "lower resources.num_workers, resources.cpus_per_worker or "
                "resources.gpus_per_worker, or give resources.address of a larger cluster"
            )


def _explained(
    error: BaseException, resources: ResourceSettings, per_worker: dict[str, float]
) -> Exception:
    """What a user should see of Ray Train's errors."""
    if isinstance(error, ray.train.ControllerError):
        free = {name: ray.available_resources().get(name, 0) for name in per_worker}
        return EnvironmentProblem(
            f"the cluster did not provide {resources.num_workers} workers with {per_worker} within "
            f"{resources.start_timeout_s:g} s (resources.start_timeout_s); free now: {free}. "
            "Stop what holds them, or ask for less"
        )
    if isinstance(error, TrainingFailedError):
        return RuntimeError(str(error))
    return RuntimeError(f"Ray Train failed: {error}")
