"""What is let in to an arm: bounded requests in flight, and no requests for an arm that is down.

Pure counting, one object per ingress replica, used from its event loop alone: no locks.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

from pydantic import Field

from carryover.config import Config

# Failures in a row after which an arm counts as down, if none of them says so by itself.
_FAILURES = 3


class IngressConfig(Config):
    """The `ingress:` section: the front of the application, and what it lets in."""

    replicas: int = Field(default=1, ge=1, description="Of the front; each takes about one core.")
    max_body_bytes: int = Field(
        default=8 * 2**20, ge=1024, description="A longer request is refused with 413."
    )
    max_tokens: int | None = Field(
        default=None, ge=1,
        description="The most that a request may ask for; null: what the target allows.",
    )  # fmt: skip
    request_timeout_s: float = Field(
        default=600.0, gt=0,
        description="To the whole answer, or, of a stream, between two of its chunks.",
    )  # fmt: skip
    max_shadows: int = Field(
        default=16, ge=1, description="Shadow requests in flight; more are left out."
    )
    allowed_origins: list[str] = Field(
        default=[], description="Web pages that may ask from a browser (CORS); '*' is any."
    )


class Gate:
    """Requests in flight on each arm, as one ingress replica sees them.

    Args:
        arms: names.
        limit: requests in flight on one arm, over all ingress replicas.
        replicas: of the ingress; each takes its part of the limit.
    """

    def __init__(self, arms: Iterable[str], *, limit: int, replicas: int = 1) -> None:
        self.limit = max(1, ceil(limit / replicas))
        self.in_flight = dict.fromkeys(arms, 0)
        self.total = 0
        # Bodies that are still being read count too: memory must stay bounded.
        self.total_limit = self.limit * (len(self.in_flight) + 1)

    def enter(self, arm: str) -> bool:
        """Count a request in; False, with nothing counted, if the arm is full."""
        if self.in_flight[arm] >= self.limit:
            return False
        self.in_flight[arm] += 1
        return True

    def leave(self, arm: str) -> None:
        """Count a request out."""
        self.in_flight[arm] -= 1

    def is_full(self, arm: str) -> bool:
        """Whether the arm takes no more."""
        return self.in_flight[arm] >= self.limit


class Health:
    """Which arms answer. An arm that is down gets no requests until a probe of it succeeds.

    Attributes:
        down: why, by arm that is down.
    """

    def __init__(self) -> None:
        self.down: dict[str, str] = {}
        self._failures: dict[str, int] = {}

    def succeeded(self, arm: str) -> None:
        """A request was answered."""
        if self._failures:
            self._failures.pop(arm, None)

    def failed(self, arm: str, why: str, *, definite: bool) -> bool:
        """A request was not answered.

        Args:
            arm: its name.
            why: for the log.
            definite: whether the arm is known to be down; else several in a row say so.

        Returns:
            Whether the arm went down by this.
        """
        if arm in self.down:
            return False
        count = self._failures[arm] = self._failures.get(arm, 0) + 1
        if not definite and count < _FAILURES:
            return False
        self.down[arm] = why
        return True

    def recovered(self, arm: str) -> bool:
        """A probe succeeded; returns whether the arm had been down."""
        self._failures.pop(arm, None)
        return self.down.pop(arm, None) is not None
