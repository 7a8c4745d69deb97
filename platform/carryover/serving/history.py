"""What happened when: aggregates per arm and interval, and how the verdict developed.

Both have bounded length: when it is used up, neighbours are merged (of comparisons, every other is
dropped) and steps double, so they always span the whole experiment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Self

import numpy as np

from carryover.serving.guard import Comparison
from carryover.serving.observation import Observation
from carryover.serving.totals import is_time

# Sums per interval. Times and rounds are of compared requests that were answered.
FIELDS = (
    "compared", "failures", "others", "shadows",
    "num_tpot", "log_tpot", "log_tpot_2", "num_ttft", "log_ttft", "log_ttft_2",
    "num_rounds", "rounds", "accepted", "rounds_2", "rounds_accepted", "accepted_2",
)  # fmt: skip
_FIELD = {name: index for index, name in enumerate(FIELDS)}
Z_95 = 1.959963984540054


class History:
    """Aggregates per arm and interval since the first request."""

    def __init__(self, *, interval_s: float = 10.0, max_intervals: int = 240) -> None:
        if max_intervals % 2:
            raise ValueError(f"max_intervals must be even, got {max_intervals}")
        self.interval_s, self.max_intervals = interval_s, max_intervals
        self.start_s: float | None = None
        self._sums: dict[str, np.ndarray] = {}

    def add(self, seen: Observation) -> None:
        """Count one request in its interval (requests older than the first go to the first)."""
        if self.start_s is None:
            self.start_s = seen.time_s // self.interval_s * self.interval_s
        index = max(int((seen.time_s - self.start_s) // self.interval_s), 0)
        while index >= self.max_intervals:
            self._double()
            index //= 2
        sums = self._sums.get(seen.arm)
        if sums is None:
            sums = self._sums[seen.arm] = np.zeros((self.max_intervals, len(FIELDS)))
        sums[index] += _sums_of(seen)

    @property
    def arms(self) -> list[str]:
        """Arms that had any request."""
        return sorted(self._sums)

    @property
    def num_intervals(self) -> int:
        """Up to the last that holds a request."""
        used = [np.flatnonzero(sums.any(axis=1)) for sums in self._sums.values()]
        return max((int(found[-1]) + 1 for found in used if len(found)), default=0)

    def at_most(self, intervals: int) -> Self:
        """A copy whose neighbours are merged until it has no more intervals than that."""
        copy = type(self).from_json(self.to_json())
        while copy.num_intervals > intervals:
            copy._double()
        return copy

    def times_s(self) -> np.ndarray:
        """[intervals]: epoch time of each interval's middle."""
        return (self.start_s or 0.0) + (np.arange(self.num_intervals) + 0.5) * self.interval_s

    def sums(self, arm: str, name: str) -> np.ndarray:
        """[intervals]: one of `FIELDS` of an arm; zeros for an arm without requests."""
        if arm not in self._sums:
            return np.zeros(self.num_intervals)
        return self._sums[arm][: self.num_intervals, _FIELD[name]]

    def acceptance(self, arm: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Acceptance length per interval with its pointwise 95% interval; NaN where there is none.

        The interval takes requests as independent (a ratio of sums, linearised).
        """
        get = {name: self.sums(arm, name) for name in FIELDS}
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = get["accepted"] / get["rounds"]
            spread = (
                get["accepted_2"] - 2 * mean * get["rounds_accepted"] + mean**2 * get["rounds_2"]
            )
            count = get["num_rounds"]
            half = Z_95 * np.sqrt(np.maximum(spread, 0) * count / (count - 1)) / get["rounds"]
        half[count < 2] = math.nan
        return 1 + mean, 1 + mean - half, 1 + mean + half

    def latency(self, arm: str, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Geometric mean of "tpot" or "ttft" in seconds, with its pointwise 95% interval."""
        count, total, squares = (
            self.sums(arm, field) for field in (f"num_{name}", f"log_{name}", f"log_{name}_2")
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = total / count
            variance = np.maximum(squares - count * mean**2, 0) / (count - 1)
            half = Z_95 * np.sqrt(variance / count)
        half[count < 2] = math.nan
        return np.exp(mean), np.exp(mean - half), np.exp(mean + half)

    def to_json(self) -> dict[str, Any]:
        """As plain dicts, lists, strings and finite numbers."""
        used = self.num_intervals
        return {
            "interval_s": self.interval_s,
            "max_intervals": self.max_intervals,
            "start_s": self.start_s,
            "fields": list(FIELDS),
            "arms": {
                arm: [[round(float(value), 6) for value in row] for row in sums[:used]]
                for arm, sums in self._sums.items()
            },
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`.

        Raises:
            ValueError: other fields than this version keeps.
        """
        if values["fields"] != list(FIELDS):
            raise ValueError(f"the history holds {values['fields']}, expected {list(FIELDS)}")
        made = cls(interval_s=values["interval_s"], max_intervals=values["max_intervals"])
        made.start_s = values["start_s"]
        for arm, rows in values["arms"].items():
            sums = made._sums[arm] = np.zeros((made.max_intervals, len(FIELDS)))
            if rows:
                sums[: len(rows)] = rows
        return made

    def _double(self) -> None:
        half = self.max_intervals // 2
        self.interval_s *= 2
        for sums in self._sums.values():
            sums[:half] = sums[0::2] + sums[1::2]
            sums[half:] = 0


def _sums_of(seen: Observation) -> np.ndarray:
    row = np.zeros(len(FIELDS))
    if seen.kind != "compared":
        row[_FIELD["shadows" if seen.kind == "shadow" else "others"]] = 1
        return row
    row[:2] = 1, seen.failed
    if seen.outcome != "ok":
        return row
    for name, value in (("tpot", seen.tpot_s), ("ttft", seen.ttft_s)):
        if is_time(value):
            number = math.log(value)
            begin = _FIELD[f"num_{name}"]
            row[begin : begin + 3] = 1, number, number**2
    if seen.rounds:
        rounds, accepted = seen.rounds, seen.accepted
        row[_FIELD["num_rounds"] :] = (
            1, rounds, accepted, rounds**2, rounds * accepted, accepted**2,
        )  # fmt: skip
    return row


class Trail:
    """How the comparisons developed: relative change and bounds of each arm and metric over time.

    Attributes:
        points: per "arm/metric", lists of [epoch seconds, value, low, high]; of the error rate the
            differences, of other metrics the relative changes.
    """

    def __init__(self, *, max_points: int = 240) -> None:
        self.max_points = max_points
        self.points: dict[str, list[list[float]]] = {}
        self._stride, self._noted = 1, 0

    def note(self, time_s: float, comparisons: Mapping[str, Mapping[str, Comparison]]) -> None:
        """Keep what an evaluation found (`guard.compare_all`), if it is the step's turn."""
        turn = self._noted % self._stride == 0
        self._noted += 1
        if not turn:
            return
        for arm, metrics in comparisons.items():
            for metric, found in metrics.items():
                point = [time_s, *_shown(found)]
                if all(map(math.isfinite, point)):
                    self.points.setdefault(f"{arm}/{metric}", []).append(point)
        if max(map(len, self.points.values()), default=0) > self.max_points:
            self.points = {name: points[::2] for name, points in self.points.items()}
            self._stride *= 2

    def to_json(self) -> dict[str, Any]:
        """As plain dicts, lists, strings and finite numbers."""
        return {
            "max_points": self.max_points, "stride": self._stride, "noted": self._noted,
            "points": {name: [list(point) for point in points] for name, points in
                       self.points.items()},
        }  # fmt: skip

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`."""
        made = cls(max_points=values["max_points"])
        made._stride, made._noted = values["stride"], values["noted"]
        made.points = {name: [list(p) for p in points] for name, points in values["points"].items()}
        return made


def _shown(found: Comparison) -> Iterable[float]:
    if found.metric == "error_rate":
        return found.estimate, found.low, found.high
    return found.relative, found.relative_low, found.relative_high
