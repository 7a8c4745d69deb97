"""The training loop, in plain torch: steps, evaluation, checkpoints, resuming. No Ray here.

Every worker runs `TrainingLoop.run`. Which packs and which anchors a step uses is a function of
the seed, the step and the pack's place in the step, not of the worker: the loss curve is the same
on any number of workers (up to rounding), and a resumed one equals an uninterrupted one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from carryover.errors import ConfigError
from carryover.training.batch import Batch
from carryover.training.config import TrainConfig, derived_seed
from carryover.training.evaluate import Acceptance, make_batch
from carryover.training.meters import StageClock, StepMeans
from carryover.training.optimizer import build_optimizer, learning_rate, set_learning_rate
from carryover.training.packing import Corpus, Schedule
from carryover.training.snapshots import (
    Progress,
    Snapshots,
    optimizer_tensors,
    read_progress,
    restore_optimizer,
)
from carryover.training.states import StateSource
from carryover.training.step import StepResult
from carryover.training.workers import Workers


class Reporter(Protocol):
    """Where the first worker says what happens; all of it may be shown, recorded or ignored."""

    def report(self, event: Mapping[str, Any]) -> None:
        """Take a record with a `kind`: `step`, `evaluation` or `checkpoint`."""
        ...

    def stop_requested(self) -> bool:
        """Whether the run shall save a checkpoint and end."""
        ...


class StepFunction(Protocol):
    """One micro-batch: `baseline_step` and its like, with settings bound."""

    def __call__(
        self, drafter: nn.Module, batch: Batch, *, generator: torch.Generator
    ) -> StepResult:
        """Return the loss with gradient, and metrics."""
        ...


@dataclass(frozen=True)
class Material:
    """What the loop works on.

    Attributes:
        corpus: the rows' tokens.
        packs: rows of each training pack.
        held_out: rows of each evaluation pack.
        source: the target's states.
    """

    corpus: Corpus
    packs: Sequence[np.ndarray]
    held_out: Sequence[np.ndarray]
    source: StateSource


class TrainingLoop:
    """A run from its first or its last checkpoint to its end.

    Args:
        config: the run's settings.
        material: data and target states.
        drafter: initial weights, or those of `resume_from`; on this worker's device.
        step: computes loss and metrics of one pack.
        evaluate: counts accepted proposals over packs of held-out rows.
        save_drafter: writes the trained weights given, as a drafter, to a folder that does not
            exist yet; called on the first worker.
        snapshots: the run's checkpoints.
        workers: this process among those that train.
        reporter: used on the first worker.
        resume_from: a checkpoint of this run whose weights `drafter` has.
        evaluate_first: whether to evaluate before the first step.

    Raises:
        CheckpointError: the checkpoint cannot be resumed from.
    """

    def __init__(
        self,
        config: TrainConfig,
        material: Material,
        *,
        drafter: nn.Module,
        step: StepFunction,
        evaluate: Callable[[nn.Module, Sequence[np.ndarray]], Acceptance],
        save_drafter: Callable[[Mapping[str, torch.Tensor], Progress, Path], None],
        snapshots: Snapshots,
        workers: Workers,
        reporter: Reporter,
        resume_from: Path | None = None,
        evaluate_first: bool = False,
    ) -> None:
        self.config = config
        self.material = material
        self.workers = workers
        self.snapshots = snapshots
        self._step = step
        self._evaluate = evaluate
        self._save_drafter = save_drafter
        self._reporter = reporter
        self._evaluate_first = evaluate_first
        self._drafter = drafter
        self.model = workers.wrap(drafter, param_dtype=getattr(torch, config.precision))
        self.optimizer = build_optimizer(self.model.named_parameters(), config.optimizer)
        self.schedule = Schedule(
            len(material.packs), packs_per_step=config.batch.packs_per_step, seed=config.seed
        )
        self.progress = Progress(num_steps=planned_steps(config, self.schedule))
        if resume_from is not None:
            self.progress = read_progress(resume_from)
            restore_optimizer(resume_from, self.model, self.optimizer)

    def run(self) -> Progress:
        """Train to the end, or until asked to stop; return where the run stands.

        Raises:
            ConfigError: more steps than allowed had a non-finite loss or gradient.
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

    def _run_step(self) -> bool:
        """One optimizer step; returns whether the run shall stop."""
        config, workers, progress = self.config, self.workers, self.progress
        clock = StageClock(workers.device)
        self.model.train()
        lr = learning_rate(progress.step, num_steps=progress.num_steps, settings=config.optimizer)
        set_learning_rate(self.optimizer, lr)
        packs = self.schedule.packs_of(progress.step)
        mine = range(workers.rank, len(packs), workers.size)
        means = StepMeans(self._drafter.proposal_length)
        num_tokens, finite = 0, True
        for place in mine:
            with clock.stage("states"):
                rows = self.material.packs[packs[place]]
                batch = make_batch(
                    self.material.corpus, rows, self.material.source, device=workers.device
                )
            num_tokens += len(batch)
            seed = derived_seed("anchors", config.seed, progress.step, place)
            with workers.accumulating(self.model, more=place != mine[-1]):
                with clock.stage("forward"):
                    generator = torch.Generator().manual_seed(seed)
                    result = self._step(self.model, batch, generator=generator)
                with clock.stage("backward"):
                    (result.loss / len(mine)).backward()
            finite = finite and bool(result.loss.isfinite())
            means.add(result.metrics)
        with clock.stage("optimizer"):
            norm = workers.clip_gradients(self.model, config.optimizer.clip_norm)
            stop = workers.is_first and self._reporter.stop_requested()
            broken = not finite or not np.isfinite(norm)
            shared = torch.tensor([broken, stop, num_tokens], dtype=torch.float64)
            shared = workers.sum(torch.cat([shared, means.totals()]))
            broken, stop, num_tokens = (int(value) for value in shared[:3])
            if not broken:
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        progress.skipped_steps += bool(broken)
        progress.tokens += num_tokens
        progress.trained_s += clock.total_s()
        if workers.is_first:
            self._reporter.report(
                {
                    "kind": "step",
                    "step": progress.step,
                    "epoch": self.schedule.epoch_of(progress.step),
                    "lr": lr,
                    "gradient_norm": norm,
                    "skipped_steps": progress.skipped_steps,
                    "pack_tokens": num_tokens,
                    "step_s": clock.total_s(),
                    "stages_s": clock.stages_s,
                    "metrics": means.of(shared[3:]),
                }
            )
        if progress.skipped_steps > config.optimizer.max_skipped_steps:
            raise ConfigError(self._diverged())
        return bool(stop)

    def _diverged(self) -> str:
        latest = self.snapshots.latest()
        kept = f"the last checkpoint is {latest}" if latest else "no checkpoint was written yet"
        return (
            f"{self.progress.skipped_steps} of {self.progress.step} steps had a non-finite loss or "
            "gradient, and optimizer.max_skipped_steps allows "
            f"{self.config.optimizer.max_skipped_steps}; {kept}. Lower optimizer.lr or raise "
            "optimizer.warmup_ratio"
        )

    def _run_evaluation(self) -> bool:
        """Evaluate on the held-out rows; returns whether it is the best so far."""
        progress, workers = self.progress, self.workers
        started = time.monotonic()
        self.model.eval()
        mine = self.material.held_out[workers.rank :: workers.size]
        with workers.whole(self.model), torch.no_grad():
            counted = self._evaluate(self._drafter, mine)
        rounds = torch.tensor([counted.rounds], dtype=torch.float64)
        totals = workers.sum(torch.cat([rounds, counted.reached_B.double().cpu()]))
        metrics = Acceptance(rounds=float(totals[0]), reached_B=totals[1:]).metrics()
        best = progress.best.get("acceptance_length", 0.0)
        improved = metrics["acceptance_length"] > best
        progress.evaluation = {"step": progress.step, **metrics}
        if improved:
            progress.best = progress.evaluation
        if workers.is_first:
            self._reporter.report(
                {
                    "kind": "evaluation",
                    "step": progress.step,
                    "evaluation_s": time.monotonic() - started,
                    "improved": improved,
                    "metrics": metrics,
                }
            )
        return improved

    def _save(self, *, is_best: bool) -> None:
        started = time.monotonic()
        weights = self.workers.whole_weights(self.model)
        optimizer_state = optimizer_tensors(self.model, self.optimizer)
        if self.workers.is_first:
            path = self.snapshots.write(
                self.progress,
                save_drafter=partial(self._save_drafter, weights, self.progress),
                optimizer_state=optimizer_state,
                is_best=is_best,
            )
            self._reporter.report(
                {
                    "kind": "checkpoint",
                    "step": self.progress.step,
                    "path": str(path),
                    "checkpoint_s": time.monotonic() - started,
                }
            )
        self.workers.barrier()


def planned_steps(config: TrainConfig, schedule: Schedule) -> int:
    """Optimizer steps of the whole run."""
    steps = schedule.steps_in(config.epochs)
    return steps if config.max_steps is None else min(steps, config.max_steps)
