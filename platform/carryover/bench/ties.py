"""What is behind texts that differ at temperature 0: a near-tie of two tokens, or something worse.

Floating-point sums depend on the shapes of a batch, so two correct engines may part where the two
likeliest tokens are nearly equally likely. A prompt with different texts is asked once more on
both arms, alone and outside of anything measured, with the probabilities of the tokens; the gap is
read where the two answers part. Pure: values in, values out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from carryover.bench.client import Choice

FLOAT32_NATS = 0.01
HALF_NATS = 0.25


@dataclass(frozen=True)
class Ties:
    """Differing texts of one arm, by cause.

    Attributes:
        threshold_nats: gaps up to this are near-ties.
        gaps: of those that parted again, in nats: the reference's token less the arm's.
        same_again: prompts whose texts were equal when asked alone: an effect of the batch.
        unknown: not looked into, or the server gives no probabilities.
    """

    threshold_nats: float
    gaps: list[float] = field(default_factory=list)
    same_again: int = 0
    unknown: int = 0

    @property
    def near(self) -> int:
        """How many are near-ties."""
        return sum(abs(gap) <= self.threshold_nats for gap in self.gaps)

    @property
    def wide(self) -> int:
        """How many are not: the arm wrote a token that the reference finds clearly worse."""
        return len(self.gaps) - self.near

    def metrics(self) -> dict[str, float]:
        """Flat figures for MLflow."""
        return {
            "near_ties": self.near, "wide_differences": self.wide,
            "same_when_asked_again": self.same_again, "unexplained_differences": self.unknown,
        }  # fmt: skip

    def __str__(self) -> str:
        parts = [
            f"{self.near} near-ties (gap up to {self.threshold_nats:g} nats)" if self.near else "",
            f"{self.wide} with a wider gap (up to {max(map(abs, self.gaps), default=0):.2g} nats)"
            if self.wide
            else "",
            f"{self.same_again} the same when asked alone" if self.same_again else "",
            f"{self.unknown} not explained" if self.unknown else "",
        ]
        return ", ".join(part for part in parts if part)


def parting_gap(reference: Sequence[Choice], other: Sequence[Choice]) -> float | None:
    """How much likelier the reference's token was than the other's where two answers part.

    Args:
        reference: tokens of the reference arm's answer.
        other: tokens of another arm's answer to the same prompt.

    Returns:
        The gap in nats by the reference's probabilities; None if the answers do not part. Where
        the other's token is not among the likeliest, the gap to the last of those: a lower bound.
    """
    for ours, theirs in zip(reference, other, strict=False):
        if ours.token != theirs.token:
            least = min(ours.others.values(), default=float("-inf"))
            return ours.logprob - ours.others.get(theirs.token, least)
    return None


def default_threshold(dtype: str) -> float:
    """Gap in nats up to which a difference is the arithmetic's doing."""
    return FLOAT32_NATS if "32" in dtype else HALF_NATS
