"""Is an arm better, worse, or is it too early to say; and must it be taken out of traffic. Pure.

**Verdicts** (`compare`, `compare_all`) are valid whenever and however often they are looked at, and
may be acted on the moment they appear: the interval is a confidence sequence, so the chance that it
*ever* leaves out the truth is at most alpha, where an ordinary interval that is watched leaves it
out sooner or later. An arm is "better" or "worse" when the interval leaves out zero. The method,
with sources, is in `sequential.py`. It assumes that

- chance decided the arm, by weights (so only requests of reason "weighted" or "sticky" count);
- requests of different keys are independent given the arm and the traffic at that time, apart from
  disturbances short against the experiment's length (all that happens within a block of time, at
  least 10 s and about a 64th of the experiment, may hang together; in simulation, heavy stalls of
  one arm for 20 s at a time raised 5% false alarms at most, stalls of 30 s up to 11%, nearly all of
  them in the first minutes);
- there are enough units for sums to be about normal: no verdict is given before the smaller arm has
  the equivalent of 20 units and of 10 blocks of time, so in the first 100 s there is none.

Metrics: **acceptance_length**, pooled over rounds (1 + accepted / rounds), as a relative change;
**ttft_s, tpot_s, e2e_s**, geometric means over answers, as relative changes: a mean of logarithms
is not at the mercy of a few very slow requests (what happens in the tail is for the p95 rules
below); **error_rate**, failures (error, timeout, shed, taken over by another arm) per request, as a
difference. Latencies are those of answers given: read them beside the error rate, since an arm that
drops its slow requests looks fast. And they are those of the arm as it runs now: an arm with a
small share of the traffic and as many replicas is less loaded, and faster for that reason alone.
Acceptance does not depend on load.

**Rules** (`breaches`) hold an arm to fixed limits by the requests of a recent window, because an
arm that was fine for a week and breaks now must go now. Every rule is a test of "the arm keeps the
limit" on that window: error rate and p95 by the exact binomial distribution (p95 over the limit
means that more than 5% of the answers exceed it, whatever the distribution of latencies); the
acceptance floor by the self-normalised sum of what each group of keys falls short (de la Peña 1999:
P(S >= x sqrt(sum of squares)) <= exp(-x^2 / 2) for symmetric terms). The j-th evaluation may err
with a chance of alpha / (rules x arms x j (j + 1)), which sums to alpha over any number of
evaluations. That costs little: at the default limit of 5% an arm that fails every request is
caught after 5 of them (the fewest that count) at first, and after 8 on the second day. Requests are
taken as independent here; a rule that errs does so on the side of the control arm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import Field
from scipy.special import bdtrc

from carryover.config import Config
from carryover.errors import ConfigError
from carryover.serving.arm_statistics import (
    COLUMN,
    MAX_RECENT,
    PRODUCTS,
    ArmStatistics,
    GroupSums,
    Recent,
)
from carryover.serving.sequential import Effect, Sums, effect
from carryover.serving.time_blocks import FIRST_BLOCK_S, common_grid

MIN_UNITS, MIN_BLOCKS = 20, 10
# One client's broken request, sent twice, must not end an experiment.
MIN_WINDOW = 5
WORDS = {
    "acceptance_length": "acceptance length",
    "tpot_s": "TPOT",
    "ttft_s": "TTFT",
    "e2e_s": "end-to-end latency",
    "error_rate": "error rate",
}


@dataclass(frozen=True)
class Metric:
    """How a metric is computed from group sums, and which direction is good.

    `rho` makes the boundary tightest around 500 requests, half of them in each arm, for the spread
    that serving usually shows: 25% between answers for TPOT, 60% for TTFT and end to end, 0.9 of
    the mean between rounds for 30 rounds an answer, and 10 failures. Being off by a factor of ten
    widens the interval by about a tenth.
    """

    more_is_better: bool
    numerator: str
    denominator: str
    rho: float
    relative: bool = True
    shifted_log: bool = False


METRICS = {
    "acceptance_length": Metric(True, "accepted", "rounds", rho=400.0, shifted_log=True),
    "tpot_s": Metric(False, "log_tpot", "num_tpot", rho=1.0),
    "ttft_s": Metric(False, "log_ttft", "num_ttft", rho=5.0),
    "e2e_s": Metric(False, "log_e2e", "num_e2e", rho=5.0),
    "error_rate": Metric(False, "failures", "requests", rho=0.3, relative=False),
}


@dataclass(frozen=True)
class Comparison:
    """A treatment arm against the control arm on one metric, valid whenever it is looked at.

    `control` and `treatment` are the arms' values, averaged over splits in the same way;
    `estimate`, `low` and `high` the difference treatment - control in the metric's unit;
    `relative`, `relative_low`, `relative_high` the same as a share of the control's value (0.1 is
    +10%). For the error rate the difference is what is tested, for others the relative change.
    Bounds are NaN where there is too little for a verdict, the values too where there is nothing.
    `n_control` and `n_treatment` are the requests used; `alpha` is this comparison's own. `why` is
    one sentence.
    """

    metric: str
    verdict: str  # "better" | "worse" | "inconclusive"
    control: float
    treatment: float
    estimate: float
    low: float
    high: float
    relative: float
    relative_low: float
    relative_high: float
    n_control: int
    n_treatment: int
    alpha: float
    why: str


class GuardRules(Config):
    """When an arm is taken out of traffic. A rule that is null is off."""

    max_error_rate: float | None = Field(
        default=0.05, gt=0, lt=1, description="Failures per request, over the window."
    )
    max_p95_ttft_s: float | None = Field(
        default=None, gt=0, description="95% of the answers must begin within this time."
    )
    max_p95_tpot_s: float | None = Field(
        default=None, gt=0, description="95% of the answers must take no more per further token."
    )
    min_acceptance_length: float | None = Field(
        default=None, gt=1, description="Tokens per round, pooled over the window."
    )
    min_requests: int = Field(
        default=100, ge=1, le=MAX_RECENT,
        description="Compared requests an arm needs at a step before a ramp goes on.",
    )  # fmt: skip
    alpha: float = Field(
        default=0.05, gt=0, lt=0.5,
        description="Chance of any false verdict, and of any false roll-back, in an experiment.",
    )  # fmt: skip
    window_s: float = Field(
        default=300.0, gt=0, description="Rules look at requests of this long a time."
    )


@dataclass(frozen=True)
class Breach:
    """An arm that broke a rule; `text` is a sentence for the audit log."""

    arm: str
    rule: str
    value: float
    limit: float
    text: str


def compare(
    control: ArmStatistics, treatment: ArmStatistics, *, metric: str, alpha: float = 0.05
) -> Comparison:
    """Compare two arms on one metric.

    Raises:
        ConfigError: no such metric, or alpha is not between 0 and 1.
    """
    if metric not in METRICS:
        raise ConfigError(f"no metric {metric!r}; metrics: {', '.join(METRICS)}")
    if not 0 < alpha < 1:
        raise ConfigError(f"alpha must lie between 0 and 1, got {alpha}")
    rule = METRICS[metric]
    splits = [name for name in control.splits if name in treatment.splits]
    pair = [[arm.splits[name] for name in splits] for arm in (control, treatment)]
    grid = common_grid([kept.blocks for arm in pair for kept in arm])
    found = effect(
        _sums(pair[0], rule, grid), _sums(pair[1], rule, grid), rho=rule.rho, alpha=alpha,
        shifted_log=rule.shifted_log, coin=metric == "error_rate",
    )  # fmt: skip
    counts = [
        int(sum(kept.units[:, COLUMN[_requests_of(rule)]].sum() for kept in arm)) for arm in pair
    ]
    return _conclude(metric, found, alpha=alpha, arms=(control.arm, treatment.arm), counts=counts)


def compare_all(
    control: ArmStatistics, treatments: Mapping[str, ArmStatistics], *, alpha: float = 0.05
) -> dict[str, dict[str, Comparison]]:
    """Every treatment on every metric: {arm: {metric: Comparison}}.

    `alpha` is for the whole table: the chance that any verdict in it is ever false. Each
    comparison gets its equal part (Bonferroni).
    """
    share = alpha / (len(METRICS) * max(len(treatments), 1))
    return {
        name: {
            metric: compare(control, treatment, metric=metric, alpha=share) for metric in METRICS
        }
        for name, treatment in treatments.items()
    }


def breaches(
    rules: GuardRules,
    arms: Mapping[str, ArmStatistics],
    *,
    now_s: float,
    evaluation: int,
) -> list[Breach]:
    """Rules that an arm broke, on the evidence of its requests in the last `rules.window_s`.

    Args:
        rules: the limits.
        arms: the arms to hold to them (those with traffic).
        now_s: epoch time.
        evaluation: 1 for the experiment's first evaluation, 2 for the second, ...: the evidence
            asked for grows slowly with it, so that the chance of a false roll-back over the whole
            experiment, however long, is at most `rules.alpha`.
    """
    active = {rule: limit for rule in _TESTS if (limit := getattr(rules, rule)) is not None}
    if not active or not arms:
        return []
    level = rules.alpha / (len(active) * len(arms) * evaluation * (evaluation + 1))
    found = []
    for arm, statistics in arms.items():
        recent = statistics.recent_array(since_s=now_s - rules.window_s)
        for rule, limit in active.items():
            value, chance, words = _TESTS[rule](recent, limit)
            if chance <= level:
                text = f"{arm}: {words} in the last {rules.window_s:.0f} s breaks {rule} {limit:g}"
                found.append(Breach(arm, rule, value, limit, text))
    return found


def lacking(
    rules: GuardRules, arms: Mapping[str, ArmStatistics], *, since_s: float, now_s: float
) -> dict[str, str]:
    """Arms without enough data since `since_s` for a ramp to go on, each with a sentence why."""
    missing = {}
    for arm, statistics in arms.items():
        count = len(statistics.recent_array(since_s=since_s))
        if count < rules.min_requests:
            missing[arm] = (
                f"{arm}: {count} compared requests in {max(now_s - since_s, 0):.0f} s, "
                f"{rules.min_requests} needed"
            )
    return missing


def _requests_of(rule: Metric) -> str:
    """The column that counts the requests a metric is about."""
    return "num_drafted" if rule.denominator == "rounds" else rule.denominator


def _sums(splits: Sequence[GroupSums], rule: Metric, grid: tuple[int, int]) -> Sums:
    y, x = rule.numerator, rule.denominator
    units = np.stack([kept.units for kept in splits]) if splits else np.zeros((0, 1, len(COLUMN)))
    blocks = np.stack([kept.blocks.on(*grid) for kept in splits]) if splits else units
    products = np.array([kept.products for kept in splits]).reshape(len(splits), len(PRODUCTS))

    def product(left: str, right: str) -> np.ndarray:
        for pair in ((left, right), (right, left)):
            if pair in PRODUCTS:
                return products[:, PRODUCTS.index(pair)]
        # The denominator is 1 or, with a numerator of 0, 0.
        return units[..., COLUMN[left if right == x else right]].sum(-1)

    return Sums(
        y=units[..., COLUMN[y]], x=units[..., COLUMN[x]],
        y_blocks=blocks[..., COLUMN[y]], x_blocks=blocks[..., COLUMN[x]],
        yy=product(y, y), xy=product(y, x), xx=product(x, x),
    )  # fmt: skip


def _conclude(
    metric: str, found: Effect, *, alpha: float, arms: tuple[str, str], counts: Sequence[int]
) -> Comparison:
    rule = METRICS[metric]
    value, half, level = float(found.value), float(found.half_width), float(found.control)
    why = _too_little(metric, found, arms=arms, counts=counts)
    low, high = (math.nan, math.nan) if why else (value - half, value + half)
    if rule.relative:
        control = math.exp(level)
        relative = [math.expm1(min(number, 700.0)) for number in (value, low, high)]
        absolute = [control * number for number in relative]
    else:
        control = level
        # A comparison with NaN is false, so NaN stays.
        absolute = [value, -1.0 if low < -1 else low, 1.0 if high > 1 else high]
        relative = [number / control if control > 0 else math.nan for number in absolute]
    verdict, shown = "inconclusive", relative if rule.relative else absolute
    if not why:
        if low > 0 or high < 0:
            verdict = "better" if (low > 0) == rule.more_is_better else "worse"
        why = _sentence(metric, verdict, shown, arms=arms, alpha=alpha)
    return Comparison(
        metric, verdict, control, control + absolute[0], *absolute, *relative, *counts, alpha, why
    )


def _too_little(
    metric: str, found: Effect, *, arms: tuple[str, str], counts: Sequence[int]
) -> str:
    """Why there can be no verdict whatever the numbers; empty if there can."""
    what = "answers with drafts" if metric == "acceptance_length" else "requests"
    for arm, count in zip(arms, counts, strict=True):
        if count == 0:
            return f"no {what} of {arm} to compare, in any period in which both arms had traffic"
    units = float(found.units)
    if not math.isfinite(float(found.value)) or not math.isfinite(float(found.half_width)):
        return f"too few compared {what}: {counts[0]} of {arms[0]}, {counts[1]} of {arms[1]}"
    if units < MIN_UNITS:
        return (
            f"too few independent units: the smaller arm has the equivalent of {units:.0f}, "
            f"{MIN_UNITS} are needed"
        )
    if found.blocks < MIN_BLOCKS:
        return (
            "too short a time: the smaller arm's requests cover the equivalent of "
            f"{float(found.blocks):.1f} blocks of at least {FIRST_BLOCK_S:g} s, "
            f"{MIN_BLOCKS} are needed"
        )
    return ""


def _sentence(
    metric: str, verdict: str, shown: Sequence[float], *, arms: tuple[str, str], alpha: float
) -> str:
    unit = "points" if metric == "error_rate" else "%"
    value, low, high = (f"{100 * number:+.1f}" for number in shown)
    word = WORDS[metric]
    bounds = f"between {low} and {high} {unit} ({100 * (1 - alpha):.4g}% at all times)"
    if verdict == "inconclusive":
        return f"{arms[1]} against {arms[0]}: {word} {value} {unit}, {bounds}: no difference shown"
    return f"{arms[1]} is {verdict} than {arms[0]}: {word} {value} {unit}, {bounds}"


def _binomial_tail(count: int, total: int, limit: float) -> float:
    """Chance of so many or more if each happens with the limit's chance."""
    if count == 0 or total < MIN_WINDOW:
        return 1.0
    return float(bdtrc(count - 1, total, limit))


