"""What was measured in the running experiment, as the controller keeps it over restarts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from carryover.serving.observations import ArmStatistics, Observation, Statistics


class Results:
    """The statistics of one experiment, and how much went into them.

    Attributes:
        statistics: of all arms.
        evaluations: of the guard so far.
        unknown: observations that could not be read or named an arm that does not exist.
    """

    def __init__(self, arms: Iterable[str]) -> None:
        self.statistics = Statistics(arms)
        self.evaluations = 0
        self.unknown = 0

    @property
    def arms(self) -> dict[str, ArmStatistics]:
        """Statistics by arm."""
        return self.statistics.arms

    def add(self, rows: Iterable[Sequence[Any]]) -> None:
        """Count observations (`Observation.to_row()`); what cannot be read is counted apart."""
        read = []
        for row in rows:
            try:
                read.append(Observation.from_row(row))
            except (ValueError, TypeError):
                self.unknown += 1
        self.unknown += self.statistics.add(read)

    def to_json(self) -> dict[str, Any]:
        """As plain dicts, lists, strings and finite numbers."""
        return {
            "statistics": self.statistics.to_json(),
            "evaluations": self.evaluations,
            "unknown": self.unknown,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`.

        Raises:
            ValueError: not what `to_json` made.
        """
        results = cls(())
        try:
            results.statistics = Statistics.from_json(values["statistics"])
            results.evaluations = int(values["evaluations"])
            results.unknown = int(values["unknown"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not saved results: {error!r}") from None
        return results
