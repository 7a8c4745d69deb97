"""The folder of a training run: made once, continued under the same settings, never mixed up."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carryover.durable import write_whole
from carryover.errors import ConfigError
from carryover.training.config import changed_settings
from carryover.training.snapshots import Progress, Snapshots, read_progress


@dataclass(frozen=True)
class Outcome:
    """What a training run came to.

    Attributes:
        run_folder: holds `best` and `last`, which are drafter checkpoints or targets.
        progress: where the run stands.
        reused: whether it had been finished before.
    """

    run_folder: Path
    progress: Progress
    reused: bool

    @property
    def best(self) -> Path:
        """The checkpoint with the best held-out evaluation."""
        return self.run_folder / "best"

    @property
    def last(self) -> Path:
        """The newest checkpoint."""
        return self.run_folder / "last"


class RunFolder:
    """A run's folder, with `run.json` (what the run is) and `config.yaml` (for the reader).

    Args:
        path: absolute path.
        keep: how many of the newest checkpoints stay.
    """

    def __init__(self, path: Path, *, keep: int) -> None:
        self.path = path
        self.snapshots = Snapshots(path, keep=keep)
        self._record_path = path / "run.json"

    @property
    def initial(self) -> Path:
        """The drafter before the first step."""
        return self.path / "initial"

    @property
    def exists(self) -> bool:
        return self._record_path.exists()

    def record(self) -> dict[str, Any]:
        """What `run.json` holds."""
        return json.loads(self._record_path.read_text())

    def mlflow_run(self, store: str) -> str | None:
        """The MLflow run to continue, if the run was recorded in the store of this URI."""
        record = self.record() if self.exists else {}
        return record.get("mlflow_run_id") if record.get("mlflow_uri") == store else None

    def update(self, values: dict[str, Any]) -> None:
        """Change `run.json`, in one step."""
        record = {**(self.record() if self.exists else {}), **values}
        write_whole(self._record_path, json.dumps(record, indent=2) + "\n")

    def write_config(self, text: str) -> None:
        """Keep the settings of the latest start, for the reader."""
        (self.path / "config.yaml").write_text(text)

    def progress(self) -> Progress | None:
        """Where the run stands; None before its first checkpoint."""
        latest = self.snapshots.latest()
        return read_progress(latest) if latest else None

    def create(self, identity: dict[str, Any], make_initial: Callable[[Path], None]) -> None:
        """Make a new run, whole or not at all.

        Args:
            identity: JSON-able; what `require_same` compares later.
            make_initial: writes the drafter before the first step to a folder.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        make_initial(self.initial)
        self.update({"format": 1, "identity": identity})

    def require_same(self, identity: dict[str, Any]) -> None:
        """Check that the run is continued as what it began.

        Raises:
            ConfigError: lists the settings, the data or the target that changed.
        """
        # Through JSON, so that tuples and lists compare equal.
        now = json.loads(json.dumps(identity))
        lines = changed_settings(self.record()["identity"], now)
        if lines:
            raise ConfigError(
                f"{self.path} holds a run with other settings:\n  "
                + "\n  ".join(lines)
                + "\nchoose another --name, undo the changes, or start again with --restart"
            )

    def delete(self) -> None:
        """Remove the run and its checkpoints.

        Raises:
            ConfigError: the folder is not empty, and holds no run.
        """
        if not self.path.exists():
            return
        if not self.exists and any(self.path.iterdir()) and not self.initial.exists():
            raise ConfigError(f"{self.path} holds no training run, so it is not deleted")
        shutil.rmtree(self.path)
