"""What training cost, and after how many served tokens the continuation has paid for itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, nan
from statistics import fmean

from carryover.bench.statistics import Interval
from carryover.results.measured import Measured
from carryover.results.runs import RunRecord

MILLION = 1_000_000


@dataclass(frozen=True)
class TrainingCost:
    """What a training run took.

    Attributes:
        record: of the run.
        kind: `baseline`, `carryover`, `control` or `target`.
        regime: of the drafter; None for a target.
        steps: optimizer steps; None until the run has ended.
        tokens: of the packs seen; None likewise.
        hours: of training; evaluations, checkpoints and the target's states that this run kept on
            disk for itself and others included; None likewise.
        states_hours: of them for those states.
        cores: of all workers.
        gpus: of all workers.
        best_acceptance: held-out acceptance length of the best checkpoint; None without one.
    """

    record: RunRecord
    kind: str
    regime: str | None
    steps: int | None
    tokens: int | None
    hours: float | None
    states_hours: float
    cores: float
    gpus: int
    best_acceptance: float | None

    @property
    def core_hours(self) -> float | None:
        """Hours times cores."""
        return None if self.hours is None else self.hours * self.cores


def training_cost(record: RunRecord) -> TrainingCost:
    """Read what a training run recorded of itself."""
    metrics = record.metrics
    workers = record.param("resources.num_workers") or 1
    cores = int(record.tags.get("carryover.cores", 1))
    # without a number of their own the workers share the machine's cores evenly
    each = record.param("resources.cpus_per_worker") or max(1, cores // workers)

    def count(name: str) -> int | None:
        return int(metrics[name]) if name in metrics else None

    seconds = metrics.get("summary/trained_s")
    states_hours = metrics.get("summary/states_s", 0.0) / workers / 3600
    return TrainingCost(
        record=record,
        kind=record.tags["carryover.training"],
        regime=record.param("regime"),
        steps=count("summary/steps"),
        tokens=count("summary/tokens"),
        hours=None if seconds is None else seconds / 3600 + states_hours,
        states_hours=states_hours,
        cores=each * workers,
        gpus=(record.param("resources.gpus_per_worker") or 0) * workers,
        best_acceptance=metrics.get("summary/best/acceptance_length"),
    )


@dataclass(frozen=True)
class Payback:
    """What the continuation costs against what it saves at one load.

    Attributes:
        regime: of the drafter.
        concurrency: requests in flight.
        continuation: core-hours of Carryover training; mean over seeds.
        control: core-hours of the control's, which carries nothing; None without one.
        per_million: core-hours that the baseline takes for a million output tokens.
        gain: of Carryover's throughput over the baseline's.
        tokens: output tokens after which it has paid; low is the soonest that the interval of the
            gain allows, high the latest, infinite where the gain may be none.
    """

    regime: str
    concurrency: int
    continuation: float
    control: float | None
    per_million: float
    gain: Interval
    tokens: Interval


def payback(measured: Measured, costs: Sequence[TrainingCost]) -> Payback | None:
    """Set the continuation's cost against what one load saves; None where a part is missing.

    Runs that used GPUs have no core-hours worth counting, and give None.
    """
    gain, summary = measured.gains.get("baseline"), measured.summaries.get("baseline")
    cores = measured.seeds[0].run.cores
    spent = _mean_core_hours(costs, measured.regime, "carryover")
    if gain is None or summary is None or not cores or spent is None:
        return None
    speed = summary.output_tokens_per_s.value
    per_million = cores * MILLION / speed / 3600
    ratio = gain.pooled.speedup

    def until(factor: float) -> float:
        if factor != factor:
            return nan
        saved = per_million * (1 - 1 / factor)
        return spent / saved * MILLION if saved > 0 else inf

    tokens = Interval(until(ratio.value), until(ratio.high), until(ratio.low))
    control = _mean_core_hours(costs, measured.regime, "control")
    return Payback(
        measured.regime, measured.condition.concurrency, spent, control, per_million, ratio, tokens
    )


def _mean_core_hours(costs: Sequence[TrainingCost], regime: str, kind: str) -> float | None:
    found = [
        cost.core_hours
        for cost in costs
        if cost.kind == kind and cost.regime == regime and cost.core_hours is not None
        and not cost.gpus and cost.record.finished
    ]  # fmt: skip
    return fmean(found) if found else None
