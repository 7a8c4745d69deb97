"""From the requests of a bench to figures per arm and comparisons between arms."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

from carryover.bench import statistics
from carryover.bench.objective import Objective
from carryover.bench.records import Request
from carryover.bench.statistics import Interval

PERCENTILES = (50, 95, 99)
# times the median
OUTLIER = 3.0


@dataclass(frozen=True)
class ArmSummary:
    """Figures of one arm; definitions are those of `bench.statistics`, times in milliseconds.

    Attributes:
        arm: its name.
        requests: sent, failed ones included.
        failed: without a whole response.
        cut: responses that ended at the token limit.
        outliers: whole ones that took over 3 times the median TPOT; they are in every figure.
        output_tokens: of all whole responses.
        measured_s: time in which this arm was being measured.
        output_tokens_per_s: throughput.
        ttft_ms: percentiles 50, 95 and 99.
        tpot_ms: percentiles 50, 95 and 99.
        tpot_mean_ms: mean over requests.
        latency_ms: percentiles 50, 95 and 99, end to end.
        acceptance_length: micro average; None on an arm without speculation.
        acceptance_length_macro: mean over sets; None without speculation or with one set.
        position_rates: acceptance rate at each position; empty without speculation.
        num_drafts: rounds.
        num_draft_tokens: proposals.
        num_accepted_tokens: proposals accepted.
        goodput_per_s: requests per second that met the objective; None without one.
        good: how many requests met it.
        by_set: figures of each set; empty with one set.
    """

    arm: str
    requests: int
    failed: int
    cut: int
    outliers: int
    output_tokens: int
    measured_s: float
    output_tokens_per_s: Interval
    ttft_ms: tuple[float, ...]
    tpot_ms: tuple[float, ...]
    tpot_mean_ms: Interval
    latency_ms: tuple[float, ...]
    acceptance_length: Interval | None
    acceptance_length_macro: Interval | None
    position_rates: list[float]
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    goodput_per_s: Interval | None = None
    good: int | None = None
    by_set: dict[str, ArmSummary] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """Flat figures for MLflow, the same keys for every arm; what is not finite is left out."""
        flat = {
            "requests": self.requests, "failed": self.failed, "cut": self.cut,
            "outliers": self.outliers,
            "output_tokens": self.output_tokens, "measured_s": self.measured_s,
            "num_drafts": self.num_drafts, "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
        }  # fmt: skip
        flat |= _flat_interval("output_tokens_per_s", self.output_tokens_per_s)
        flat |= _flat_interval("tpot_mean_ms", self.tpot_mean_ms)
        flat |= _flat_interval("acceptance_length", self.acceptance_length)
        flat |= _flat_interval("acceptance_length_macro", self.acceptance_length_macro)
        flat |= _flat_interval("goodput_per_s", self.goodput_per_s)
        if self.good is not None:
            flat["good"] = self.good
        for name in ("ttft_ms", "tpot_ms", "latency_ms"):
            for rank, value in zip(PERCENTILES, getattr(self, name), strict=True):
                flat[f"{name}.p{rank}"] = value
        for position, rate in enumerate(self.position_rates, 1):
            flat[f"acceptance_rate.{position}"] = rate
        for name, part in self.by_set.items():
            prefix = set_prefix(name)
            flat[f"{prefix}.requests"] = part.requests
            flat |= _flat_interval(f"{prefix}.acceptance_length", part.acceptance_length)
            flat |= _flat_interval(f"{prefix}.output_tokens_per_s", part.output_tokens_per_s)
        return {name: value for name, value in flat.items() if isfinite(value)}


@dataclass(frozen=True)
class Comparison:
    """One arm against another, over the prompts that both answered.

    Attributes:
        arm: its name.
        baseline: the arm that it is divided by.
        prompts: how many both answered.
        speedup: ratio of output tokens/s.
        speedup_macro: mean of the sets' ratios; None with one set.
        tpot_ratio: ratio of mean TPOT; below 1 is faster.
        tpot_difference_ms: mean TPOT of this arm less the other's.
        acceptance_ratio: ratio of acceptance lengths; None unless both speculate.
        acceptance_difference: difference of acceptance lengths; None unless both speculate.
        differing: prompts whose text differs; None where texts were sampled.
        same_text_speedup: ratio of output tokens/s over prompts with equal text; None where
            texts were sampled or all are equal.
        by_set: the same for each set; empty with one set.
    """

    arm: str
    baseline: str
    prompts: int
    speedup: Interval
    speedup_macro: Interval | None
    tpot_ratio: Interval
    tpot_difference_ms: Interval
    acceptance_ratio: Interval | None
    acceptance_difference: Interval | None
    differing: int | None
    same_text_speedup: Interval | None = None
    by_set: dict[str, Comparison] = field(default_factory=dict)

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Flat figures for MLflow."""
        flat = {f"{prefix}compared_prompts": float(self.prompts)}
        for name in (
            "speedup", "speedup_macro", "tpot_ratio", "tpot_difference_ms", "acceptance_ratio",
            "acceptance_difference", "same_text_speedup",
        ):  # fmt: skip
            flat |= _flat_interval(f"{prefix}{name}", getattr(self, name))
        if self.differing is not None:
            flat[f"{prefix}differing_texts"] = self.differing
        for name, part in self.by_set.items():
            for figure in ("speedup", "acceptance_ratio"):
                key = f"{set_prefix(name)}.{prefix}{figure}"
                flat |= _flat_interval(key, getattr(part, figure))
        return {name: value for name, value in flat.items() if isfinite(value)}


