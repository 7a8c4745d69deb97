"""What a sweep's measurements answer: which setting at which load, and what it gains; pure.

Throughput is compared at equal load and equal engine values. Brackets of a gain join the intervals
of two separately measured throughputs, so they are wider than those of a paired bench.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, isfinite, log, nan
from typing import Literal

from carryover.serving.config import ServeConfig
from sweeps.halving import overall, rate_under_limit
from sweeps.settings import Load, Setting, SweepConfig, settings_of


@dataclass(frozen=True)
class Point:
    """One setting at one load.

    Attributes:
        setting: which.
        load: of the clients.
        rate: output tokens/s.
        low: of its 95% interval; NaN if there is none.
        high: likewise.
        tpot_ms: 95th percentile; NaN if not known.
        acceptance_length: NaN without a drafter.
    """

    setting: Setting
    load: Load
    rate: float
    low: float = nan
    high: float = nan
    tpot_ms: float = nan
    acceptance_length: float = nan


@dataclass(frozen=True)
class Gain:
    """Throughput of a setting over that of another at the same load.

    Attributes:
        point: of the setting.
        ratio: above 1 is faster.
        low: of the joined intervals; NaN if one is missing.
        high: likewise.
    """

    point: Point
    ratio: float
    low: float
    high: float

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out 1."""
        return self.low > 1 or self.high < 1


@dataclass(frozen=True)
class Crossing:
    """Where a setting stops paying as the number of clients grows, at one temperature.

    Attributes:
        setting: its name.
        temperature: of the requests.
        kind: it pays at every load, at none, or up to `concurrency`.
        concurrency: interpolated between measured ones; the highest measured one if it pays always.
    """

    setting: str
    temperature: float
    kind: Literal["always", "never", "until"]
    concurrency: float

    @property
    def text(self) -> str:
        """In words."""
        if self.kind == "always":
            return f"pays up to {self.concurrency:g} clients, the most that were measured"
        if self.kind == "never":
            return "pays at no load that was measured"
        return f"pays up to about {self.concurrency:.3g} clients"


@dataclass(frozen=True)
class Choice:
    """The best setting at one load.

    Attributes:
        point: of the setting with the highest throughput that counts.
        speedup: over decoding without a drafter; None if that was not measured.
        over_limit: whether even this one is over the TPOT limit.
    """

    point: Point
    speedup: Gain | None
    over_limit: bool


def points_of(
    config: SweepConfig, figures: Mapping[str, Mapping[tuple, tuple[float, ...]]]
) -> list[Point]:
    """The measurements of a sweep's settings and loads, from `Ledger.figures`."""
    loads = config.loads()
    return [
        Point(setting, load, *figures[setting.name][load.temperature, load.concurrency])
        for setting in settings_of(config)
        for load in loads
        if (load.temperature, load.concurrency) in figures.get(setting.name, {})
    ]


def counted(config: SweepConfig, point: Point) -> float:
    """Throughput that counts: little of it where TPOT is over the limit."""
    return rate_under_limit(point.rate, point.tpot_ms, config.objective.max_tpot_p95_ms)


def choose(config: SweepConfig, points: Iterable[Point]) -> list[Choice]:
    """For each load that was measured, the setting to deploy there."""
    points = list(points)
    gains = {(g.point.setting.name, g.point.load): g for g in gains_over_plain(points)}
    limit = config.objective.max_tpot_p95_ms
    choices = []
    for load in sorted({point.load for point in points}):
        here = [point for point in points if point.load == load]
        best = max(here, key=lambda point: counted(config, point))
        over = limit is not None and isfinite(best.tpot_ms) and best.tpot_ms > limit
        choices.append(Choice(best, gains.get((best.setting.name, load)), over))
    return choices


def recommend(config: SweepConfig, points: Iterable[Point]) -> Setting | None:
    """The one setting for all loads: highest geometric mean of what counts, all loads measured."""
    rates: dict[Setting, list[float]] = {}
    for point in points:
        rates.setdefault(point.setting, []).append(counted(config, point))
    whole = {s: overall(each) for s, each in rates.items() if len(each) == len(config.loads())}
    return max(whole, key=whole.__getitem__, default=None)


