"""A latency objective: what a request must meet to count as good."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from carryover.config import Config

if TYPE_CHECKING:
    from carryover.bench.records import Request


class Objective(Config):
    """Upper bounds in milliseconds; a good request is whole and within all that are set."""

    ttft_ms: float | None = Field(None, gt=0, description="to the first token")
    tpot_ms: float | None = Field(None, gt=0, description="per further token")
    e2e_ms: float | None = Field(None, gt=0, description="to the last token")

    @model_validator(mode="after")
    def _not_empty(self) -> Objective:
        if self.ttft_ms is None and self.tpot_ms is None and self.e2e_ms is None:
            raise ValueError("an objective needs one of ttft_ms, tpot_ms, e2e_ms")
        return self

    def met_by(self, request: Request) -> bool:
        """Whether a request was good; one of a single token has no TPOT to miss."""
        if not request.ok:
            return False
        tpot_s = request.tpot_s
        bounds = (
            (self.ttft_ms, request.response.ttft_s),
            (self.tpot_ms, 0.0 if tpot_s is None else tpot_s),
            (self.e2e_ms, request.response.latency_s),
        )
        return all(limit is None or 1000 * value <= limit for limit, value in bounds)

    def __str__(self) -> str:
        named = {"TTFT": self.ttft_ms, "TPOT": self.tpot_ms, "end to end": self.e2e_ms}
        return ", ".join(f"{name} <= {v:g} ms" for name, v in named.items() if v is not None)
