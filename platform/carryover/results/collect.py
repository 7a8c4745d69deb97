"""Everything that one section of the page is made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from carryover.results import goals
from carryover.results.config import Regime, Section, Tried
from carryover.results.cost import Payback, TrainingCost, payback, training_cost
from carryover.results.goals import Verdict
from carryover.results.measured import Measured, check_arms, measure_all
from carryover.results.runs import BenchRun, RunReader, RunRecord

REGIMES: tuple[str, ...] = get_args(Regime)


@dataclass(frozen=True)
class SectionRuns:
    """The runs of a section, found and read."""

    section: Section
    offline: Sequence[BenchRun]
    online: Sequence[BenchRun]
    costs: Sequence[TrainingCost]
    diagnoses: Sequence[RunRecord]
    ablation: Sequence[RunRecord]
    tried: Sequence[tuple[Tried, RunRecord | None]]

    @property
    def benches(self) -> list[BenchRun]:
        """Of both kinds."""
        return [*self.offline, *self.online]

    @property
    def records(self) -> list[RunRecord]:
        """Runs besides benches."""
        known = {run.record.id for run in self.benches}
        found = [*(cost.record for cost in self.costs), *self.diagnoses, *self.ablation]
        found += [run for _, run in self.tried if run is not None and run.id not in known]
        return list({record.id: record for record in found}.values())


@dataclass(frozen=True)
class SectionResults:
    """A section's runs, and what they come to.

    Attributes:
        runs: as read.
        offline: figures by condition and kind of drafter.
        online: likewise.
        verdicts: on the goals, with the kind of drafter; None for a goal of all.
    """

    runs: SectionRuns
    offline: Sequence[Measured]
    online: Sequence[Measured]
    verdicts: Sequence[tuple[str | None, Verdict]]

    @property
    def paybacks(self) -> list[Payback]:
        """At the fewest and the most requests in flight, of greedy decoding."""
        found = []
        for regime in REGIMES:
            loads = greedy(self.online, regime)
            ends = loads[:1] + loads[-1:] if len(loads) > 1 else loads
            found += [payback(each, self.runs.costs) for each in ends]
        return [each for each in found if each is not None]

    @property
    def unused(self) -> list[BenchRun]:
        """Benches of which no table shows a figure."""
        used = {run.record.id for each in (*self.offline, *self.online) for run in each.runs}
        return [run for run in self.runs.benches if run.record.id not in used]


def read_section(section: Section, reader: RunReader) -> SectionRuns:
    """Find and read the runs of a section.

    Raises:
        ConfigError: a run or an arm is missing.
    """
    found = SectionRuns(
        section=section,
        offline=[reader.bench(name, "offline") for name in section.offline],
        online=[reader.bench(name, "online") for name in section.online],
        costs=[training_cost(reader.training(name)) for name in section.training],
        diagnoses=[reader.diagnosis(name) for name in section.diagnostics],
        ablation=[reader.replay(name) for name in section.ablation],
        tried=[(each, reader.any(each.run) if each.run else None) for each in section.tried],
    )
    check_arms(section, found.benches)
    return found


def compute_section(runs: SectionRuns) -> SectionResults:
    """Compute a section's figures.

    Raises:
        ConfigError: seeds were not asked the same.
    """
    offline = measure_all(runs.section, runs.offline, sets=True)
    online = measure_all(runs.section, runs.online, sets=False)
    return SectionResults(runs, offline, online, _verdicts(offline, online))


def greedy(measured: Sequence[Measured], regime: str) -> list[Measured]:
    """Figures of one kind of drafter at temperature 0, by concurrency."""
    return [each for each in measured if each.regime == regime and each.condition.temperature == 0]


def _verdicts(
    offline: Sequence[Measured], online: Sequence[Measured]
) -> list[tuple[str | None, Verdict]]:
    found: list[tuple[str | None, Verdict]] = []
    for regime in REGIMES:
        rests_on = greedy(offline, regime)
        one = rests_on[0] if rests_on else None
        summary = one.summaries.get("baseline") if one else None
        verdicts = [goals.baseline_acceptance(summary.acceptance_length if summary else None)]
        for other in goals.GAINS:
            gain = one.gains.get(other) if one else None
            ratio = gain.pooled.acceptance_ratio if gain else None
            verdicts.append(goals.acceptance_gain(other, ratio))
        found += [(regime, _doubted(verdict, rests_on)) for verdict in verdicts]
    single = [
        each
        for regime in REGIMES
        for each in greedy(online, regime)
        if each.condition.concurrency == 1
    ]
    speedups = {
        name: speedup.speedup
        for each in single
        for (_, name), (_, speedup) in each.arms.items()
        if speedup is not None
    }
    found.append((None, _doubted(goals.online_speedup(speedups), single)))
    for regime in REGIMES:
        loads = [each for each in greedy(online, regime) if "baseline" in each.gains]
        gains = {each.condition.concurrency: each.gains["baseline"].pooled.speedup
                 for each in loads}  # fmt: skip
        found.append((regime, _doubted(goals.gain_at_every_load(gains), loads)))
    return found


def _doubted(verdict: Verdict, measured: Sequence[Measured]) -> Verdict:
    runs = [run for each in measured for run in each.runs]
    return goals.doubted(
        verdict,
        invalid=any(not run.valid for run in runs),
        partial=any(run.partial for run in runs),
    )
