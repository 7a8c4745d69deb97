"""Is an arm better, worse, or is it too early to say; and must it be taken out of traffic.

Skeleton of signatures; the mathematics and what it assumes are described here when it is in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import Field

from carryover.config import Config
from carryover.serving.observations import ArmStatistics

# Metric -> whether more is better.
METRICS = {
    "acceptance_length": True,
    "tpot_s": False,
    "ttft_s": False,
    "e2e_s": False,
    "error_rate": False,
}


@dataclass(frozen=True)
class Comparison:
    """A treatment arm against the control arm on one metric, valid whenever it is looked at.

    `control` and `treatment` are the arms' own values; `estimate`, `low` and `high` the difference
    treatment - control in the metric's unit; `relative`, `relative_low`, `relative_high` the same
    as a share of the control's value (0.1 is +10%). NaN where nothing can be said. `n_control` and
    `n_treatment` are the requests used. `why` is one sentence.
    """

    metric: str
    verdict: str  # "better" | "worse" | "inconclusive"
    control: float
    treatment: float
    estimate: float
    low: float
    high: float
    relative: float
    relative_low: float
    relative_high: float
    n_control: int
    n_treatment: int
    alpha: float
    why: str


class GuardRules(Config):
    """When an arm is taken out of traffic. A rule that is None is off."""

    max_error_rate: float | None = Field(default=0.05, gt=0, lt=1)
    max_p95_ttft_s: float | None = Field(default=None, gt=0)
    max_p95_tpot_s: float | None = Field(default=None, gt=0)
    min_acceptance_length: float | None = Field(default=None, gt=1)
    min_requests: int = Field(
        default=100, ge=1, description="Compared requests an arm needs before a ramp goes on."
    )
    alpha: float = Field(
        default=0.05, gt=0, lt=0.5,
        description="Chance of any false verdict, and of any false roll-back, in an experiment.",
    )  # fmt: skip
    window_s: float = Field(
        default=300.0, gt=0, description="Rules look at requests of this long a time."
    )


@dataclass(frozen=True)
class Breach:
    """An arm that broke a rule; `text` is a sentence for the audit log."""

    arm: str
    rule: str
    value: float
    limit: float
    text: str


def compare(
    control: ArmStatistics, treatment: ArmStatistics, *, metric: str, alpha: float = 0.05
) -> Comparison:
    """Compare two arms on one metric.

    Raises:
        ConfigError: no such metric.
    """
    raise NotImplementedError


def compare_all(
    control: ArmStatistics, treatments: Mapping[str, ArmStatistics], *, alpha: float = 0.05
) -> dict[str, dict[str, Comparison]]:
    """Every treatment on every metric: {arm: {metric: Comparison}}.

    `alpha` is for the whole table: the chance that any verdict in it is ever false.
    """
    raise NotImplementedError


def breaches(
    rules: GuardRules,
    arms: Mapping[str, ArmStatistics],
    *,
    now_s: float,
    evaluation: int,
) -> list[Breach]:
    """Rules that an arm broke, on the evidence of its requests in the last `rules.window_s`.

    Args:
        rules: the limits.
        arms: the arms to hold to them (those with traffic).
        now_s: epoch time.
        evaluation: 1 for the experiment's first evaluation, 2 for the second, ...: the evidence
            asked for grows slowly with it, so that the chance of a false roll-back over the whole
            experiment, however long, is at most `rules.alpha`.
    """
    raise NotImplementedError


def lacking(
    rules: GuardRules, arms: Mapping[str, ArmStatistics], *, since_s: float, now_s: float
) -> dict[str, str]:
    """Arms without enough data since `since_s` for a ramp to go on, each with a sentence why."""
    raise NotImplementedError