def summarise_arm(
    arm: str,
    requests: Sequence[Request],
    *,
    measured_s: float,
    objective: Objective | None = None,
    sets: bool = True,
) -> ArmSummary:
    """Compute the figures of one arm.

    Args:
        arm: its name.
        requests: its requests, in any order.
        measured_s: time in which it was being measured.
        objective: what a good request is.
        sets: compute those of its sets too.
    """
    whole = [request for request in requests if request.ok]
    answers = [request.response for request in whole]
    tokens = [answer.output_tokens for answer in answers]
    tpots_ms = [1000 * value for request in whole if (value := request.tpot_s) is not None]
    median = statistics.percentiles(tpots_ms, (50,))[0]
    rounds = _acceptance(whole)
    by_set = {}
    groups = _by_set(requests)
    if sets and len(groups) > 1:
        by_set = {
            name: summarise_arm(arm, part, measured_s=_wall(part), sets=False)
            for name, part in groups.items()
        }
    speculating = sum(rounds[1]) > 0
    good = None if objective is None else [objective.met_by(request) for request in whole]
    return ArmSummary(
        arm=arm,
        requests=len(requests),
        failed=len(requests) - len(whole),
        cut=sum(answer.finish == "length" for answer in answers),
        outliers=sum(value > OUTLIER * median for value in tpots_ms),
        output_tokens=sum(tokens),
        measured_s=measured_s,
        output_tokens_per_s=statistics.ratio_of_sums(tokens, [r.wall_s for r in whole]),
        ttft_ms=_milliseconds([answer.ttft_s for answer in answers]),
        tpot_ms=tuple(statistics.percentiles(tpots_ms, PERCENTILES)),
        tpot_mean_ms=statistics.mean(tpots_ms),
        latency_ms=_milliseconds([answer.latency_s for answer in answers]),
        acceptance_length=statistics.ratio_of_sums(*rounds) if speculating else None,
        acceptance_length_macro=(
            statistics.macro_average(
                [_acceptance([r for r in part if r.ok]) for part in groups.values()],
                statistics.ratio,
            )
            if speculating and by_set
            else None
        ),
        position_rates=statistics.position_rates(
            statistics.pool_histograms([answer.accepted_histogram for answer in answers])
        ),
        num_drafts=sum(rounds[1]),
        num_draft_tokens=sum(answer.num_draft_tokens for answer in answers),
        num_accepted_tokens=sum(answer.num_accepted_tokens for answer in answers),
        goodput_per_s=(
            None
            if good is None
            else statistics.ratio_of_sums([float(met) for met in good], [r.wall_s for r in whole])
        ),
        good=None if good is None else sum(good),
        by_set=by_set,
    )


