"""Everything kept of one arm's requests, in bounded memory: mergeable, and JSON-able.

Three things are kept:

- `Totals`, plain sums for tables, by kind of request and by label;
- `recent`, the last compared requests, for percentiles and guard rules;
- `GroupSums` by split, from which comparisons get their variance. Keeping every sticky key's sums
  would need memory without bound, so keys are hashed into 256 groups, the same in every arm, and
  sums are kept per group: different keys are independent, so groups are, and all requests of one
  key are in one group however many there are and however long it lives ("random groups"; a request
  without a key goes to a group at random). Sums are also kept by blocks of time, because a stall
  of an arm's replica slows many requests of different keys at once.
"""

from __future__ import annotations

import base64
import math
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple, Self
from zlib import crc32

import numpy as np

from carryover.serving.observation import KINDS, Observation
from carryover.serving.time_blocks import TimeBlocks
from carryover.serving.totals import Totals, is_time

NUM_GROUPS = 256
MAX_RECENT = 4096
MAX_LABELS = 64
MAX_SPLITS = 32
MAX_NAME = 64
OTHER = "(other)"

# Columns of the group sums. Latencies enter as logarithms.
COLUMNS = (
    "requests", "failures",
    "num_ttft", "log_ttft", "num_tpot", "log_tpot", "num_e2e", "log_e2e",
    "num_drafted", "rounds", "accepted",
)  # fmt: skip
# Products kept over single requests, for the variance that requests would have on their own.
PRODUCTS = (
    ("failures", "failures"),
    ("log_ttft", "log_ttft"), ("log_tpot", "log_tpot"), ("log_e2e", "log_e2e"),
    ("rounds", "rounds"), ("rounds", "accepted"), ("accepted", "accepted"),
)  # fmt: skip
COLUMN = {name: index for index, name in enumerate(COLUMNS)}
_LEFT = [COLUMN[left] for left, _ in PRODUCTS]
_RIGHT = [COLUMN[right] for _, right in PRODUCTS]
_MASK = (1 << 64) - 1


class Recent(NamedTuple):
    """One of the last compared requests; NaN where there is no value."""

    time_s: float
    group: float
    failed: float
    ttft_s: float
    tpot_s: float
    e2e_s: float
    rounds: float
    accepted: float


