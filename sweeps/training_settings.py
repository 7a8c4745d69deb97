"""What a sweep of training settings covers; no Ray."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from carryover.config import Config
from carryover.drafters.shipped import DrafterFolder, drafter_folder
from carryover.errors import ConfigError
from carryover.training.config import TrainConfig
from sweeps.settings import SearchSettings

ACCEPTANCE = "acceptance_length"
FINAL = "final"


class TrainingEarlyStop(Config):
    """Asynchronous successive halving over steps: of those that came so far, the best go on."""

    after_steps: int = Field(
        default=100, ge=1,
        description="the first decision, at the next evaluation; then at multiples by the factor",
    )  # fmt: skip
    reduction_factor: float = Field(default=3, gt=1, description="keep the best 1/factor")


class TrainingResources(Config):
    """Where trials run; what each takes is in `train.resources`."""

    address: str | None = Field(
        default=None, description="Ray cluster, such as auto; null starts one on this machine"
    )
    max_concurrent: int | None = Field(
        default=None, ge=1, description="trainings at once; null: as many as the cluster holds"
    )
    max_restarts: int = Field(
        default=2, ge=0, description="how often a training whose process or node died goes on"
    )


class TrainingSweepConfig(Config):
    """A sweep: one training for each choice of values."""

    train: TrainConfig = Field(description="as for `platform train`; what is not swept")
    kind: Literal["baseline", "carryover", "control"] = "baseline"
    start_from: DrafterFolder | None = Field(
        default=None, description="checkpoint that carryover and control training begin at"
    )
    values: dict[str, list[bool | int | float | str | None]] = Field(
        min_length=1, description="dotted keys of `train` to the values to try"
    )
    search: SearchSettings = SearchSettings()
    early_stop: TrainingEarlyStop | None = Field(default=None, description="null trains all whole")
    resources: TrainingResources = TrainingResources()
    out: Path = Field(description="folder for the results; the same one goes on where it stopped")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.start_from is None) != (self.kind == "baseline"):
            raise ValueError("carryover and control training need start_from, baselines have none")
        for key, values in self.values.items():
            if not values:
                raise ValueError(f"values.{key} names no value to try")
            if len({repr(value) for value in values}) != len(values):
                raise ValueError(f"values.{key} repeats a value: {values}")
            for value in values:
                train_with(self.train, {key: value})
        names = [setting.name for setting in trainings_of(self)]
        if len(set(names)) != len(names):
            raise ValueError("two trainings would have one name; change a value")
        return self

    def absolute(self) -> Self:
        """The same with absolute paths: trials run in folders of their own."""
        target = Path(self.train.target).expanduser()
        cache = Path(self.train.hidden_states.cache_folder).expanduser()
        hidden = self.train.hidden_states.model_copy(update={"cache_folder": str(cache.absolute())})
        update: dict[str, Any] = {"hidden_states": hidden}
        if target.is_dir():
            update["target"] = str(target.absolute())
        if self.train.data is not None:
            update["data"] = str(Path(self.train.data).expanduser().absolute())
        start = self.start_from
        return self.model_copy(
            update={
                "train": self.train.model_copy(update=update),
                "start_from": None if start is None else drafter_folder(start).absolute(),
                "out": self.out.expanduser().absolute(),
            }
        )

    def identity(self) -> dict[str, Any]:
        """What decides a training beside its values; lists may grow and all else may change."""
        swept = self.values.keys()
        settings = self.train.model_dump(mode="json")
        for free in ("name", "resources", "checkpoints", "runs_folder", "experiment"):
            settings.pop(free)
        for key in swept:
            node = settings
            *sections, name = key.split(".")
            for section in sections:
                node = node[section]
            node.pop(name)
        start = None if self.start_from is None else str(self.start_from)
        return {"train": settings, "kind": self.kind, "start_from": start, "swept": sorted(swept)}


@dataclass(frozen=True)
class Training:
    """One training; `values` holds (key of `train`, value) pairs."""

    values: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """Name of the trial, of its run and of its folder."""
        parts = [
            re.sub(r"[^A-Za-z0-9.]+", "_", f"{key.rpartition('.')[2]}_{value}").strip("_")
            for key, value in self.values
        ]
        return "-".join(parts)

    @property
    def params(self) -> dict[str, Any]:
        """As parameters of a record, the same keys for every training of a sweep."""
        return {"setting": self.name, **dict(self.values)}


def trainings_of(config: TrainingSweepConfig) -> list[Training]:
    """Every training of the full grid."""
    values = [[(key, value) for value in each] for key, each in sorted(config.values.items())]
    return [Training(chosen) for chosen in product(*values)]


def train_with(train: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    """Training settings with some dotted keys changed.

    Raises:
        ValueError: an unknown key, or a value that does not fit.
    """
    changed = train.model_dump(mode="json")
    for key, value in values.items():
        node: Any = changed
        *sections, name = key.split(".")
        for section in sections:
            node = node.get(section) if isinstance(node, dict) else None
        if not isinstance(node, dict) or name not in node:
            raise ValueError(f"values.{key}: train has no such key; for example optimizer.lr")
        node[name] = value
    try:
        return TrainConfig.parse(changed, source=f"train with {dict(values)}")
    except ConfigError as error:
        raise ValueError(str(error)) from None
