"""Bench a running endpoint: the same prompts on every arm, at given loads.

Closed loop: `concurrency` clients send a prompt each (the first user turn of its row), and the next
when they have their answer. Open loop: requests arrive at a rate, by a Poisson process with the
same arrivals on every arm, however long answers take. Prompts go out in blocks; each block is
answered by every arm, one after the other, in an order drawn anew (see `bench.workload`). An arm is
measured alone, as it would run alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from carryover.bench.arms import check_roles, find_arms
from carryover.bench.ledger import load_settings
from carryover.bench.measure import Progress
from carryover.bench.online_backend import connected
from carryover.bench.records import Condition
from carryover.bench.result import BenchResult
from carryover.bench.session import Bench, run_bench
from carryover.bench.sets import read_workload
from carryover.bench.settings import BenchConfig, Many, Positive
from carryover.engine import drafter_config
from carryover.errors import CheckpointError, ConfigError
from carryover.runtime import has_gpu
from carryover.tracking import Tracker

__all__ = ["BenchResult", "OnlineConfig", "run"]


class OnlineConfig(BenchConfig):
    """Settings of an online bench."""

    url: str = Field(
        default="http://127.0.0.1:8000", description="of the endpoint, with or without /v1"
    )
    arms: list[str] | None = Field(default=None, description="model ids; null takes every arm")
    concurrency: Many[int] = Field(
        default=(1,), description="requests in flight, one or more numbers; [] with rates alone"
    )
    rate: Many[Positive] = Field(
        default=(), description="requests per second of an open loop, one or more; [] for none"
    )
    cold_prefixes: bool = Field(
        default=True, description="give every request a cache salt of its own, so that none finds "
        "a prefix that another arm or load left in the cache",
    )  # fmt: skip
    request_timeout_s: float = Field(default=600.0, gt=0)
    metrics_url: str | None = Field(
        default=None, description="page with vLLM's counters, to check acceptance against; null: "
        "the endpoint's own /metrics, if it has one",
    )  # fmt: skip

    @model_validator(mode="after")
    def _has_loads(self) -> OnlineConfig:
        if not self.concurrency and not self.rate:
            raise ValueError("give at least one concurrency or rate")
        if any(value < 1 for value in self.concurrency):
            raise ValueError(f"concurrency starts at 1, got {list(self.concurrency)}")
        return self

    @property
    def base_url(self) -> str:
        """The endpoint without `/v1`."""
        return self.url.rstrip("/").removesuffix("/v1").rstrip("/")

    @property
    def conditions(self) -> list[Condition]:
        """All combinations of temperature and load."""
        loads = [{"concurrency": c} for c in self.concurrency]
        loads += [{"concurrency": None, "rate": rate} for rate in self.rate]
        return [Condition("online", t, **load) for t in self.temperature for load in loads]


def run(
    config: OnlineConfig | None = None,
    *,
    tracker: Tracker | None = None,
    on_progress: Progress | None = None,
    on_partial: Callable[[BenchResult], None] | None = None,
    resume: Path | None = None,
) -> BenchResult:
    """Measure the arms of an endpoint.

    Args:
        config: what to measure; None with `resume`.
        tracker: where to record it: a parent run and a child for each arm and condition; None
            records nothing.
        on_progress: called after every request with requests done, requests in all, and the arm.
        on_partial: given what is finished when Ctrl-C or an error ends the bench.
        resume: folder of a bench that was cut short, to go on with under its own settings.

    Raises:
        ConfigError: unknown arms, or settings of the arms that differ beyond the drafter.
        DataError: the prompts cannot be read.
        ServingError: the endpoint does not answer or stops answering, or too many requests failed.
    """
    if config is None:
        if resume is None:
            raise ConfigError("an online bench needs settings, or a folder to resume")
        config = load_settings(resume, OnlineConfig)
    arms = find_arms(config.base_url, wanted=config.arms)
    check_roles(arms, reference=config.reference, baseline=config.baseline)
    bench = Bench(
        config=config,
        mode="online",
        arms={arm: _described(about) for arm, about in arms.items()},
        prompts=read_workload(config.prompts, folder=config.prompts_folder),
        conditions=config.conditions,
        connect=lambda _: connected(config),
        tags={"carryover.url": config.base_url},
    )
    return run_bench(
        bench, tracker=tracker, on_progress=on_progress, on_partial=on_partial, resume=resume
    )


def _described(about: dict[str, Any]) -> dict[str, Any]:
    """What the endpoint tells, and the kind of drafter if its folder can be read from here."""
    if not about:
        return {}
    method = None
    if about.get("drafter"):
        with suppress(CheckpointError):
            method = drafter_config(about["drafter"], num_speculative_tokens=1)["method"]
    dtype = (about.get("engine") or {}).get("dtype")
    if dtype == "auto" and not has_gpu():
        dtype = "float32"
    return {**about, "dtype": dtype, "method": method}
