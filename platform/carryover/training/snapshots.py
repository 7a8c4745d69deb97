"""Checkpoints of a training run: the drafter, the optimizer, and where the run stands.

    RUN/
      initial/                   the drafter before the first step
      checkpoints/step-00000200/ a drafter that vLLM loads, and beside its weights
        training/optimizer.safetensors, training/state.json
      last, best                 links to checkpoints

No pickle is written or read. A checkpoint appears by renaming, so a killed run leaves whole ones.
The learning rate, the data order and every random choice are functions of the seed and the step:
the step is all there is to restore of them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from carryover.durable import sync
from carryover.errors import CheckpointError

FORMAT = 1
_NAME = re.compile(r"step-(\d{8})")
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass
class Progress:
    """Where a run stands; written with every checkpoint.

    Attributes:
        step: optimizer steps done, skipped ones included.
        num_steps: steps of the whole run.
        skipped_steps: of them without an update, for a non-finite loss or gradient.
        trained_s: seconds spent so far, over all starts of the run.
        tokens: tokens of the packs seen.
        best: the best evaluation so far, with its step.
        evaluation: the latest evaluation.
    """

    step: int = 0
    num_steps: int = 0
    skipped_steps: int = 0
    trained_s: float = 0.0
    tokens: int = 0
    best: dict[str, float] = field(default_factory=dict)
    evaluation: dict[str, float] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return self.step >= self.num_steps > 0


class Snapshots:
    """The checkpoints of one run.

    Args:
        run_folder: see the module.
        keep: how many of the newest checkpoints stay; the best one stays besides.
    """

    def __init__(self, run_folder: str | Path, *, keep: int) -> None:
        self.run_folder = Path(run_folder)
        self.folder = self.run_folder / "checkpoints"
        self.keep = keep

    def steps(self) -> list[int]:
        """Steps of the checkpoints on disk, ascending."""
        if not self.folder.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def path(self, step: int) -> Path:
        """Folder of the checkpoint of this step."""
        return self.folder / f"step-{step:08d}"

    def latest(self) -> Path | None:
        """The newest checkpoint."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def write(
        self,
        progress: Progress,
        *,
        save_model: Callable[[Path], None],
        optimizer_state: dict[str, torch.Tensor],
        is_best: bool,
    ) -> Path:
        """Write a checkpoint, point `last` (and `best`) to it, and delete those beyond `keep`.

        Args:
            progress: written as it is.
            save_model: writes what is trained to a folder that does not exist yet.
            optimizer_state: from `optimizer_tensors`.
            is_best: whether `best` shall point to it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(".writing-*"):
            shutil.rmtree(leftover)
        final = self.path(progress.step)
        if not final.exists():
            staged = self.folder / f".writing-{final.name}"
            save_model(staged)
            training = staged / "training"
            training.mkdir()
            save_file(optimizer_state, training / "optimizer.safetensors")
            state = {"format": FORMAT, **asdict(progress)}
            (training / "state.json").write_text(json.dumps(state, indent=2) + "\n")
            for file in (*staged.iterdir(), *training.iterdir()):
                if file.is_file():
                    sync(file)
            os.replace(staged, final)
            sync(self.folder)
        _point(self.run_folder / "last", final)
        if is_best:
            _point(self.run_folder / "best", final)
        self._delete_old()
        return final

    def _delete_old(self) -> None:
        kept = {link.resolve() for link in (self.run_folder / "last", self.run_folder / "best")}
        for step in self.steps()[: -self.keep]:
            if self.path(step).resolve() not in kept:
                shutil.rmtree(self.path(step))


def read_progress(checkpoint: Path) -> Progress:
    """Where the run stood when this checkpoint was written.

    Raises:
        CheckpointError: not a checkpoint of a training run, or one of another format.
    """
    path = checkpoint / "training" / "state.json"
    try:
        state: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint} cannot be resumed from: {error}") from None
    if state.pop("format", None) != FORMAT:
        raise CheckpointError(
            f"{path} is of another format than {FORMAT}; it was written by another version"
        )
    return Progress(**state)


def optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """The optimizer's state by parameter name, whole, on the CPU; every worker must call this.

    Only worker 0 gets the tensors if the model is sharded.
    """
    whole = get_optimizer_state_dict(model, optimizer, options=_WHOLE)
    return {
        f"{name}/{key}": torch.as_tensor(value).contiguous()
        for name, values in whole.get("state", {}).items()
        for key, value in values.items()
    }


def restore_optimizer(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put the optimizer into the state of this checkpoint; every worker must call this.

    Settings (learning rate, betas, ...) stay those of the optimizer given.

    Raises:
        CheckpointError: the file is missing or damaged, or belongs to another drafter.
    """
    path = checkpoint / "training" / "optimizer.safetensors"
    try:
        saved = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not saved:
        return  # written before the first step
    # Local shards: their structure, which every worker has.
    current = get_optimizer_state_dict(model, optimizer)
    expected = {f"{name}/{key}" for name, values in current["state"].items() for key in values}
    if saved.keys() != expected:
        raise CheckpointError(f"{path} belongs to a drafter with other parameters")
    state = {
        name: {key: saved[f"{name}/{key}"] for key in values}
        for name, values in current["state"].items()
    }
    set_optimizer_state_dict(
        model,
        optimizer,
        {**current, "state": state},
        options=StateDictOptions(full_state_dict=True),
    )


def _point(link: Path, target: Path) -> None:
    """Make `link` a relative link to `target`, in one step."""
    temporary = link.with_name(f".{link.name}-new")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(os.path.relpath(target, link.parent))
    os.replace(temporary, link)
