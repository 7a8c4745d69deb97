"""What Carryover is held to on a real model, and whether it was reached. Pure: figures in, words
out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from carryover.bench.html import plain
from carryover.bench.statistics import Interval
from carryover.results.markdown import percent

BASELINE_ACCEPTANCE = 2.0
GAINS = {"baseline": 1.065, "control": 1.04}
SPEEDUP = 2.0
CONCURRENCIES = (1, 32)
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Verdict:
    """Whether a goal was reached.

    Attributes:
        goal: in words.
        measured: the figure, or `not measured`.
        verdict: `met`, `missed` with by how much, or `not measured`.
        met: None where it was not measured.
    """

    goal: str
    measured: str
    verdict: str
    met: bool | None


def baseline_acceptance(found: Interval | None) -> Verdict:
    """Is the baseline drafter good enough for its rejections to be worth carrying?"""
    goal = f"baseline acceptance length at T=0, offline: at least {BASELINE_ACCEPTANCE:.1f}"
    return _at_least(goal, found, BASELINE_ACCEPTANCE, plain(found, 2))


def acceptance_gain(other: str, found: Interval | None) -> Verdict:
    """Does Carryover accept that much more than another arm, beyond chance?

    Args:
        other: `baseline` or `control`.
        found: ratio of acceptance lengths, paired over prompts.
    """
    bound = GAINS[other]
    goal = (
        f"acceptance gain over the {other} at T=0, offline: at least {100 * (bound - 1):+.1f}%, "
        "interval without 0"
    )
    if found is None:
        return _absent(goal)
    said = []
    if found.value < bound:
        said.append(f"by {100 * (bound - found.value):.1f} points")
    if not found.low > 1:
        said.append("the interval has 0 in it" if found.bounded else "there is no interval")
        if found.bounded and found.high < 1:
            said[-1] = "it loses"
    return Verdict(goal, percent(found), _missed(said), not said)


def online_speedup(arms: Mapping[str, Interval]) -> Verdict:
    """Is the best arm fast enough against the target alone?

    Args:
        arms: speed-up at concurrency 1, by arm.
    """
    goal = f"speed-up of the best arm at concurrency 1, T=0, online: at least {SPEEDUP:.1f}x"
    if not arms:
        return _absent(goal)
    best = max(arms, key=lambda arm: arms[arm].value)
    shown = f"{plain(arms[best], 2, 'x')} ({best})"
    return _at_least(goal, arms[best], SPEEDUP, shown, unit="x")


def gain_at_every_load(gains: Mapping[int, Interval]) -> Verdict:
    """Is Carryover faster than the baseline at every number of clients, beyond chance?

    Args:
        gains: ratio of output tokens/s, paired over prompts, by concurrency.
    """
    first, last = CONCURRENCIES
    goal = (
        f"throughput gain over the baseline at every concurrency {first}..{last}, T=0, online: "
        "above 0, interval without 0"
    )
    if not gains:
        return _absent(goal)
    lowest = min(gains, key=lambda load: gains[load].value)
    shown = f"at {', '.join(map(str, sorted(gains)))}; lowest {percent(gains[lowest])} at {lowest}"
    said = []
    for load, gain in sorted(gains.items()):
        if gain.value <= 1:
            said.append(f"by {100 * (1 - gain.value):.1f} points at {load}")
        elif not gain.low > 1:
            said.append(f"the interval at {load} has 0 in it")
    absent = [load for load in CONCURRENCIES if load not in gains]
    if absent and not said:
        text = f"{NOT_MEASURED} at {' and '.join(map(str, absent))}; above 0 at all others"
        return Verdict(goal, shown, text, None)
    return Verdict(goal, shown, _missed(said), not said)


def doubted(verdict: Verdict, *, invalid: bool, partial: bool) -> Verdict:
    """The verdict in the light of the runs that it rests on."""
    if verdict.met is None and verdict.measured == NOT_MEASURED:
        return verdict
    if invalid:
        return Verdict(verdict.goal, verdict.measured, "not measured: the run is INVALID", None)
    if partial:
        text = f"{verdict.verdict} (PARTIAL run)"
        return Verdict(verdict.goal, verdict.measured, text, verdict.met)
    return verdict


def _at_least(
    goal: str, found: Interval | None, bound: float, shown: str, *, unit: str = ""
) -> Verdict:
    if found is None:
        return _absent(goal)
    said = [] if found.value >= bound else [f"by {bound - found.value:.2f}{unit}"]
    return Verdict(goal, shown, _missed(said), not said)


def _absent(goal: str) -> Verdict:
    return Verdict(goal, NOT_MEASURED, NOT_MEASURED, None)


def _missed(said: Sequence[str]) -> str:
    return f"missed: {'; '.join(said)}" if said else "met"
