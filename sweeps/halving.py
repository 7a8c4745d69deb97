"""Scores of settings, and which of them are not worth measuring at more loads; pure.

Asynchronous successive halving (ASHA) with loads as its resource: all settings are measured at the
same loads in the same order, and after `after_loads`, then each time the count has grown by the
factor, only the best 1/factor of those that came so far go on. A setting is judged by the load that
suits it best: a long proposal may be the answer at one client and hopeless at thirty-two, and is
only stopped if it is far from the best at every load so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import exp, isfinite, log
from statistics import fmean

from sweeps.settings import EarlyStop

# how much of its throughput a load counts that is over the TPOT limit
OVER_LIMIT = 0.01


def rate_under_limit(rate: float, tpot_ms: float, limit_ms: float | None) -> float:
    """Throughput that counts: a hundredth of it where TPOT is over the limit.

    Not zero, so that settings over the limit at some load can still be ranked by the others.
    """
    over = limit_ms is not None and isfinite(tpot_ms) and tpot_ms > limit_ms
    return rate * OVER_LIMIT if over else rate


def overall(rates: Iterable[float]) -> float:
    """Geometric mean, so that a load of few clients weighs as much as one of many."""
    rates = list(rates)
    if not rates or min(rates) <= 0:
        return 0.0
    return exp(fmean(log(rate) for rate in rates))


def rungs(rule: EarlyStop, num_loads: int) -> list[int]:
    """After how many loads a setting is judged; never after the last."""
    found, at = [], float(rule.after_loads)
    while at < num_loads:
        found.append(int(at))
        at *= rule.reduction_factor
    return list(dict.fromkeys(found))


def best_share(rates: Mapping[tuple, float], best: Mapping[tuple, float]) -> float:
    """A setting's throughput over the best there is, at the load where this is highest."""
    return max((rate / best[load] for load, rate in rates.items() if best[load] > 0), default=0.0)


def why_stop(
    setting: str,
    measured: Mapping[str, Mapping[tuple, float]],
    loads: Sequence[tuple],
    rule: EarlyStop,
    *,
    spared: Iterable[str] = (),
) -> str | None:
    """Why a setting is not to be measured at more loads; None if it goes on.

    Args:
        setting: which has just been measured at one more load.
        measured: throughput by setting and load.
        loads: all, in the order in which they are measured.
        rule: of the sweep.
        spared: never stopped, nor compared with: settings that others are divided by.
    """
    here, spared = measured.get(setting, {}), set(spared)
    count = len(here)
    if setting in spared or count not in rungs(rule, len(loads)):
        return None
    rung = loads[:count]
    came = {
        name: {load: rates[load] for load in rung}
        for name, rates in measured.items()
        if name not in spared and all(load in rates for load in rung)
    }
    if setting not in came or len(came) < rule.reduction_factor:
        return None
    best = {load: max(rates[load] for rates in came.values()) for load in rung}
    scores = {name: best_share(rates, best) for name, rates in came.items()}
    rank = 1 + sum(score > scores[setting] for score in scores.values())
    if rank <= max(1, int(len(came) / rule.reduction_factor)):
        return None
    if scores[setting] >= 1 - rule.margin:
        return None
    return (
        f"at none of its first {count} loads within {rule.margin:.0%} of the best "
        f"(at most {scores[setting]:.0%} of it), and only number {rank} of {len(came)}"
    )


def why_stop_at(
    setting: str, curves: Mapping[str, Mapping[int, float]], first: int, factor: float
) -> str | None:
    """Why a training is not to go on after its last evaluation; None if it goes on.

    Args:
        setting: which has just been evaluated.
        curves: by setting, what is to be large by step.
        first: step of the first decision; the next ones are at its multiples by the factor.
        factor: of those that came to a decision, the best 1/factor go on.
    """
    steps = sorted(curves[setting])
    before = steps[-2] if len(steps) > 1 else 0
    rung = float(first)
    while rung * factor <= steps[-1]:
        rung *= factor
    if not before < rung <= steps[-1]:
        return None
    came = {
        name: next(value for step, value in sorted(curve.items()) if step >= rung)
        for name, curve in curves.items()
        if curve and max(curve) >= rung
    }
    rank = 1 + sum(value > came[setting] for value in came.values())
    if len(came) < factor or rank <= max(1, int(len(came) / factor)):
        return None
    return f"at step {steps[-1]} only number {rank} of {len(came)}"
