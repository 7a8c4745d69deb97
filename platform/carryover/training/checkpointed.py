"""What training loops share: when to evaluate and to save, what is told, resuming. No Ray here.

What a step does is a function of the seed and the step, so a resumed run equals an uninterrupted
one.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from carryover.training.meters import StageClock
from carryover.training.optimizer import build_optimizer, learning_rate, set_learning_rate
from carryover.training.packing import Schedule
from carryover.training.snapshots import (
    Progress,
    Snapshots,
    optimizer_tensors,
    read_progress,
    restore_optimizer,
)
from carryover.training.workers import Workers

if TYPE_CHECKING:
    from carryover.training.config import TrainConfig
    from carryover.training.target_config import TargetTrainConfig


class Reporter(Protocol):
    """Where the first worker says what happens; all of it may be shown, recorded or ignored."""

    def report(self, event: Mapping[str, Any]) -> None:
        """Take a record with a `kind`: `step`, `evaluation` or `checkpoint`."""
        ...

    def stop_requested(self) -> bool:
        """Whether the run shall save a checkpoint and end."""
        ...


class CheckpointedLoop(ABC):
    """A run from its first or its last checkpoint to its end.

    Args:
        config: the run's settings.
        model: initial weights, or those of `resume_from`; on this worker's device.
        param_dtype: what a sharded model computes in.
        schedule: what each step takes.
        snapshots: the run's checkpoints.
        workers: this process among those that train.
        reporter: used on the first worker.
        resume_from: a checkpoint of this run whose weights `model` has.
        evaluate_first: whether to evaluate before the first step.

    Raises:
        CheckpointError: the checkpoint cannot be resumed from.
    """

    def __init__(
        self,
        config: TrainConfig | TargetTrainConfig,
        *,
        model: nn.Module,
        param_dtype: torch.dtype,
        schedule: Schedule,
        snapshots: Snapshots,
        workers: Workers,
        reporter: Reporter,
        resume_from: Path | None = None,
        evaluate_first: bool = False,
    ) -> None:
        self.config = config
        self.workers = workers
        self.snapshots = snapshots
        self.schedule = schedule
        self._reporter = reporter
        self._evaluate_first = evaluate_first
        self.model = workers.wrap(model, param_dtype=param_dtype)
        self.optimizer = build_optimizer(self.model.named_parameters(), config.optimizer)
        self.progress = Progress(num_steps=planned_steps(config, schedule))
        if resume_from is not None:
            self.progress = read_progress(resume_from)
            restore_optimizer(resume_from, self.model, self.optimizer)

    @abstractmethod
    def _run_step(self) -> bool:
        """One optimizer step; returns whether the run shall stop."""

    @abstractmethod
    def _evaluate_held_out(self) -> dict[str, float]:
        """Metrics on the held-out rows, the same on every worker; the model is in eval mode."""

    @abstractmethod
    def _is_better(self, metrics: Mapping[str, float], best: Mapping[str, float]) -> bool:
        """Whether an evaluation is better than the best so far, empty before the first."""

    @abstractmethod
    def _save_model(self, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
        """Write trained weights to a folder that does not exist yet; on the first worker."""

    def run(self) -> Progress:
        """Train to the end, or until asked to stop; return where the run stands.

        Raises:
            ConfigError: the loss or the gradient is not finite more often than is allowed.
        """
        progress = self.progress
        if progress.step == 0 and self._evaluate_first:
            # Training may make it worse, and then this is the best.
            self._run_evaluation()
            self._save(is_best=True)
        saved_at = progress.step
        while not progress.finished:
            stop = self._run_step()
            last = stop or progress.finished
            improved = False
            if progress.step % self.config.evaluation.every_steps == 0 or progress.finished:
                improved = self._run_evaluation()
            if last or improved or progress.step % self.config.checkpoints.every_steps == 0:
                self._save(is_best=improved)
                saved_at = progress.step
            if stop:
                break
        assert saved_at == progress.step
        return progress

    def _begin_step(self) -> float:
        """Set the model and the optimizer for a step; returns its learning rate."""
        self.model.train()
        settings, progress = self.config.optimizer, self.progress
        lr = learning_rate(progress.step, num_steps=progress.num_steps, settings=settings)
        set_learning_rate(
            self.optimizer, lr, marker_only=progress.step < settings.marker_only_steps
        )
        return lr

    def _end_step(
        self,
        clock: StageClock,
        *,
        lr: float,
        norm: float,
        num_tokens: int,
        metrics: Mapping[str, float],
    ) -> None:
        """Count a step and tell of it."""
        progress = self.progress
        progress.step += 1
        progress.tokens += num_tokens
        progress.trained_s += clock.total_s()
        self._tell(
            "step",
            epoch=self.schedule.epoch_of(progress.step),
            lr=lr,
            gradient_norm=norm,
            skipped_steps=progress.skipped_steps,
            pack_tokens=num_tokens,
            step_s=clock.total_s(),
            stages_s=clock.stages_s,
            metrics=metrics,
        )

    def _run_evaluation(self) -> bool:
        """Evaluate on the held-out rows; returns whether it is the best so far."""
        progress = self.progress
        started = time.monotonic()
        self.model.eval()
        with torch.no_grad():
            metrics = self._evaluate_held_out()
        improved = self._is_better(metrics, progress.best)
        progress.evaluation = {"step": progress.step, **metrics}
        if improved:
            progress.best = progress.evaluation
        seconds = time.monotonic() - started
        self._tell("evaluation", evaluation_s=seconds, improved=improved, metrics=metrics)
        return improved

    def _save(self, *, is_best: bool) -> None:
        started = time.monotonic()
        weights = self.workers.whole_weights(self.model)
        optimizer_state = optimizer_tensors(self.model, self.optimizer)
        if self.workers.is_first:
            path = self.snapshots.write(
                self.progress,
                save_model=partial(self._save_model, weights),
                optimizer_state=optimizer_state,
                is_best=is_best,
            )
            self._tell("checkpoint", path=str(path), checkpoint_s=time.monotonic() - started)
        self.workers.barrier()

    def _tell(self, kind: str, **values: Any) -> None:
        if self.workers.is_first:
            self._reporter.report({"kind": kind, "step": self.progress.step, **values})


def planned_steps(config: TrainConfig | TargetTrainConfig, schedule: Schedule) -> int:
    """Optimizer steps of the whole run."""
    steps = schedule.steps_in(config.epochs)
    return steps if config.max_steps is None else min(steps, config.max_steps)
