"""What benches say about the arms of one kind of drafter under one condition.

Seeds are pooled prompt by prompt: what the arms of all seeds did on a prompt is added up before
anything is divided, so that resampling prompts keeps a prompt's seeds together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from carryover.bench import statistics
from carryover.bench.records import Condition, Request
from carryover.bench.statistics import Interval
from carryover.bench.summary import (
    ArmSummary,
    Comparison,
    acceptance_ratio_macro,
    compare_arms,
    summarise_arm,
)
from carryover.errors import ConfigError
from carryover.results.config import ROLES, RegimeArms, Section
from carryover.results.runs import BenchRun

CARRYOVER = "carryover"
OTHERS = ("baseline", "control")


@dataclass(frozen=True)
class Seed:
    """The arms of one seed, all of one run, so that they were measured in turns.

    Attributes:
        run: that measured them.
        names: of the arms, by role; only roles that the run measured.
        requests: by role.
    """

    run: BenchRun
    names: Mapping[str, str]
    requests: Mapping[str, Sequence[Request]]


@dataclass(frozen=True)
class Gain:
    """Carryover over another role, paired over prompts.

    Attributes:
        pooled: over all seeds.
        acceptance_macro: mean over sets of the sets' ratios of acceptance length; None with one.
        seeds: each seed by itself, by the name of its Carryover arm.
    """

    pooled: Comparison
    acceptance_macro: Interval | None
    seeds: Mapping[str, Comparison]


@dataclass(frozen=True)
class Measured:
    """Figures of one kind of drafter under one condition.

    Attributes:
        regime: `dflash` or `markov`.
        condition: what was asked.
        seeds: one for each seed that was measured.
        summaries: by role, pooled over seeds.
        gains: of Carryover, by the role that it is compared with.
        speedups: over the target alone, by role, pooled over seeds.
        arms: figures and speed-up of each arm by itself, by role and name; online at concurrency
            1 alone, where latencies are read.
    """

    regime: str
    condition: Condition
    seeds: Sequence[Seed]
    summaries: Mapping[str, ArmSummary]
    gains: Mapping[str, Gain]
    speedups: Mapping[str, Comparison]
    arms: Mapping[tuple[str, str], tuple[ArmSummary, Comparison | None]]

    @property
    def runs(self) -> list[BenchRun]:
        """Those that the figures are from."""
        return list({seed.run.record.id: seed.run for seed in self.seeds}.values())

    @property
    def sets(self) -> list[str]:
        """Names of the sets; empty with one."""
        return list(next(iter(self.summaries.values())).by_set)


def check_arms(section: Section, runs: Sequence[BenchRun]) -> None:
    """Refuse arms that none of the section's benches measured.

    Raises:
        ConfigError: names them, and lists those that were measured.
    """
    if not runs:
        return
    there = sorted({arm for run in runs for arm in run.arms})
    wanted = [
        name
        for arms in section.regimes.values()
        for names in (arms.baseline, arms.control, arms.carryover)
        for name in names
    ]
    missing = sorted({section.autoregressive, *wanted} - set(there))
    if missing:
        raise ConfigError(
            f"section {section.name!r}: no bench of it has the arm {', '.join(missing)}; "
            f"they have: {', '.join(there)}"
        )
    if not wanted:
        raise ConfigError(
            f"section {section.name!r}: `regimes` names no arms; the benches have: "
            f"{', '.join(there)}"
        )


def measure_all(section: Section, runs: Sequence[BenchRun], *, sets: bool) -> list[Measured]:
    """Figures of every kind of drafter under every condition, in order.

    Args:
        section: names the arms.
        runs: of one mode.
        sets: compute those of each set too.

    Raises:
        ConfigError: seeds were not asked the same.
    """
    found = {condition: None for run in runs for condition in run.conditions}
    conditions = sorted(found, key=lambda each: (each.temperature, each.concurrency))
    measured = []
    for condition in conditions:
        for regime, arms in section.regimes.items():
            seeds = _seeds(runs, condition, arms, section.autoregressive)
            if seeds:
                measured.append(_measure(regime, condition, seeds, sets=sets))
    return measured


def _seeds(
    runs: Sequence[BenchRun], condition: Condition, arms: RegimeArms, autoregressive: str
) -> list[Seed]:
    """For each seed the run that counts: valid, whole, with most of its arms, with most prompts;
    of equals the first listed."""
    chosen: list[Seed] = []
    known: set[tuple[str, str]] = set()
    for number in range(arms.num_seeds):
        drafting = arms.of_seed(number)
        holding = [_arms_in(run, condition, drafting, autoregressive) for run in runs]
        # a baseline that all seeds share makes no further seed
        holding = [seed for seed in holding if set(seed.names.items()) & drafting.items() - known]
        if holding:
            chosen.append(max(holding, key=_weight))
            known |= set(chosen[-1].names.items())
    first = next(iter(chosen), None)
    for seed in chosen[1:]:
        if seed.run.settings != first.run.settings:
            raise ConfigError(
                f"the seeds {', '.join(first.names.values())} and {', '.join(seed.names.values())} "
                f"were not asked the same at {condition.title}: {first.run.settings} in run "
                f"{first.run.record.id}, {seed.run.settings} in {seed.run.record.id}; list runs "
                "of one workload in a section"
            )
    return chosen


def _arms_in(
    run: BenchRun, condition: Condition, drafting: Mapping[str, str], autoregressive: str
) -> Seed:
    names = {"autoregressive": autoregressive, **drafting}
    there = {role: arm for role, arm in names.items() if (condition, arm) in run.by_arm}
    requests = {role: run.by_arm[condition, there[role]] for role in ROLES if role in there}
    return Seed(run, there, requests)


def _weight(seed: Seed) -> tuple[bool, bool, int, int]:
    prompts = min(map(len, seed.requests.values()))
    return (seed.run.valid, not seed.run.partial, len(seed.names), prompts)


def _measure(regime: str, condition: Condition, seeds: Sequence[Seed], *, sets: bool) -> Measured:
    summaries, speedups, gains = {}, {}, {}
    for role in ROLES:
        own = [seed.requests[role] for seed in seeds if role in seed.requests]
        if own and (pooled := pool(own)):
            summaries[role] = _summarise(role, pooled, sets=sets)
        if role != "autoregressive" and (pair := _pair(seeds, role, "autoregressive")):
            speedups[role] = compare_arms(*pair, same_text=False, sets=sets)
    for other in OTHERS:
        pair = _pair(seeds, CARRYOVER, other)
        if pair and all(any(r.response.num_drafts for r in side) for side in pair):
            gains[other] = _gain(seeds, other, pair, sets=sets)
    arms = {}
    if condition.mode == "online" and condition.concurrency == 1:
        arms = _each_arm(seeds)
    return Measured(regime, condition, seeds, summaries, gains, speedups, arms)


def _each_arm(seeds: Sequence[Seed]) -> dict[tuple[str, str], tuple[ArmSummary, Comparison | None]]:
    found = {}
    for seed in seeds:
        alone = seed.requests.get("autoregressive")
        for role, requests in seed.requests.items():
            if (role, seed.names[role]) in found:
                continue
            speedup = None
            if role != "autoregressive" and alone is not None:
                speedup = compare_arms(requests, alone, same_text=False, sets=False)
            summary = _summarise(seed.names[role], requests, sets=False)
            found[role, seed.names[role]] = summary, speedup
    return found


def _gain(
    seeds: Sequence[Seed],
    other: str,
    pair: tuple[list[Request], list[Request]],
    *,
    sets: bool,
) -> Gain:
    pooled = compare_arms(*pair, same_text=False, sets=sets)
    both = [seed for seed in seeds if {CARRYOVER, other} <= set(seed.requests)]
    single = {
        seed.names[CARRYOVER]: pooled
        if len(both) == 1
        else compare_arms(
            seed.requests[CARRYOVER], seed.requests[other], same_text=False, sets=False
        )
        for seed in both
    }
    macro = acceptance_ratio_macro(*pair) if pooled.by_set else None
    return Gain(pooled, macro, single)


def _pair(
    seeds: Sequence[Seed], role: str, other: str
) -> tuple[list[Request], list[Request]] | None:
    """Requests of two roles, pooled over the seeds that have both."""
    both = [seed for seed in seeds if role in seed.requests and other in seed.requests]
    if not both:
        return None
    ours, theirs = (pool([seed.requests[each] for seed in both]) for each in (role, other))
    return (ours, theirs) if ours and theirs else None


def pool(seeds: Sequence[Sequence[Request]]) -> list[Request]:
    """Add up what several arms did on each prompt that all of them answered.

    Sums of tokens, rounds, acceptances and times are meant to be divided by one another; latencies
    of single requests are not in the result. One arm comes back as it is, failures included.
    """
    if len(seeds) == 1:
        return list(seeds[0])
    by_prompt: dict[int, list[Request]] = {}
    for requests in seeds:
        for request in requests:
            if request.ok:
                by_prompt.setdefault(request.prompt_id, []).append(request)
    return [_added(each) for each in by_prompt.values() if len(each) == len(seeds)]


def _added(requests: Sequence[Request]) -> Request:
    first, answers = requests[0], [request.response for request in requests]
    counts = ("output_tokens", "num_drafts", "num_draft_tokens", "num_accepted_tokens")
    sums = {name: sum(getattr(answer, name) for answer in answers) for name in counts}
    histogram = statistics.pool_histograms([answer.accepted_histogram for answer in answers])
    times = {
        name: sum(getattr(answer, name) for answer in answers) for name in ("ttft_s", "latency_s")
    }
    response = replace(answers[0], **sums, **times, accepted_histogram=histogram, text="")
    return replace(first, wall_s=sum(request.wall_s for request in requests), response=response)


def _summarise(arm: str, requests: Sequence[Request], *, sets: bool) -> ArmSummary:
    measured_s = sum(request.wall_s for request in requests if request.ok)
    return summarise_arm(arm, requests, measured_s=measured_s, sets=sets)
