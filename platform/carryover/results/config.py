"""Which MLflow runs the results page is made from."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from carryover.config import Config
from carryover.results.markdown import slug

Regime = Literal["dflash", "markov"]
DRAFTING_ROLES = ("baseline", "control", "carryover")
ROLES = ("autoregressive", *DRAFTING_ROLES)


class RegimeArms(Config):
    """Names of the arms of one kind of drafter; several of a role are seeds, in the same order."""

    baseline: list[str] = Field(default=[], description="one for all seeds, or one for each")
    control: list[str] = Field(default=[], description="one for each seed of the continuation")
    carryover: list[str] = Field(default=[], description="one for each seed of the continuation")

    @model_validator(mode="after")
    def _pair_up(self) -> Self:
        seeds = self.num_seeds
        for role, shared in (("baseline", True), ("control", False), ("carryover", False)):
            count = len(getattr(self, role))
            if count not in (0, seeds, 1 if shared else seeds):
                raise ValueError(
                    f"{count} arms are {role} and {seeds} another role; seed k of one is paired "
                    "with seed k of the other, so give as many"
                )
        return self

    @property
    def num_seeds(self) -> int:
        """How many seeds the role with the most arms has."""
        return max(len(getattr(self, role)) for role in DRAFTING_ROLES)

    def of_seed(self, seed: int) -> dict[str, str]:
        """The arm of each role that has one, for a seed from 0."""
        found = {}
        for role in DRAFTING_ROLES:
            names = getattr(self, role)
            if names:
                found[role] = names[0 if len(names) == 1 else seed]
        return found


class Tried(Config):
    """A remedy that was tried."""

    what: str = Field(description="what was changed")
    run: str | None = Field(default=None, description="MLflow run that shows it, by name or id")
    gave: str = Field(description="what came of it")


class Section(Config):
    """Results on one target."""

    name: str = Field(min_length=1, description="heading, unique on the page")
    text: str = Field(default="", description="markdown below the heading")
    offline: list[str] = Field(
        default=[], description="offline benches by MLflow id, folder of results, or unique name"
    )
    online: list[str] = Field(
        default=[], description="online benches, likewise: concurrency 1 and the sweep"
    )
    autoregressive: str = Field(default="autoregressive", description="arm of the target alone")
    regimes: dict[Regime, RegimeArms] = Field(
        default={}, description="arms of each kind of drafter"
    )
    training: list[str] = Field(
        default=[], description="training runs by name or id, for what they cost"
    )
    diagnostics: list[str] = Field(
        default=[],
        description="runs of `platform checkpoint headroom` and `replay` by name or id",
    )
    ablation: list[str] = Field(
        default=[],
        description="replays, by name or id, of drafters that differ in what is carried or in how "
        "it is marked; each with the same baseline",
    )
    tried: list[Tried] = Field(default=[], description="remedies that were tried")


class ResultsConfig(Config):
    """The page."""

    title: str = Field(default="Results", description="heading of the page")
    text: str = Field(default="", description="markdown below it")
    sections: list[Section] = Field(min_length=1, description="one for each target")

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        # figures' files are called by the sections
        names = [slug(section.name) for section in self.sections]
        twice = [section.name for section, name in zip(self.sections, names, strict=True)
                 if names.count(name) > 1]  # fmt: skip
        if twice:
            raise ValueError(f"sections need different names, got {', '.join(twice)}")
        return self
