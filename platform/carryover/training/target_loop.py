"""Training of a small target from scratch, in plain torch: next-token cross-entropy on blocks.

As in `carryover.training.loop`, which blocks a step sees is a function of the seed and the step,
and a checkpoint holds no pickle: a resumed run equals an uninterrupted one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from carryover.errors import ConfigError
from carryover.training.loop import Reporter
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
from carryover.training.target_config import TargetTrainConfig
from carryover.training.workers import Workers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Logits are the largest tensors: 4,096 tokens times a vocabulary of 4,096 in float32 are 64 MiB.
_TOKENS_AT_A_TIME = 4096


def planned_target_steps(config: TargetTrainConfig, num_blocks: int) -> int:
    """Optimizer steps of the whole run."""
    steps = _schedule(config, num_blocks).steps_in(config.epochs)
    return steps if config.max_steps is None else min(steps, config.max_steps)


def _schedule(config: TargetTrainConfig, num_blocks: int) -> Schedule:
    return Schedule(num_blocks, packs_per_step=config.blocks_per_step, seed=config.seed)


class TargetLoop:
    """A run from its first or its last checkpoint to its end.

    Args:
        config: the run's settings, with a resolved precision.
        model: initial weights, or those of `resume_from`.
        tokenizer: saved beside the weights.
        blocks: [N, block_length] token ids to train on.
        held_out: the same to evaluate on.
        snapshots: the run's checkpoints.
        workers: this process among those that train.
        reporter: used on the first worker.
        resume_from: a checkpoint of this run whose weights `model` has.
    """

    def __init__(
        self,
        config: TargetTrainConfig,
        *,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        blocks: np.ndarray,
        held_out: np.ndarray,
        snapshots: Snapshots,
        workers: Workers,
        reporter: Reporter,
        resume_from: Path | None = None,
    ) -> None:
        self.config = config
        self.workers = workers
        self.snapshots = snapshots
        self._blocks = blocks
        self._held_out = held_out
        self._reporter = reporter
        self._tokenizer = tokenizer
        self._inner = model.to(workers.device)
        self.model = workers.wrap(self._inner, param_dtype=torch.float32)
        self.optimizer = build_optimizer(self.model.named_parameters(), config.optimizer)
        self.schedule = _schedule(config, len(blocks))
        self.progress = Progress(num_steps=planned_target_steps(config, len(blocks)))
        if resume_from is not None:
            self.progress = read_progress(resume_from)
            restore_optimizer(resume_from, self.model, self.optimizer)

    def run(self) -> Progress:
        """Train to the end, or until asked to stop; return where the run stands.

        Raises:
            ConfigError: the loss is not finite.
        """
        progress, config = self.progress, self.config
        while not progress.finished:
            stop = self._run_step()
            improved = False
            if progress.step % config.evaluation.every_steps == 0 or progress.finished:
                improved = self._run_evaluation()
            every = config.checkpoints.every_steps
            if stop or progress.finished or improved or progress.step % every == 0:
                self._save(is_best=improved)
            if stop:
                break
        return progress

    def _run_step(self) -> bool:
        config, workers, progress = self.config, self.workers, self.progress
        clock = StageClock(workers.device)
        self.model.train()
        lr = learning_rate(progress.step, num_steps=progress.num_steps, settings=config.optimizer)
        set_learning_rate(self.optimizer, lr)
        mine = self.schedule.packs_of(progress.step)[workers.rank :: workers.size]
        parts = self._parts(self._blocks[mine])
        total = torch.zeros(())
        for number, part in enumerate(parts):
            with workers.accumulating(self.model, more=number + 1 < len(parts)):
                with clock.stage("forward"):
                    loss = self._loss(self.model, part) * (len(part) / len(mine))
                with clock.stage("backward"):
                    loss.backward()
            total += loss.detach().cpu()
        with clock.stage("optimizer"):
            norm = workers.clip_gradients(self.model, config.optimizer.clip_norm)
            stop = workers.is_first and self._reporter.stop_requested()
            shared = workers.sum(torch.tensor([float(total), stop], dtype=torch.float64))
            loss = float(shared[0]) / workers.size
            if not np.isfinite(loss):
                raise ConfigError(
                    f"the loss is {loss} after {progress.step} steps; lower optimizer.lr or raise "
                    "optimizer.warmup_ratio"
                )
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        tokens = config.blocks_per_step * config.block_length
        progress.step += 1
        progress.tokens += tokens
        progress.trained_s += clock.total_s()
        if workers.is_first:
            self._reporter.report(
                {
                    "kind": "step",
                    "step": progress.step,
                    "epoch": self.schedule.epoch_of(progress.step),
                    "lr": lr,
                    "gradient_norm": norm,
                    "skipped_steps": 0,
                    "pack_tokens": tokens,
                    "step_s": clock.total_s(),
                    "stages_s": clock.stages_s,
                    "metrics": {"loss": loss},
                }
            )
        return bool(shared[1])

    def _parts(self, blocks: np.ndarray) -> list[torch.Tensor]:
        """Micro-batches of equal length."""
        ids = torch.from_numpy(blocks.astype(np.int64)).to(self.workers.device)
        return list(ids.split(max(1, _TOKENS_AT_A_TIME // self.config.block_length)))

    def _loss(self, model: nn.Module, ids_BT: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of the tokens after the first of each block."""
        device = self.workers.device.type
        with torch.autocast(device, torch.bfloat16, enabled=self.config.precision == "bfloat16"):
            return model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss

    def _run_evaluation(self) -> bool:
        """Held-out loss on every worker alike; returns whether it is the best so far."""
        progress = self.progress
        started = time.monotonic()
        self.model.eval()
        with torch.no_grad():
            parts = self._parts(self._held_out)
            losses = [float(self._loss(self._inner, part)) * len(part) for part in parts]
        loss = sum(losses) / len(self._held_out)
        metrics = {"loss": loss, "perplexity": float(np.exp(loss))}
        improved = loss < progress.best.get("loss", float("inf"))
        progress.evaluation = {"step": progress.step, **metrics}
        if improved:
            progress.best = progress.evaluation
        if self.workers.is_first:
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
        state = optimizer_tensors(self.model, self.optimizer)
        if self.workers.is_first:
            path = self.snapshots.write(
                self.progress,
                save_drafter=partial(self._save_model, weights),
                optimizer_state=state,
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

    def _save_model(self, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
        self._inner.save_pretrained(folder, state_dict=dict(weights))
        self._tokenizer.save_pretrained(folder)
