"""How requests are split between arms: the `traffic:` section, and what is in force now.

Weights are given as percent (they sum to 100) or as fractions (they sum to 1); the sum says which.
They are kept as fractions. The first arm of an application is its control arm.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field

from carryover.config import Config
from carryover.errors import ConfigError
from carryover.serving.guard import GuardRules
from carryover.stores import store_uri

# 33.33 three times is meant to be everything.
_SUM_TOLERANCE = 5e-4


def _check_experiment(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        raise ValueError(
            "an experiment's name holds up to 64 letters, digits, '.', '_' and '-'; "
            "for example 'carryover-may'"
        )
    return name


Experiment = Annotated[str, AfterValidator(_check_experiment)]


class Shadow(Config):
    """A share of requests that is also sent to another arm, whose answer nobody gets."""

    arm: str = Field(description="Gets the copies.")
    share: float = Field(gt=0, le=1, description="Fraction of the requests that is copied.")


class TrafficConfig(Config):
    """The `traffic:` section of an application."""

    experiment: Experiment | None = Field(
        default=None, description="Name in headers, metrics and MLflow; null: the application's."
    )
    salt: str | None = Field(
        default=None,
        description="Decides which sticky key gets which arm; null: the experiment's name.",
    )
    weights: dict[str, float] = Field(
        default={},
        description="By arm, percent or fractions; an arm not named gets nothing. "
        "Empty: everything to the control arm.",
    )
    sticky_header: str = Field(
        default="x-session-id",
        description="Requests of one value get one arm; else those of one OpenAI `user` do.",
    )
    label_header: str = Field(
        default="x-carryover-label", description="Names a request's route or category."
    )
    allow_override: bool = Field(
        default=False, description="Whether the header x-carryover-arm chooses the arm."
    )
    shadow: Shadow | None = Field(default=None, description="Copies for another arm.")
    fallback: list[str] | None = Field(
        default=None,
        description="Arms that may answer for one that cannot, in this order, also at weight 0; "
        "null: the control arm.",
    )
    first_token_timeout_s: float = Field(
        default=30.0, gt=0, description="An arm slower than this to its first byte is passed over."
    )
    max_queue_per_arm: int = Field(
        default=64, ge=1, description="Requests in flight on one arm; more are shed."
    )
    evaluation_period_s: float = Field(
        default=10.0, gt=0, description="Between two evaluations of the guard."
    )
    guard: GuardRules = Field(default_factory=GuardRules, description="When to roll back.")
    state: Path | None = Field(
        default=None,
        description="Folder of the split, its audit log and statistics; null: runs/serve/NAME. "
        "On a cluster one that all nodes see, since the controller may move.",
    )
    record: bool = Field(default=True, description="Whether experiments are recorded in MLflow.")
    record_period_s: float = Field(
        default=300.0, gt=0, description="Between two records of a running experiment in MLflow."
    )
    tracking_uri: str | None = Field(
        default=None,
        description="MLflow store; null: MLFLOW_TRACKING_URI, else mlflow.db here.",
    )

    def resolve(self, *, arms: Sequence[str], application: str) -> Self:
        """Check the section against the arms, and fill in what the application decides.

        Args:
            arms: names of all arms; the first is the control arm.
            application: its name.

        Returns:
            The section with weights as fractions for every arm, absolute paths, and no name left
            open.

        Raises:
            ConfigError: an arm is unknown, or the weights do not sum.
        """
        weights = {arms[0]: 1.0} if not self.weights else self.weights
        fallback = [arms[0]] if self.fallback is None else self.fallback
        for name in fallback:
            check_arm(name, arms, what="traffic.fallback")
        if self.shadow is not None:
            check_arm(self.shadow.arm, arms, what="traffic.shadow.arm")
        experiment = self.experiment or application
        state = self.state or Path("runs/serve") / application
        return self.model_copy(
            update={
                "experiment": experiment,
                "salt": self.salt or experiment,
                "weights": check_weights(weights, arms, what="traffic.weights"),
                "fallback": fallback,
                "state": state.expanduser().absolute(),
                "tracking_uri": store_uri(self.tracking_uri) if self.record else None,
            }
        )


class Traffic(Config):
    """The split in force: all that an ingress replica must know, the same in every replica.

    Attributes:
        version: grows by one with every change.
        experiment: goes into headers and metrics.
        salt: of sticky assignment.
        weights: fraction of the requests by arm, every arm named, sum 1. While the split is
            paused, or after the experiment ended, the control arm has all.
        shadow: copies to another arm; None copies nothing.
        paused: whether the split is paused.
        effective_at: seconds since the epoch; every replica changes over at this instant.
        revoked: ids of API keys that no longer count.
    """

    version: int = Field(ge=1)
    experiment: Experiment
    salt: str
    weights: dict[str, float]
    shadow: Shadow | None = None
    paused: bool = False
    effective_at: float = 0.0
    revoked: tuple[str, ...] = ()


def initial_traffic(config: TrafficConfig) -> Traffic:
    """The split that a resolved section asks for; replicas begin with it."""
    return Traffic(
        version=1,
        experiment=config.experiment,
        salt=config.salt,
        weights=config.weights,
        shadow=config.shadow,
    )


def check_weights(
    weights: Mapping[str, float], arms: Sequence[str], *, what: str = "weights"
) -> dict[str, float]:
    """Check weights, in percent or fractions.

    Returns:
        Fractions that sum to 1, for every arm in the order of `arms`.

    Raises:
        ConfigError: an arm is unknown, a weight is negative or no number, or the sum is wrong.
    """
    for name, weight in weights.items():
        check_arm(name, arms, what=what)
        if not math.isfinite(weight) or weight < 0:
            raise ConfigError(f"{what}: the weight of {name!r} must be 0 or more, got {weight:g}")
    total = math.fsum(weights.values())
    if not any(abs(total / whole - 1) <= _SUM_TOLERANCE for whole in (1, 100)):
        raise ConfigError(
            f"{what} must sum to 100 (percent) or 1 (fractions), got {total:g} from "
            f"{_assignments(weights)}; {_nearest_sum(weights, arms, total)}"
        )
    return {name: weights.get(name, 0.0) / total for name in arms}


def check_arm(name: str, arms: Sequence[str], *, what: str = "arm") -> None:
    """Refuse a name that is no arm's.

    Raises:
        ConfigError: gives the nearest name, or all.
    """
    if name in arms:
        return
    close = difflib.get_close_matches(name, arms, n=1, cutoff=0.5)
    fix = f"did you mean {close[0]!r}?" if close else f"arms: {', '.join(arms)}"
    raise ConfigError(f"{what}: no arm {name!r}; {fix}")


def _nearest_sum(weights: Mapping[str, float], arms: Sequence[str], total: float) -> str:
    """What was probably meant."""
    whole = 1 if total < 1 else 100
    rest = whole - math.fsum(value for name, value in weights.items() if name != arms[0])
    if rest < 0:
        return "lower some of them"
    return f"for example {_assignments({**weights, arms[0]: rest})}"


def _assignments(weights: Mapping[str, float]) -> str:
    return " ".join(f"{name}={value:.6g}" for name, value in weights.items()) or "nothing"
