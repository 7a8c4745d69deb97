"""The record of one finished request on one arm, and which records take part in comparisons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from math import isfinite
from operator import attrgetter
from typing import Any, Self

OUTCOMES = ("ok", "error", "shed", "timeout", "disconnected", "fallback")
# An answer that the client did not get from the arm. A client that went away is no failure.
FAILURES = frozenset({"error", "shed", "timeout", "fallback"})
COMPARED_REASONS = frozenset({"weighted", "sticky"})
KINDS = ("compared", "override", "fallback", "shadow")


@dataclass(frozen=True, slots=True)
class Observation:
    """One finished request on one arm.

    **Compared** are requests whose arm was chosen by chance (reason "weighted" or "sticky") and
    that this arm had to answer. A request that arm A was assigned and did not serve, because it
    failed or was known to be down, and that arm B then answered, makes two observations: `arm=A,
    assigned=A, outcome="fallback"`, which counts as A's failure, and `arm=B, assigned=A,
    reason="fallback"`, which is kept apart on B.

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
        if self.shadow:
            return "shadow"
        if self.reason == "fallback" or self.arm != self.assigned:
            return "fallback"
        return "compared" if self.reason in COMPARED_REASONS else "override"

    @property
    def failed(self) -> bool:
        """Whether the arm owed an answer and did not give it."""
        return self.outcome in FAILURES

    def to_row(self) -> list[Any]:
        """The fields in order, as JSON can hold them."""
        row = list(_VALUES(self))
        row[-1] = list(row[-1])
        return row

    @classmethod
    def from_row(cls, row: Iterable[Any]) -> Self:
        """Inverse of `to_row`.

        Raises:
            ValueError: not as many fields, a time that is no number, a negative count, or an
                outcome that does not exist.
        """
        values = list(row)
        if len(values) != len(_NAMES):
            raise ValueError(f"an observation has {len(_NAMES)} fields, got {len(values)}")
        values[-1] = tuple(values[-1])
        made = cls(*values)
        if not isfinite(made.time_s):
            raise ValueError(f"time_s must be a number, got {made.time_s}")
        if made.outcome not in OUTCOMES:
            raise ValueError(f"outcome must be one of {', '.join(OUTCOMES)}, got {made.outcome!r}")
        counts = (made.prompt_tokens, made.output_tokens, made.rounds, made.accepted, made.proposed)
        if min(*counts, *made.accepted_per_position, 0) < 0:
            raise ValueError(f"counts must be at least 0, got {counts}")
        return made


_NAMES = [field.name for field in fields(Observation)]
_VALUES = attrgetter(*_NAMES)


def split_name(weights: Mapping[str, float]) -> str:
    """One name for equal weights, whatever their order and sum: "baseline=0.9 carryover=0.1"."""
    total = sum(weights.values())
    shares = {arm: weight / total for arm, weight in sorted(weights.items()) if weight > 0}
    return " ".join(f"{arm}={share:.4g}" for arm, share in shares.items())