class GroupSums:
    """Sums of compared requests within one split.

    Attributes:
        units: [NUM_GROUPS, columns] by group of sticky keys.
        blocks: by block of time.
        products: [PRODUCTS] over single requests.
    """

    def __init__(self) -> None:
        self.units = np.zeros((NUM_GROUPS, len(COLUMNS)))
        self.blocks = TimeBlocks(len(COLUMNS))
        self.products = np.zeros(len(PRODUCTS))

    def add(self, values: np.ndarray, *, unit: int, time_s: float) -> None:
        """Add one request's columns to its group and block."""
        self.units[unit] += values
        self.blocks.add(time_s, values)
        self.products += values[_LEFT] * values[_RIGHT]

    def merge(self, other: Self) -> None:
        """Add all that `other` counted."""
        self.units += other.units
        self.blocks.merge(other.blocks)
        self.products += other.products

    def to_json(self) -> dict[str, Any]:
        """Arrays as base64 of little-endian float64."""
        return {
            "units": _encode(self.units),
            "blocks": {**self.blocks.to_json(), "sums": _encode(self.blocks.sums)},
            "products": _encode(self.products),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`."""
        made = cls()
        made.units = _decode(values["units"]).reshape(made.units.shape)
        made.products = _decode(values["products"]).reshape(made.products.shape)
        sums = _decode(values["blocks"]["sums"]).reshape(made.blocks.sums.shape)
        made.blocks = TimeBlocks.from_json(values["blocks"], sums)
        return made


class ArmStatistics:
    """All that is known of one arm; bounded memory, mergeable, JSON-able.

    Attributes:
        arm: its name.
        totals: `Totals` by kind of request (see `KINDS`).
        by_label: `Totals` of compared requests by label (at most 64 labels, then "(other)").
        recent: the last compared requests (at most 4,096), for percentiles and guard rules.
        splits: `GroupSums` by split, for comparisons (the first 32 splits of the experiment).
        uncompared: requests of later splits, which comparisons leave out.
    """

    def __init__(self, arm: str) -> None:
        self.arm = arm
        self.totals = {kind: Totals() for kind in KINDS}
        self.by_label: dict[str, Totals] = {}
        self.recent: deque[Recent] = deque(maxlen=MAX_RECENT)
        self.splits: dict[str, GroupSums] = {}
        self.uncompared = 0
        self._seed = crc32(arm.encode())

    def add(self, seen: Observation) -> None:
        """Count one request; its `arm` must be this one."""
        self.totals[seen.kind].add(seen)
        if seen.kind != "compared":
            return
        if seen.label is not None:
            name = seen.label[:MAX_NAME]
            if name not in self.by_label and len(self.by_label) >= MAX_LABELS:
                name = OTHER
            self.by_label.setdefault(name, Totals()).add(seen)
        values = _columns(seen)
        count = self.num_compared
        unit = crc32(seen.unit.encode()) if seen.unit is not None else _mix(count + self._seed)
        self._keep_recent(seen, unit % NUM_GROUPS)
        sums = self.splits.get(seen.split)
        if sums is None:
            if len(self.splits) >= MAX_SPLITS:
                self.uncompared += 1
                return
            sums = self.splits[seen.split] = GroupSums()
        sums.add(values, unit=unit % NUM_GROUPS, time_s=seen.time_s)

    def merge(self, other: Self) -> None:
        """Add all that `other` counted."""
        for kind, totals in other.totals.items():
            self.totals[kind].merge(totals)
        for label, totals in other.by_label.items():
            full = label not in self.by_label and len(self.by_label) >= MAX_LABELS
            self.by_label.setdefault(OTHER if full else label, Totals()).merge(totals)
        for split, sums in other.splits.items():
            if split not in self.splits and len(self.splits) >= MAX_SPLITS:
                self.uncompared += int(sums.units[:, COLUMN["requests"]].sum())
            else:
                self.splits.setdefault(split, GroupSums()).merge(sums)
        self.uncompared += other.uncompared
        # The deque keeps the newest.
        merged = sorted([*self.recent, *other.recent], key=lambda seen: seen.time_s)
        self.recent = deque(merged, maxlen=MAX_RECENT)

    def to_json(self) -> dict[str, Any]:
        """As plain dicts, lists, strings and finite numbers."""
        recent = np.array(self.recent, dtype=float).reshape(len(self.recent), len(Recent._fields))
        return {
            "arm": self.arm,
            "totals": {kind: totals.to_json() for kind, totals in self.totals.items()},
            "by_label": {label: totals.to_json() for label, totals in self.by_label.items()},
            "recent": _encode(recent),
            "splits": {split: sums.to_json() for split, sums in self.splits.items()},
            "uncompared": self.uncompared,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`."""
        made = cls(values["arm"])
        for kind, totals in values["totals"].items():
            made.totals[kind] = Totals.from_json(totals)
        made.by_label = {
            label: Totals.from_json(totals) for label, totals in values["by_label"].items()
        }
        rows = _decode(values["recent"]).reshape(-1, len(Recent._fields)).tolist()
        made.recent.extend(Recent(*row) for row in rows)
        made.splits = {
            split: GroupSums.from_json(sums) for split, sums in values["splits"].items()
        }
        made.uncompared = values["uncompared"]
        return made

    @property
    def num_compared(self) -> int:
        """Requests that take part in comparisons."""
        return self.totals["compared"].requests

    def recent_array(self, *, since_s: float = -math.inf) -> np.ndarray:
        """[requests, fields of `Recent`]: the last compared requests that ended since then."""
        array = np.array(self.recent, dtype=float).reshape(len(self.recent), len(Recent._fields))
        return array[array[:, 0] >= since_s]

    def summary(self) -> dict[str, Any]:
        """One row of a table: NaN where there is nothing to say.

        Keys: requests, failures, error_rate, disconnected, ttft_p50_s, ttft_p95_s, tpot_p50_s,
        tpot_p95_s, e2e_p50_s, e2e_p95_s, output_tokens, output_tokens_per_s (all answers' tokens
        over all answers' seconds: the speed of one request), acceptance_length,
        acceptance_per_position (list), overrides, fallbacks_taken, shadows. Percentiles are of the
        last 4,096 compared requests, the rest of all compared requests.
        """
        totals, recent = self.totals["compared"], self.recent_array()
        row: dict[str, Any] = {
            "requests": totals.requests,
            "failures": totals.failures,
            "error_rate": totals.error_rate,
            "disconnected": totals.outcomes["disconnected"],
        }
        for name in ("ttft", "tpot", "e2e"):
            values = recent[:, Recent._fields.index(f"{name}_s")]
            values = values[~np.isnan(values)]
            for rank in (50, 95):
                found = float(np.percentile(values, rank)) if len(values) else math.nan
                row[f"{name}_p{rank}_s"] = found
        return row | {
            "output_tokens": totals.output_tokens,
            "output_tokens_per_s": totals.output_tokens_per_s,
            "acceptance_length": totals.acceptance_length,
            "acceptance_per_position": totals.acceptance_per_position,
            "overrides": self.totals["override"].requests,
            "fallbacks_taken": self.totals["fallback"].requests,
            "shadows": self.totals["shadow"].requests,
        }

    def _keep_recent(self, seen: Observation, group: int) -> None:
        ok = seen.outcome == "ok"
        times = [
            value if ok and is_time(value) else math.nan
            for value in (seen.ttft_s, seen.tpot_s, seen.e2e_s)
        ]
        counts = (seen.rounds, seen.accepted) if ok else (0, 0)
        self.recent.append(Recent(seen.time_s, group, float(seen.failed), *times, *counts))


def _columns(seen: Observation) -> np.ndarray:
    """[columns] of one request; only an answer that was given has times and rounds."""
    values = [1.0, float(seen.failed)]
    if seen.outcome != "ok":
        return np.array(values + [0.0] * (len(COLUMNS) - 2))
    for value in (seen.ttft_s, seen.tpot_s, seen.e2e_s):
        values += (1.0, math.log(value)) if is_time(value) else (0.0, 0.0)
    return np.array([*values, seen.rounds > 0, seen.rounds, seen.accepted], dtype=float)


def _mix(number: int) -> int:
    """A well-mixed 64-bit hash of a number (Steele, Lea and Flood 2014, "SplitMix")."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def _encode(array: np.ndarray) -> str:
    return base64.b64encode(array.astype("<f8").tobytes()).decode("ascii")


def _decode(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text, validate=True), dtype="<f8").astype(float)
