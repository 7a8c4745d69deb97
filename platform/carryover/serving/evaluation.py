"""One evaluation of the split: roll back, go to a ramp's next step, or leave everything. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from carryover.serving.changes import State
from carryover.serving.guard import (
    Breach,
    Comparison,
    GuardRules,
    breaches,
    compare_all,
    lacking,
)
from carryover.serving.observations import ArmStatistics

# A ramp does not go on while the arm is known to be worse than the control on one of these.
HOLDING_METRICS = ("error_rate", "tpot_s")

Comparisons = dict[str, dict[str, Comparison]]


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found, and what follows.

    Attributes:
        time_s: seconds since the epoch.
        number: counts the experiment's evaluations from 1.
        decision: `roll back`, `step` (the ramp goes on) or `stay`.
        why: the reason, in a sentence; empty when there is nothing to say.
        broken: rules that an arm in traffic broke.
    """

    time_s: float
    number: int
    decision: Literal["roll back", "step", "stay"]
    why: str
    broken: tuple[Breach, ...] = ()


def evaluate(
    state: State, statistics: dict[str, ArmStatistics], comparisons: Comparisons,
    rules: GuardRules, *, arms: Sequence[str], now: float, number: int, period_s: float,
) -> Evaluation:  # fmt: skip
    """Evaluate the split.

    Args:
        state: in force.
        statistics: by arm.
        comparisons: of these statistics, by `compare_arms`.
        rules: the guard's.
        arms: names of all arms, the control first.
        now: seconds since the epoch.
        number: of this evaluation, from 1.
        period_s: between two evaluations.
    """
    if state.ended or state.traffic.paused:
        return Evaluation(now, number, "stay", "")
    weights = state.traffic.weights
    treatments = {arm: statistics[arm] for arm in arms[1:] if weights[arm] > 0}
    broken = tuple(find_breaches(
        state, treatments, rules, now=now, number=number, period_s=period_s
    ))
    if broken:
        why = "; ".join(breach.text for breach in broken)
        return Evaluation(now, number, "roll back", why, broken)
    if state.ramp is None:
        return Evaluation(now, number, "stay", "")
    why = _why_ramp_waits(state, statistics, comparisons, rules, now=now)
    if why:
        return Evaluation(now, number, "stay", why)
    held = statistics[state.ramp.arm].num_compared
    return Evaluation(
        now, number, "step",
        f"no rule broken at {100 * weights[state.ramp.arm]:g}%; {held} compared requests in all",
    )  # fmt: skip


def find_breaches(
    state: State, statistics: dict[str, ArmStatistics], rules: GuardRules, *, now: float,
    number: int, period_s: float,
) -> list[Breach]:  # fmt: skip
    """Rules that these arms broke since an arm last came into traffic.

    Two windows are looked at, each with half of the rules' alpha: the rules' own, and the last
    evaluation period, in which an arm that breaks is not hidden by what it did well before.
    """
    # An arm that was repaired and put back must not fall to what it did before.
    longest = now - state.evidence_since
    windows = {min(rules.window_s, longest), min(rules.window_s, longest, period_s)}
    found: dict[tuple[str, str], Breach] = {}
    for window_s in sorted(windows, reverse=True):
        if window_s > 0:
            halved = rules.model_copy(
                update={"window_s": window_s, "alpha": rules.alpha / len(windows)}
            )
            for breach in breaches(halved, statistics, now_s=now, evaluation=number):
                found.setdefault((breach.arm, breach.rule), breach)
    return list(found.values())


def compare_arms(
    statistics: dict[str, ArmStatistics], *, arms: Sequence[str], alpha: float
) -> Comparisons:
    """Every arm against the control, on every metric."""
    treatments = {arm: statistics[arm] for arm in arms[1:]}
    return compare_all(statistics[arms[0]], treatments, alpha=alpha) if treatments else {}


def _why_ramp_waits(
    state: State, statistics: dict[str, ArmStatistics], comparisons: Comparisons,
    rules: GuardRules, *, now: float,
) -> str:  # fmt: skip
    """Why the ramp stays at its step; empty if it may go on."""
    ramp = state.ramp
    until = ramp.since + ramp.hold_s
    if now < until:
        return f"held for another {until - now:.0f} s"
    missing = lacking(rules, {ramp.arm: statistics[ramp.arm]}, since_s=ramp.since, now_s=now)
    if missing:
        return "; ".join(missing.values())
    compared = comparisons[ramp.arm]
    worse = [compared[name].why for name in HOLDING_METRICS if compared[name].verdict == "worse"]
    return "; ".join(worse)
