"""What a sweep of decoding settings covers, and the answer that its measurements give; no Ray.

An engine setting (an arm and its proposal length) needs an engine of its own; temperature and
concurrency do not, and are measured on the live engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Self

from pydantic import Field, model_validator

from carryover.config import Config
from carryover.serving.config import Arm, ServeConfig

THROUGHPUT = "output_tokens_per_s"


class SweepConfig(Config):
    """A sweep: engine settings times loads."""

    serve: ServeConfig = Field(description="as for `platform serve`; its arms are what is swept")
    proposal_lengths: list[int] | None = Field(
        default=None,
        min_length=1,
        description="of every arm with a drafter; null: what each arm says, or its checkpoint",
    )
    temperatures: list[float] = Field(default=[0.0], min_length=1)
    concurrencies: list[int] = Field(default=[1, 4, 16], min_length=1)
    prompts: str = Field(description="JSON lines, Parquet, folder, or Hugging Face data set")
    num_prompts: int | None = Field(default=None, ge=1, description="null takes all")
    max_tokens: int = Field(default=128, ge=1)
    seed: int = Field(default=0, description="of the choice and order of prompts")
    out: Path = Field(description="folder for the results; the same one goes on where it stopped")

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("proposal_lengths", "temperatures", "concurrencies"):
            values = getattr(self, name) or []
            if len(set(values)) != len(values):
                raise ValueError(f"{name} repeats a value: {values}")
        if any(value < 1 for value in [*(self.proposal_lengths or []), *self.concurrencies]):
            raise ValueError("proposal_lengths and concurrencies start at 1")
        if any(value < 0 for value in self.temperatures):
            raise ValueError("temperatures start at 0")
        return self

    def absolute(self) -> Self:
        """The same with absolute paths: trials run in folders of their own."""
        arms = [
            arm
            if arm.drafter is None
            else arm.model_copy(update={"drafter": arm.drafter.expanduser().absolute()})
            for arm in self.serve.arms
        ]
        prompts = Path(self.prompts).expanduser()
        return self.model_copy(
            update={
                "serve": self.serve.model_copy(update={"arms": arms}),
                "prompts": str(prompts.absolute()) if prompts.exists() else self.prompts,
                "out": self.out.expanduser().absolute(),
            }
        )

    def loads(self) -> list[tuple[float, int]]:
        """(temperature, concurrency) of every measurement of one engine."""
        return list(product(self.temperatures, self.concurrencies))


@dataclass(frozen=True)
class Setting:
    """One engine to start."""

    arm: str
    drafter: str | None
    num_speculative_tokens: int | None

    @property
    def name(self) -> str:
        """Name of the trial and of the arm that it serves."""
        if self.num_speculative_tokens is None:
            return self.arm
        return f"{self.arm}-{self.num_speculative_tokens}"

    def served(self) -> Arm:
        """The arm of the application that serves it."""
        return Arm(
            name=self.name,
            drafter=None if self.drafter is None else Path(self.drafter),
            num_speculative_tokens=self.num_speculative_tokens,
        )


@dataclass(frozen=True)
class Measurement:
    """One setting at one load.

    Attributes:
        setting: name of the engine setting.
        temperature: of the requests.
        concurrency: requests in flight.
        figures: what the bench found, by its own names.
    """

    setting: str
    temperature: float
    concurrency: int
    figures: Mapping[str, float]

    @property
    def title(self) -> str:
        """The setting and the load in a few words."""
        return f"{self.setting} T={self.temperature:g} c={self.concurrency}"


def settings_of(config: SweepConfig) -> list[Setting]:
    """The engines that a sweep starts."""
    found = []
    for arm in config.serve.arms:
        drafter = None if arm.drafter is None else str(arm.drafter)
        lengths: Iterable[int | None] = [arm.num_speculative_tokens]
        if drafter is not None and config.proposal_lengths is not None:
            lengths = config.proposal_lengths
        found += [Setting(arm.name, drafter, length) for length in lengths]
    return found


def unfinished(config: SweepConfig, measured: Iterable[Measurement]) -> list[Setting]:
    """Settings of which a load is still to be measured."""
    done = {(each.setting, each.temperature, each.concurrency) for each in measured}
    return [
        setting
        for setting in settings_of(config)
        if any((setting.name, *load) not in done for load in config.loads())
    ]


@dataclass(frozen=True)
class Choice:
    """The best setting at one load.

    Attributes:
        temperature: of the load.
        concurrency: of the load.
        setting: with the highest throughput.
        tokens_per_s: its throughput.
        speedup: against decoding without a drafter; None if that was not measured.
    """

    temperature: float
    concurrency: int
    setting: str
    tokens_per_s: float
    speedup: float | None


def choose(config: SweepConfig, measured: Iterable[Measurement]) -> list[Choice]:
    """For each load that was measured, the setting to deploy there."""
    plain = {setting.name for setting in settings_of(config) if setting.drafter is None}
    choices = []
    measured = list(measured)
    for temperature, concurrency in config.loads():
        here = {
            each.setting: each.figures[THROUGHPUT]
            for each in measured
            if (each.temperature, each.concurrency) == (temperature, concurrency)
        }
        if not here:
            continue
        best = max(here, key=here.__getitem__)
        reference = max((here[name] for name in plain & here.keys()), default=None)
        speedup = None if reference is None else here[best] / reference
        choices.append(Choice(temperature, concurrency, best, here[best], speedup))
    return choices


def recommend(config: SweepConfig, measured: Iterable[Measurement]) -> Setting | None:
    """The one setting for all loads: highest geometric mean of throughput, all loads measured."""
    rates: dict[str, list[float]] = {}
    for each in measured:
        rates.setdefault(each.setting, []).append(each.figures[THROUGHPUT])
    whole = [s for s in settings_of(config) if len(rates.get(s.name, [])) == len(config.loads())]
    return max(whole, key=lambda s: exp(fmean(log(rate) for rate in rates[s.name])), default=None)


def application_for(config: SweepConfig, setting: Setting) -> ServeConfig:
    """An application that serves a setting, beside decoding without a drafter if that was swept."""
    chosen = setting.served()
    plain = [arm for arm in config.serve.arms if arm.drafter is None and arm.name != chosen.name]
    return config.serve.model_copy(update={"arms": [*plain[:1], chosen]})
