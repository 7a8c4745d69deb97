"""What is kept of finished requests: one record each, and aggregates of bounded size.

Pure. The ingress makes an `Observation` per request and arm, the controller adds them to
`Statistics`, which the guard compares, the terminal shows and the report draws.

**Compared** are requests whose arm was chosen by chance: reason "weighted" or "sticky", not a
shadow. Everything else (header overrides, requests by an arm's name, fall-backs that another arm
took over, shadows) is counted apart. A request that arm A was assigned and failed to serve, and
that arm B then answered, makes two observations: `arm=A, assigned=A, outcome="fallback"`, which
counts as A's failure, and `arm=B, assigned=A, reason="fallback", outcome="ok"`, kept apart on B.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

OUTCOMES = ("ok", "error", "shed", "timeout", "disconnected", "fallback")
# An answer that the client did not get from the arm. A client that went away is no failure.
FAILURES = frozenset({"error", "shed", "timeout", "fallback"})
COMPARED_REASONS = frozenset({"weighted", "sticky"})
KINDS = ("compared", "override", "fallback", "shadow")


@dataclass(frozen=True, slots=True)
class Observation:
    """One finished request on one arm.

    `unit` is a hash of the sticky key (None without one): requests of one key go together in the
    statistics, because they are alike. `split` names the weights in force when the arm was chosen
    (`split_name`): arms are compared within a split only, because over time both the weights and
    the traffic change. Times are in seconds; `time_s` is the epoch time at the end; `tpot_s` is
    None below two output tokens. `accepted` counts proposals accepted over `rounds`;
    `accepted_per_position[k]` counts rounds that accepted at least k + 1.
    """

    time_s: float
    arm: str
    assigned: str
    reason: str
    split: str
    outcome: str
    shadow: bool = False
    label: str | None = None
    unit: str | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    rounds: int = 0
    accepted: int = 0
    proposed: int = 0
    accepted_per_position: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        """One of `KINDS`; only "compared" takes part in comparisons."""
        raise NotImplementedError

    def to_row(self) -> list[Any]:
        """The fields in order, as JSON can hold them."""
        raise NotImplementedError

    @classmethod
    def from_row(cls, row: Iterable[Any]) -> Self:
        """Inverse of `to_row`.

        Raises:
            ValueError: not as many fields, or an outcome that does not exist.
        """
        raise NotImplementedError


def split_name(weights: Mapping[str, float]) -> str:
    """One name for equal weights, whatever their order and sum: "baseline=0.9 carryover=0.1"."""
    raise NotImplementedError


class ArmStatistics:
    """All that is known of one arm; bounded memory, mergeable, JSON-able.

    Attributes:
        totals: `Totals` by kind (see `KINDS`).
        by_label: `Totals` of compared requests by label (at most 64 labels, then "(other)").
        recent: the last compared requests, for percentiles and guard rules.
    """

    def add(self, observation: Observation) -> None:
        """Count one request; its `arm` must be this one."""
        raise NotImplementedError

    def merge(self, other: Self) -> None:
        """Add all that `other` counted."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """As plain dicts, lists, strings and finite numbers."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`."""
        raise NotImplementedError

    @property
    def num_compared(self) -> int:
        """Requests that take part in comparisons."""
        raise NotImplementedError

    def summary(self) -> dict[str, Any]:
        """One row of a table: NaN where there is nothing to say.

        Keys: requests, failures, error_rate, disconnected, ttft_p50_s, ttft_p95_s, tpot_p50_s,
        tpot_p95_s, e2e_p50_s, e2e_p95_s, output_tokens, output_tokens_per_s, acceptance_length,
        acceptance_per_position (list), overrides, fallbacks_taken, shadows.
        Percentiles are of the recent window, the rest of the whole experiment.
        """
        raise NotImplementedError


class History:
    """Aggregates per arm and interval since the start, for plots over time.

    At most `max_intervals` intervals: when they are used up, neighbours are merged and the
    interval doubles, so the history always spans the experiment in bounded memory.
    """

    def __init__(self, *, interval_s: float = 10.0, max_intervals: int = 240) -> None:
        raise NotImplementedError

    def add(self, observation: Observation) -> None:
        """Count one request in its interval (requests older than the first go to the first)."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """As plain dicts, lists, strings and finite numbers."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`."""
        raise NotImplementedError


class Statistics:
    """Everything observed in one experiment: an `ArmStatistics` per arm, and the `History`."""

    arms: dict[str, ArmStatistics]
    history: History

    def __init__(self, arms: Iterable[str], *, interval_s: float = 10.0) -> None:
        raise NotImplementedError

    def add(self, observations: Iterable[Observation]) -> int:
        """Count requests; returns how many named an arm that does not exist (they are dropped)."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """As plain dicts, lists, strings and finite numbers."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`.

        Raises:
            ValueError: not a mapping that `to_json` made.
        """
        raise NotImplementedError