def _test_error_rate(recent: np.ndarray, limit: float) -> tuple[float, float, str]:
    failed, total = int(recent[:, _AT["failed"]].sum()), len(recent)
    value = failed / total if total else math.nan
    words = f"error rate {100 * value:.1f}% ({failed} of {total} requests)"
    return value, _binomial_tail(failed, total, limit), words


def _test_p95(recent: np.ndarray, limit: float, *, field: str) -> tuple[float, float, str]:
    times = recent[:, _AT[field]]
    times = times[~np.isnan(times)]
    over = int((times > limit).sum())
    value = float(np.percentile(times, 95)) if len(times) else math.nan
    words = f"p95 {field.removesuffix('_s').upper()} {value:.3g} s ({over} of {len(times)} over)"
    return value, _binomial_tail(over, len(times), 0.05), words


def _test_acceptance(recent: np.ndarray, limit: float) -> tuple[float, float, str]:
    rounds, accepted = recent[:, _AT["rounds"]], recent[:, _AT["accepted"]]
    total = rounds.sum()
    value = 1 + float(accepted.sum() / total) if total else math.nan
    missing = (limit - 1) * rounds - accepted
    by_group = np.bincount(recent[:, _AT["group"]].astype(int), weights=missing)
    squares = (by_group**2).sum()
    x = by_group.sum() / math.sqrt(squares) if squares else 0.0
    chance = math.exp(-(x**2) / 2) if x > 0 else 1.0
    return value, chance, f"acceptance length {value:.2f} over {total:.0f} rounds"


_AT = {name: index for index, name in enumerate(Recent._fields)}
_TESTS = {
    "max_error_rate": _test_error_rate,
    "max_p95_ttft_s": lambda recent, limit: _test_p95(recent, limit, field="ttft_s"),
    "max_p95_tpot_s": lambda recent, limit: _test_p95(recent, limit, field="tpot_s"),
    "min_acceptance_length": _test_acceptance,
}
