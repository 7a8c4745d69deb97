"""Finds a sweep's configuration, a file or in an earlier sweep's folder, and opens that folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from carryover.config import read_yaml
from carryover.errors import ConfigError
from sweeps.ledger import Ledger
from sweeps.settings import THROUGHPUT, TPOT, SweepConfig

if TYPE_CHECKING:
    from sweeps.training_settings import TrainingSweepConfig

SWEEPS = Path("runs/sweeps")
CONFIG_FILE = "sweep.yaml"
# figures of each measurement that stay in memory
KEPT = (THROUGHPUT, f"{THROUGHPUT}.low", f"{THROUGHPUT}.high", TPOT, "acceptance_length")


def load(path: Path, overrides: Iterable[str] = ()) -> SweepConfig | TrainingSweepConfig:
    """Read a configuration; one with the key `train` sweeps training.

    Raises:
        ConfigError: no such file, or it is not valid.
    """
    if "train" not in read_yaml(path):
        return SweepConfig.load(path, overrides=overrides)
    # brings torch
    from sweeps.training_settings import TrainingSweepConfig

    return TrainingSweepConfig.load(path, overrides=overrides)


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


def open_ledger(config: SweepConfig) -> Ledger:
    """What the sweep's folder holds.

    Raises:
        ConfigError: it holds another sweep.
    """
    config = config.absolute()
    return Ledger(config.out, config.identity(), kept=KEPT, part=("temperature", "concurrency"))
