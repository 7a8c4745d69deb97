"""Finds a sweep's configuration: a file, or the folder of a sweep that is to go on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from carryover.config import read_yaml
from carryover.errors import ConfigError
from sweeps.settings import SweepConfig
from sweeps.training_settings import TrainingSweepConfig

SWEEPS = Path("runs/sweeps")
CONFIG_FILE = "sweep.yaml"


def load(path: Path, overrides: Iterable[str] = ()) -> SweepConfig | TrainingSweepConfig:
    """Read a configuration; one with the key `train` sweeps training.

    Raises:
        ConfigError: no such file, or it is not valid.
    """
    kind = TrainingSweepConfig if "train" in read_yaml(path) else SweepConfig
    return kind.load(path, overrides=overrides)


def folder_of(name: str) -> Path:
    """Folder of an earlier sweep, by its path or its name in runs/sweeps.

    Raises:
        ConfigError: it holds no sweep.
    """
    for folder in (SWEEPS / name, Path(name)):
        if (folder / CONFIG_FILE).is_file():
            return folder
    known = sorted(file.parent.name for file in SWEEPS.glob(f"*/{CONFIG_FILE}"))
    raise ConfigError(
        f"no sweep {name!r}: neither {SWEEPS / name} nor {name} holds a {CONFIG_FILE}; "
        + (f"{SWEEPS} holds: {', '.join(known)}" if known else f"{SWEEPS} holds none")
    )
