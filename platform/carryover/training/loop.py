"""The training loop, in plain torch: steps, evaluation, checkpoints, resuming. No Ray here.

Every worker runs `TrainingLoop.run`. Which packs and which anchors a step uses is a function of
the seed, the step and the pack's place in the step, not of the worker: the loss curve is the same
on any number of workers (up to rounding), and a resumed one equals an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import nn

from carryover.errors import ConfigError
from carryover.training.batch import Batch
from carryover.training.checkpointed import CheckpointedLoop, Reporter
from carryover.training.config import TrainConfig, derived_seed
from carryover.training.evaluate import Acceptance, make_batch
from carryover.training.meters import StageClock, StepMeans
from carryover.training.packing import Corpus, Schedule
from carryover.training.snapshots import Progress, Snapshots
from carryover.training.states import StateSource
from carryover.training.step import StepResult
from carryover.training.workers import Workers


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


class TrainingLoop(CheckpointedLoop):
    """A drafter's run from its first or its last checkpoint to its end.

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
        super().__init__(
            config,
            model=drafter,
            param_dtype=getattr(torch, config.precision),
            schedule=Schedule(
                len(material.packs), packs_per_step=config.batch.packs_per_step, seed=config.seed
            ),
            snapshots=snapshots,
            workers=workers,
            reporter=reporter,
            resume_from=resume_from,
            evaluate_first=evaluate_first,
        )
        self.material = material
        self._step = step
        self._evaluate = evaluate
        self._save_drafter = save_drafter
        self._drafter = drafter

    def _run_step(self) -> bool:
        config, workers, progress = self.config, self.workers, self.progress
        clock = StageClock(workers.device)
        lr = self._begin_step()
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
        progress.skipped_steps += bool(broken)
        metrics = means.of(shared[3:])
        self._end_step(clock, lr=lr, norm=norm, num_tokens=num_tokens, metrics=metrics)
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

    def _evaluate_held_out(self) -> dict[str, float]:
        workers = self.workers
        mine = self.material.held_out[workers.rank :: workers.size]
        with workers.whole(self.model):
            counted = self._evaluate(self._drafter, mine)
        rounds = torch.tensor([counted.rounds], dtype=torch.float64)
        totals = workers.sum(torch.cat([rounds, counted.reached_B.double().cpu()]))
        return Acceptance(rounds=float(totals[0]), reached_B=totals[1:]).metrics()

    def _is_better(self, metrics: Mapping[str, float], best: Mapping[str, float]) -> bool:
        return metrics["acceptance_length"] > best.get("acceptance_length", 0.0)

    def _save_model(self, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
        self._save_drafter(weights, self.progress, folder)
