"""What a sweep of decoding settings covers; no Ray.

An engine setting (an arm, its proposal length, engine values) needs an engine of its own;
temperature and concurrency do not, and are measured on the live engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from carryover.config import Config
from carryover.drafters.shipped import drafter_folder
from carryover.engine import EngineConfig
from carryover.errors import ConfigError
from carryover.serving.config import Arm, Name, ServeConfig

THROUGHPUT = "output_tokens_per_s"
TPOT = "tpot_ms.p95"
MEASURE = "sweeps.measuring:serve_and_bench"


class SearchSettings(Config):
    """Which of all engine settings are tried."""

    kind: Literal["grid", "random", "optuna"] = Field(
        default="grid",
        description="grid: all. random: a sample. optuna: where earlier ones were good (TPE).",
    )
    num_settings: int | None = Field(
        default=None, ge=1, description="settings with a drafter to try; null, for a grid, all"
    )
    seed: int = Field(default=0, description="of the sample, or of Optuna's sampler")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind != "grid" and self.num_settings is None:
            raise ValueError(f"kind {self.kind} needs num_settings: how many settings to try")
        if self.kind == "grid" and self.num_settings is not None:
            raise ValueError("a grid tries all settings; leave num_settings out, or take random")
        return self


class Objective(Config):
    """What the best setting is."""

    max_tpot_p95_ms: float | None = Field(
        default=None, gt=0,
        description="95th percentile of TPOT that a load may have; settings above it lose there",
    )  # fmt: skip
    pareto: bool = Field(
        default=False,
        description="Optuna looks for the whole front of throughput and TPOT, not one optimum",
    )


class EarlyStop(Config):
    """Asynchronous successive halving over the loads of a setting."""

    after_loads: int = Field(
        default=2, ge=1, description="the first decision; then at each multiple by the factor"
    )
    reduction_factor: float = Field(default=3, gt=1, description="keep the best 1/factor")
    margin: float = Field(
        default=0.1, ge=0, lt=1,
        description="never stop a setting that is within this share of the best at any load",
    )  # fmt: skip


class TrialResources(Config):
    """What one trial reserves in Ray, and where."""

    address: str | None = Field(
        default=None, description="Ray cluster, such as auto; null starts one on this machine"
    )
    cpus: float | None = Field(
        default=None, gt=0,
        description="of a trial; null: on CPU a whole node, so that no two engines share one; "
        "beside a GPU 4",
    )  # fmt: skip
    max_concurrent: int | None = Field(
        default=None, ge=1, description="trials at once; null: as many as the cluster holds"
    )
    max_restarts: int = Field(
        default=2, ge=0, description="how often a setting whose process or node died is tried again"
    )


class SweepConfig(Config):
    """A sweep: engine settings times loads."""

    serve: ServeConfig = Field(description="as for `platform serve`; its arms are what is swept")
    proposal_lengths: list[int] | None = Field(
        default=None,
        min_length=1,
        description="of every arm with a drafter; null: what each arm says, or its checkpoint",
    )
    engine: dict[str, list[bool | int | float | str | None]] = Field(
        default={},
        description="keys of serve.engine (extra.NAME for vLLM's own) to the values to try",
    )
    temperatures: list[float] = Field(default=[0.0], min_length=1)
    concurrencies: list[int] = Field(default=[1, 4, 16], min_length=1)
    baseline: Name | None = Field(
        default=None,
        description="arm that others with a drafter are compared with at equal length; null: the "
        "first of several with one",
    )
    prompts: str = Field(description="JSON lines, Parquet, folder, or Hugging Face data set")
    num_prompts: int | None = Field(default=None, ge=1, description="null takes all")
    max_tokens: int = Field(default=128, ge=1)
    seed: int = Field(default=0, description="of the choice and order of prompts")
    search: SearchSettings = SearchSettings()
    objective: Objective = Objective()
    early_stop: EarlyStop | None = Field(default=None, description="null measures every load")
    resources: TrialResources = TrialResources()
    measure: str = Field(
        default=MEASURE,
        description="module:function that measures a setting at its loads; see sweeps.measuring",
    )
    out: Path = Field(description="folder for the results; the same one goes on where it stopped")

    @model_validator(mode="after")
    def _check(self) -> Self:
        named = {"temperatures": self.temperatures, "concurrencies": self.concurrencies}
        named |= {"proposal_lengths": self.proposal_lengths or []}
        named |= {f"engine.{key}": values for key, values in self.engine.items()}
        for name, values in named.items():
            if len({repr(value) for value in values}) != len(values):
                raise ValueError(f"{name} repeats a value: {values}")
        if any(value < 1 for value in [*(self.proposal_lengths or []), *self.concurrencies]):
            raise ValueError("proposal_lengths and concurrencies start at 1")
        if any(value < 0 for value in self.temperatures):
            raise ValueError("temperatures start at 0")
        for key, values in self.engine.items():
            if not values:
                raise ValueError(f"engine.{key} names no value to try")
            for value in values:
                engine_with(self.serve.engine, {key: value})
        drafting = [arm.name for arm in self.serve.arms if arm.drafter is not None]
        if self.baseline is not None and self.baseline not in drafting:
            raise ValueError(
                f"baseline {self.baseline!r} is no arm with a drafter; those are: "
                f"{', '.join(drafting) or 'none'}"
            )
        if self.search.kind != "grid" and not drafting:
            raise ValueError(f"search {self.search.kind} needs an arm with a drafter")
        names = [setting.name for setting in settings_of(self)]
        if len(set(names)) != len(names):
            raise ValueError("two settings would have one name; rename an arm or change a value")
        return self

    def absolute(self) -> Self:
        """The same with absolute paths: trials run in folders of their own."""
        arms = [
            arm
            if arm.drafter is None
            else arm.model_copy(update={"drafter": drafter_folder(arm.drafter).absolute()})
            for arm in self.serve.arms
        ]
        target, prompts = Path(self.serve.target).expanduser(), Path(self.prompts).expanduser()
        found = str(target.absolute()) if target.is_dir() else self.serve.target
        return self.model_copy(
            update={
                "serve": self.serve.model_copy(update={"arms": arms, "target": found}),
                "prompts": str(prompts.absolute()) if prompts.exists() else self.prompts,
                "out": self.out.expanduser().absolute(),
            }
        )

    def loads(self) -> list[Load]:
        """Loads in the order in which an engine is measured at them.

        At each temperature the extremes of concurrency come first: a long proposal pays at few
        clients and a short one at many, so that these two tell most about a setting.
        """
        few_many = sorted(self.concurrencies)
        ends = dict.fromkeys([few_many[0], few_many[-1]])
        order = [*ends, *(value for value in self.concurrencies if value not in ends)]
        return [Load(*each) for each in product(self.temperatures, order)]

    def identity(self) -> dict[str, Any]:
        """What decides a measurement; lists may grow and everything else may change."""
        values = self.model_dump(mode="json")
        serve = values["serve"]
        return {
            "target": serve["target"],
            "engine": serve["engine"],
            "device": serve["resources"]["device"],
            "prompts": values["prompts"],
            "num_prompts": values["num_prompts"],
            "max_tokens": values["max_tokens"],
            "seed": values["seed"],
            "measure": values["measure"],
            "drafters": {
                arm["name"]: {"drafter": arm["drafter"], "engine": arm["engine"]}
                for arm in serve["arms"]
            },
        }


@dataclass(frozen=True, order=True)
class Load:
    """What clients do: temperature of the requests, and how many are in flight."""

    temperature: float
    concurrency: int

    @property
    def title(self) -> str:
        """In a few characters."""
        return f"T={self.temperature:g} c={self.concurrency}"

    @property
    def params(self) -> dict[str, float]:
        """As parameters of a record."""
        return asdict(self)


@dataclass(frozen=True)
class Setting:
    """One engine to start; `engine` holds (key, value) pairs that differ from the sweep's own."""

    arm: str
    drafter: str | None
    num_speculative_tokens: int | None
    engine: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """From `asdict`, after JSON made lists of tuples."""
        pairs = tuple((key, value) for key, value in values.get("engine", ()))
        return cls(**{**values, "engine": pairs})

    @property
    def name(self) -> str:
        """Name of the trial and of the arm that it serves."""
        parts = [self.arm]
        if self.num_speculative_tokens is not None:
            parts.append(str(self.num_speculative_tokens))
        for key, value in self.engine:
            slug = re.sub(r"[^a-z0-9]+", "_", f"{key.rpartition('.')[2]}_{value}".lower())
            parts.append(slug.strip("_"))
        return "-".join(parts)

    @property
    def params(self) -> dict[str, Any]:
        """As parameters of a record, the same keys for every setting of a sweep."""
        engine = {f"engine.{key}": value for key, value in self.engine}
        length = self.num_speculative_tokens
        return {
            "setting": self.name, "arm": self.arm, "drafter": self.drafter or "none",
            "num_speculative_tokens": 0 if self.drafter is None else length, **engine,
        }  # fmt: skip

    def application(self, serve: ServeConfig, *, beside: list[Arm] | None = None) -> ServeConfig:
        """The application that serves it, after the arms `beside`; the split between arms of
        `serve`, which would name other arms, is left out."""
        origin = next(arm for arm in serve.arms if arm.name == self.arm)
        served = origin.model_copy(
            update={"name": self.name, "num_speculative_tokens": self.num_speculative_tokens}
        )
        engine = engine_with(serve.engine, dict(self.engine))
        arms = [*(beside or []), served]
        values = serve.model_copy(update={"engine": engine, "arms": arms}).model_dump()
        return ServeConfig.parse({**values, "traffic": {}})