def application_for(config: SweepConfig, setting: Setting) -> ServeConfig:
    """An application that serves a setting, beside decoding without a drafter if that was swept."""
    plain = [arm for arm in config.serve.arms if arm.drafter is None and arm.name != setting.arm]
    return setting.application(config.serve, beside=plain[:1])


def gains_over_plain(points: Sequence[Point]) -> list[Gain]:
    """Every setting with a drafter over decoding without one."""
    plain = {(p.setting.engine, p.load): p for p in points if p.setting.drafter is None}
    return [
        _gain(point, plain[point.setting.engine, point.load])
        for point in points
        if (point.setting.engine, point.load) in plain
    ]


def gains_over_baseline(config: SweepConfig, points: Sequence[Point]) -> list[Gain]:
    """Every drafter over the baseline drafter at the same proposal length."""
    baseline = baseline_of(config)
    if baseline is None:
        return []

    def key(point: Point) -> tuple:
        return point.setting.num_speculative_tokens, point.setting.engine, point.load

    base = {key(p): p for p in points if p.setting.arm == baseline}
    return [
        _gain(point, base[key(point)])
        for point in points
        if point.setting.drafter is not None
        and point.setting.arm != baseline
        and key(point) in base
    ]


def gains_by_title(config: SweepConfig, points: Sequence[Point]) -> dict[str, dict[str, float]]:
    """Gains of each measurement, for its record, by its title."""
    found: dict[str, dict[str, float]] = {}
    named = {
        "gain_over_no_drafter": gains_over_plain(points),
        "gain_over_baseline": gains_over_baseline(config, points),
    }
    for name, gains in named.items():
        for gain in gains:
            title = f"{gain.point.setting.name} {gain.point.load.title}"
            if isfinite(gain.ratio):
                found.setdefault(title, {})[name] = gain.ratio
    return found


def baseline_of(config: SweepConfig) -> str | None:
    """The arm that drafters are compared with; None where there is one drafter or none."""
    drafting = [arm.name for arm in config.serve.arms if arm.drafter is not None]
    if len(drafting) < 2:
        return None
    return config.baseline or drafting[0]


def _gain(point: Point, base: Point) -> Gain:
    ratio = point.rate / base.rate if base.rate > 0 else nan
    low = point.low / base.high if base.high > 0 else nan
    high = point.high / base.low if base.low > 0 else nan
    return Gain(point, ratio, low, high)


def crossings(gains: Iterable[Gain]) -> list[Crossing]:
    """Where each setting stops paying at each temperature; it needs two loads to tell."""
    curves: dict[tuple[str, float], list[tuple[int, float]]] = {}
    for gain in gains:
        if gain.point.setting.drafter is not None and isfinite(gain.ratio):
            key = gain.point.setting.name, gain.point.load.temperature
            curves.setdefault(key, []).append((gain.point.load.concurrency, gain.ratio))
    return [_crossing(*key, sorted(curve)) for key, curve in curves.items() if len(curve) > 1]


def _crossing(setting: str, temperature: float, curve: list[tuple[int, float]]) -> Crossing:
    if curve[-1][1] >= 1:
        return Crossing(setting, temperature, "always", curve[-1][0])
    for (few, before), (many, after) in zip(curve[-2::-1], curve[::-1], strict=False):
        if before >= 1:
            # both fall nearly straight on logarithmic axes
            share = log(before) / (log(before) - log(after))
            at = exp(log(few) + share * (log(many) - log(few)))
            return Crossing(setting, temperature, "until", at)
    return Crossing(setting, temperature, "never", nan)


def pareto(points: Iterable[Point]) -> list[Point]:
    """Points that no other beats in both throughput and TPOT, fastest per client first."""
    known = [point for point in points if isfinite(point.tpot_ms) and point.tpot_ms > 0]
    front: list[Point] = []
    for point in sorted(known, key=lambda point: (point.tpot_ms, -point.rate)):
        if not front or point.rate > front[-1].rate:
            front.append(point)
    return front