def compare_arms(
    arm: Sequence[Request], baseline: Sequence[Request], *, same_text: bool, sets: bool = True
) -> Comparison:
    """Compare an arm with another over the prompts that both answered.

    Args:
        arm: requests of the arm; at least one.
        baseline: requests of the other arm; at least one.
        same_text: whether equal texts are expected (temperature 0), so that they are compared.
        sets: compare their sets too.
    """
    by_prompt = {request.prompt_id: request for request in baseline if request.ok}
    pairs = [
        (request, by_prompt[request.prompt_id])
        for request in arm
        if request.ok and request.prompt_id in by_prompt
    ]
    ours, theirs = [one for one, _ in pairs], [other for _, other in pairs]
    timed = [pair for pair in pairs if all(request.tpot_s is not None for request in pair)]
    ones = [1.0] * len(timed)
    tpots = tuple(([1000 * pair[side].tpot_s for pair in timed], ones) for side in (0, 1))
    rounds = _acceptance(ours), _acceptance(theirs)
    speculating = all(sum(column[1]) for column in rounds)
    equal = [pair for pair in pairs if pair[0].response.text == pair[1].response.text]
    by_set = {}
    groups = _by_set(arm)
    if sets and len(groups) > 1:
        by_set = {
            name: compare_arms(part, baseline, same_text=same_text, sets=False)
            for name, part in groups.items()
        }
    return Comparison(
        arm=arm[0].arm,
        baseline=baseline[0].arm,
        prompts=len(pairs),
        speedup=statistics.ratio_between(_throughput(ours), _throughput(theirs)),
        speedup_macro=(
            statistics.macro_average(
                [_columns(part, by_prompt, of=_throughput) for part in groups.values()],
                statistics.ratio_of_ratios,
            )
            if by_set
            else None
        ),
        tpot_ratio=statistics.ratio_between(*tpots),
        tpot_difference_ms=statistics.difference_between(*tpots),
        acceptance_ratio=statistics.ratio_between(*rounds) if speculating else None,
        acceptance_difference=statistics.difference_between(*rounds) if speculating else None,
        differing=len(pairs) - len(equal) if same_text else None,
        same_text_speedup=(
            statistics.ratio_between(
                _throughput([one for one, _ in equal]), _throughput([other for _, other in equal])
            )
            if same_text and 0 < len(equal) < len(pairs)
            else None
        ),
        by_set=by_set,
    )


def acceptance_ratio_macro(arm: Sequence[Request], baseline: Sequence[Request]) -> Interval:
    """Mean over sets of the ratio of acceptance lengths, over the prompts that both answered.

    Args:
        arm: requests of the arm.
        baseline: requests of the other arm.
    """
    by_prompt = {request.prompt_id: request for request in baseline if request.ok}
    sets = [_columns(part, by_prompt, of=_acceptance) for part in _by_set(arm).values()]
    return statistics.macro_average([each for each in sets if each[0]], statistics.ratio_of_ratios)


def set_prefix(name: str) -> str:
    """How a set begins the names of its metrics; MLflow allows few signs in names."""
    return "set." + re.sub(r"[^\w-]", "_", name)


def _by_set(requests: Sequence[Request]) -> dict[str, list[Request]]:
    groups: dict[str, list[Request]] = defaultdict(list)
    for request in requests:
        groups[request.category].append(request)
    return dict(sorted(groups.items()))


def _wall(requests: Sequence[Request]) -> float:
    return sum(request.wall_s for request in requests if request.ok)


def _columns(
    arm: Sequence[Request], by_prompt: Mapping[int, Request], *, of: Callable[..., tuple]
) -> tuple[Sequence[float], ...]:
    ours = [request for request in arm if request.ok and request.prompt_id in by_prompt]
    theirs = [by_prompt[request.prompt_id] for request in ours]
    return (*of(ours), *of(theirs))


def _acceptance(requests: Sequence[Request]) -> tuple[list[int], list[int]]:
    """Tokens of the rounds, and rounds, of each request."""
    answers = [request.response for request in requests]
    drafts = [answer.num_drafts for answer in answers]
    accepted = [answer.num_accepted_tokens for answer in answers]
    return [a + d for a, d in zip(accepted, drafts, strict=True)], drafts


def _throughput(requests: Sequence[Request]) -> tuple[list[float], list[float]]:
    return [r.response.output_tokens for r in requests], [r.wall_s for r in requests]


def _milliseconds(seconds: Sequence[float]) -> tuple[float, ...]:
    return tuple(statistics.percentiles([1000 * value for value in seconds], PERCENTILES))


def _flat_interval(name: str, interval: Interval | None) -> Mapping[str, float]:
    if interval is None:
        return {}
    return {name: interval.value, f"{name}.low": interval.low, f"{name}.high": interval.high}
