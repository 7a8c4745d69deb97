"""What is kept of finished requests. Pure.

The ingress makes an `Observation` per request and arm; the controller adds them to `Statistics`,
which the guard compares, the terminal shows and the report draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self

from carryover.serving.arm_statistics import ArmStatistics
from carryover.serving.history import History, Trail
from carryover.serving.observation import FAILURES, KINDS, OUTCOMES, Observation, split_name

__all__ = [
    "FAILURES", "KINDS", "OUTCOMES", "ArmStatistics", "History", "Observation", "Statistics",
    "Trail", "split_name",
]  # fmt: skip

_FORMAT = 1


class Statistics:
    """Everything observed in one experiment.

    Attributes:
        arms: an `ArmStatistics` per arm.
        history: aggregates over time.
        trail: comparisons over time; whoever evaluates the guard calls `trail.note`.
    """

    def __init__(self, arms: Iterable[str], *, interval_s: float = 10.0) -> None:
        self.arms = {arm: ArmStatistics(arm) for arm in arms}
        self.history = History(interval_s=interval_s)
        self.trail = Trail()

    def add(self, observations: Iterable[Observation]) -> int:
        """Count requests; returns how many named an arm that does not exist (they are dropped)."""
        unknown = 0
        for seen in observations:
            arm = self.arms.get(seen.arm)
            if arm is None:
                unknown += 1
                continue
            arm.add(seen)
            self.history.add(seen)
        return unknown

    def to_json(self) -> dict[str, Any]:
        """As plain dicts, lists, strings and finite numbers."""
        return {
            "format": _FORMAT,
            "arms": {arm: statistics.to_json() for arm, statistics in self.arms.items()},
            "history": self.history.to_json(),
            "trail": self.trail.to_json(),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`.

        Raises:
            ValueError: not a mapping that `to_json` made.
        """
        try:
            if values["format"] != _FORMAT:
                raise ValueError(f"format {values['format']!r}, this version reads {_FORMAT}")
            made = cls(())
            made.arms = {
                arm: ArmStatistics.from_json(kept) for arm, kept in values["arms"].items()
            }
            made.history = History.from_json(values["history"])
            made.trail = Trail.from_json(values["trail"])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"these are no statistics of an experiment: {error!r}") from error
        return made
