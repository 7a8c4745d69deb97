"""Training of a small target from scratch, in plain torch: next-token cross-entropy on blocks.

Which blocks a step sees is a function of the seed and the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from carryover.errors import ConfigError
from carryover.training.checkpointed import CheckpointedLoop, Reporter
from carryover.training.meters import StageClock
from carryover.training.packing import Schedule
from carryover.training.snapshots import Snapshots
from carryover.training.target_config import TargetTrainConfig
from carryover.training.workers import Workers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Logits are the largest tensors: 4,096 tokens times a vocabulary of 4,096 in float32 are 64 MiB.
_TOKENS_AT_A_TIME = 4096


def block_schedule(config: TargetTrainConfig, num_blocks: int) -> Schedule:
    """Which blocks each step takes."""
    return Schedule(num_blocks, packs_per_step=config.blocks_per_step, seed=config.seed)


class TargetLoop(CheckpointedLoop):
    """A target's run from its first or its last checkpoint to its end.

    Args:
        config: the run's settings, with a resolved precision.
        model: initial weights, or those of `resume_from`; on this worker's device.
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
        super().__init__(
            config,
            model=model,
            param_dtype=torch.float32,
            schedule=block_schedule(config, len(blocks)),
            snapshots=snapshots,
            workers=workers,
            reporter=reporter,
            resume_from=resume_from,
        )
        self._blocks = blocks
        self._held_out = held_out
        self._inner = model
        self._tokenizer = tokenizer

    def _run_step(self) -> bool:
        config, workers, progress = self.config, self.workers, self.progress
        clock = StageClock(workers.device)
        lr = self._begin_step()
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
        self._end_step(clock, lr=lr, norm=norm, num_tokens=tokens, metrics={"loss": loss})
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

    def _evaluate_held_out(self) -> dict[str, float]:
        parts = self._parts(self._held_out)
        losses = [float(self._loss(self._inner, part)) * len(part) for part in parts]
        loss = sum(losses) / len(self._held_out)
        return {"loss": loss, "perplexity": float(np.exp(loss))}

    def _is_better(self, metrics: Mapping[str, float], best: Mapping[str, float]) -> bool:
        return metrics["loss"] < best.get("loss", float("inf"))

    def _save_model(self, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
        self._inner.save_pretrained(folder, state_dict=dict(weights))
        self._tokenizer.save_pretrained(folder)
