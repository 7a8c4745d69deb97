"""Plain sums over requests, for tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from carryover.serving.observation import FAILURES, Observation

MAX_POSITIONS = 64


@dataclass
class Totals:
    """Plain sums over requests. Tokens, seconds and rounds are of answers given ("ok") alone.

    `invalid` counts times that were no positive number; they are left out everywhere.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    output_tokens: int = 0
    timed_tokens: int = 0
    e2e_s: float = 0.0
    rounds: int = 0
    accepted: int = 0
    proposed: int = 0
    per_position: list[int] = field(default_factory=list)
    invalid: int = 0

    @property
    def requests(self) -> int:
        """All of them, whatever came of them."""
        return sum(self.outcomes.values())

    @property
    def failures(self) -> int:
        """Requests that the arm owed an answer and did not give it."""
        return sum(count for name, count in self.outcomes.items() if name in FAILURES)

    @property
    def error_rate(self) -> float:
        """Share of failures; NaN without requests."""
        return self.failures / self.requests if self.requests else math.nan

    @property
    def output_tokens_per_s(self) -> float:
        """All answers' tokens over all answers' seconds: the speed of one request."""
        return self.timed_tokens / self.e2e_s if self.e2e_s else math.nan

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / rounds over all requests together; NaN without rounds."""
        return 1 + self.accepted / self.rounds if self.rounds else math.nan

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of the rounds that accepted at least k + 1 proposals; empty without rounds."""
        return [count / self.rounds for count in self.per_position] if self.rounds else []

    def add(self, seen: Observation) -> None:
        """Count one request."""
        self.outcomes[seen.outcome] += 1
        times = (seen.ttft_s, seen.tpot_s, seen.e2e_s)
        self.invalid += sum(value is not None and not is_time(value) for value in times)
        if seen.outcome != "ok":
            return
        self.prompt_tokens += seen.prompt_tokens
        self.output_tokens += seen.output_tokens
        if is_time(seen.e2e_s):
            self.timed_tokens += seen.output_tokens
            self.e2e_s += seen.e2e_s
        self.rounds += seen.rounds
        self.accepted += seen.accepted
        self.proposed += seen.proposed
        self._add_positions(seen.accepted_per_position)

    def merge(self, other: Self) -> None:
        """Add all that `other` counted."""
        self.outcomes.update(other.outcomes)
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self._add_positions(other.per_position)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {name: getattr(self, name) for name in _SUMS} | {
            "outcomes": dict(self.outcomes), "per_position": list(self.per_position),
        }  # fmt: skip

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`."""
        made = cls(**{name: values[name] for name in _SUMS})
        made.outcomes.update(values["outcomes"])
        made.per_position = [int(count) for count in values["per_position"]]
        return made

    def _add_positions(self, counts: Sequence[int]) -> None:
        counts = counts[:MAX_POSITIONS]
        self.per_position += [0] * (len(counts) - len(self.per_position))
        for position, count in enumerate(counts):
            self.per_position[position] += count


_SUMS = (
    "prompt_tokens", "output_tokens", "timed_tokens", "e2e_s", "rounds", "accepted", "proposed",
    "invalid",
)  # fmt: skip


def is_time(value: float | None) -> bool:
    """Whether this is a time that can have passed: a finite number above 0."""
    return value is not None and 0 < value < math.inf