def engine_with(engine: EngineConfig, values: Mapping[str, Any]) -> EngineConfig:
    """Engine settings with some keys changed; `extra.NAME` is one of vLLM's own arguments.

    Raises:
        ValueError: an unknown key, or a value that does not fit.
    """
    changed = engine.model_dump()
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        if section not in ("", "extra"):
            raise ValueError(f"engine.{key}: give a key of serve.engine, or extra.NAME")
        (changed["extra"] if section else changed)[name] = value
    try:
        return EngineConfig.parse(changed, source=f"engine {', '.join(values)}")
    except ConfigError as error:
        raise ValueError(str(error)) from None


def settings_of(config: SweepConfig) -> list[Setting]:
    """Every engine of the full grid; first those without a drafter, which others are divided by."""
    values = [[(key, value) for value in each] for key, each in sorted(config.engine.items())]
    found = []
    for arm in sorted(config.serve.arms, key=lambda arm: arm.drafter is not None):
        drafter = None if arm.drafter is None else str(arm.drafter)
        lengths: list[int | None] = [arm.num_speculative_tokens]
        if drafter is not None and config.proposal_lengths is not None:
            lengths = list(config.proposal_lengths)
        found += [
            Setting(arm.name, drafter, length, engine)
            for length in lengths
            for engine in product(*values)
        ]
    return found


@dataclass(frozen=True)
class Measurement:
    """One setting at one load.

    Attributes:
        setting: name of the engine setting.
        load: at which it was measured.
        figures: what the bench found, by its own names.
        wall_s: how long the measuring took, warm-up included.
        stored_bytes: what it left on disk.
    """

    setting: str
    load: Load
    figures: Mapping[str, float]
    wall_s: float = 0.0
    stored_bytes: int = 0

    @property
    def title(self) -> str:
        """The setting and the load in a few words."""
        return f"{self.setting} {self.load.title}"

    def row(self) -> dict[str, Any]:
        """As a line of JSON."""
        return {
            "setting": self.setting, **self.load.params, "figures": dict(self.figures),
            "wall_s": self.wall_s, "stored_bytes": self.stored_bytes,
        }  # fmt: skip

    @classmethod
    def parse(cls, row: Mapping[str, Any]) -> Self:
        """From a line of JSON."""
        load = Load(row["temperature"], row["concurrency"])
        return cls(row["setting"], load, row["figures"], row["wall_s"], row["stored_bytes"])
