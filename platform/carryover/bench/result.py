"""What a bench found: figures of every condition, and what must be known beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from carryover.bench import validity
from carryover.bench.arms import choose_baseline, choose_reference, equal_arms, notes_on_arms
from carryover.bench.ledger import Ledger
from carryover.bench.records import Condition, Request
from carryover.bench.settings import BenchConfig
from carryover.bench.summary import ArmSummary, Comparison, compare_arms, summarise_arm
from carryover.bench.ties import Ties
from carryover.bench.validity import Finding


@dataclass(frozen=True)
class Cell:
    """Figures of one condition.

    Attributes:
        condition: what was asked.
        summaries: by arm.
        comparisons: with the reference arm, by arm, without itself.
        gains: with the baseline drafter, by arm, speculating arms alone and without itself.
        ties: what became of differing texts, by arm; empty where there are none.
    """

    condition: Condition
    summaries: dict[str, ArmSummary]
    comparisons: dict[str, Comparison]
    gains: dict[str, Comparison]
    ties: dict[str, Ties] = field(default_factory=dict)

    def metrics(self, arm: str) -> dict[str, float]:
        """Flat figures of an arm for MLflow, gains beginning with `gain.`."""
        flat = self.summaries[arm].metrics()
        if arm in self.comparisons:
            flat |= self.comparisons[arm].metrics()
        if arm in self.gains:
            flat |= self.gains[arm].metrics("gain.")
        if arm in self.ties:
            flat |= self.ties[arm].metrics()
        return flat


@dataclass(frozen=True)
class BenchResult:
    """What a bench found.

    Attributes:
        config: its settings.
        mode: `online` or `offline`.
        arms: description of each arm, as far as it is known, in order.
        cells: one for each condition.
        reference: the arm of speed-ups; None with one arm.
        baseline: the arm of gains; None without two arms that speculate.
        requests: every request that was measured.
        counters: vLLM's own counts by arm; None if they were not read.
        counters_agree: whether they are those of the responses; None if they were not read.
        findings: what makes it invalid or must be known beside the figures.
        partial: why it ended early; None if everything was measured.
        prompts: of the workload that was to be measured, by set.
        budget: what was found about the time budget; None without one.
        folder: where rows and reports are written.
        start: the record of the bench's start: versions, hardware, workload.
        run_id: of the MLflow parent run; None if nothing was recorded.
    """

    config: BenchConfig
    mode: str
    arms: dict[str, dict[str, Any]]
    cells: list[Cell]
    reference: str | None
    baseline: str | None
    requests: list[Request]
    counters: dict[str, dict[str, float]] | None
    counters_agree: bool | None
    findings: list[Finding]
    partial: str | None
    prompts: dict[str, int]
    budget: dict[str, Any] | None
    folder: Path
    start: dict[str, Any] = field(default_factory=dict)
    run_id: str | None = None

    @property
    def valid(self) -> bool:
        """Whether its figures may be believed."""
        return all(finding.severity != "invalid" for finding in self.findings)

    @property
    def summaries(self) -> dict[str, ArmSummary]:
        """By arm, of the only condition.

        Raises:
            ValueError: there are several.
        """
        if len(self.cells) != 1:
            raise ValueError(f"the bench has {len(self.cells)} conditions; choose one of its cells")
        return self.cells[0].summaries

    @property
    def comparisons(self) -> dict[str, Comparison]:
        """With the reference, by arm, of the only condition; raises like `summaries`."""
        assert self.summaries
        return self.cells[0].comparisons


def compile_result(
    config: BenchConfig,
    ledger: Ledger,
    *,
    conditions: Sequence[Condition],
    arms: Mapping[str, dict[str, Any]],
    partial: str | None = None,
    ties: Mapping[tuple[str, str], Ties] | None = None,
    run_id: str | None = None,
) -> BenchResult:
    """Compute everything from what a ledger holds.

    Args:
        config: settings.
        ledger: its finished units; conditions of which no block was finished on all arms are
            left out.
        conditions: in their order.
        arms: descriptions, in order.
        partial: why it ended early.
        ties: what became of differing texts, by condition title and arm.
        run_id: of the MLflow parent run.
    """
    walls, requests = whole_blocks(ledger, arms)
    reference = choose_reference(arms, given=config.reference)
    baseline = choose_baseline(arms, given=config.baseline)
    findings = [Finding("note", text) for text in notes_on_arms(arms)]
    cells = []
    for condition in conditions:
        by_arm = {
            arm: [r for r in requests if r.arm == arm and r.condition == condition] for arm in arms
        }
        if not all(by_arm.values()):
            continue
        summaries = {
            arm: summarise_arm(
                arm,
                by_arm[arm],
                measured_s=walls[condition.title, arm],
                objective=config.goodput,
            )
            for arm in arms
        }
        greedy = condition.temperature == 0

        def against(other: str | None, greedy=greedy, by_arm=by_arm) -> dict[str, Comparison]:
            return {
                arm: compare_arms(by_arm[arm], by_arm[other], same_text=greedy)
                for arm in arms
                if other is not None and arm != other
            }

        gains = {
            arm: gain
            for arm, gain in against(baseline).items()
            if gain.acceptance_ratio is not None
        }
        cell = Cell(
            condition, summaries, against(reference), gains,
            {arm: ties[condition.title, arm] for arm in arms if (condition.title, arm) in ties}
            if ties else {},
        )  # fmt: skip
        cells.append(cell)
        findings += _check_cell(config, arms, by_arm, cell)
    counted, agree, said = _check_counters(ledger, arms)
    findings += [Finding("invalid", text) for text in said]
    return BenchResult(
        config=config, mode=ledger.start["mode"], arms=dict(arms), cells=cells,
        reference=reference, baseline=baseline, requests=requests, counters=counted,
        counters_agree=agree, findings=findings, partial=partial,
        prompts=ledger.start["prompts"], budget=ledger.start.get("budget"), folder=ledger.folder,
        start=ledger.start, run_id=run_id,
    )  # fmt: skip


def whole_blocks(
    ledger: Ledger, arms: Mapping[str, Any]
) -> tuple[dict[tuple[str, str], float], list[Request]]:
    """Requests of blocks that every arm has finished, and the time they took by condition and arm.

    A block that was cut short on some arms would leave arms with different prompts.
    """
    units = [(m, m.requests[0]) for m in ledger.done.values()]
    finished: dict[tuple[str, int], set[str]] = {}
    for _, first in units:
        finished.setdefault((first.condition.title, first.block), set()).add(first.arm)
    walls: dict[tuple[str, str], float] = {}
    requests: list[Request] = []
    for measured, first in units:
        if finished[first.condition.title, first.block] != set(arms):
            continue
        key = (first.condition.title, first.arm)
        walls[key] = walls.get(key, 0.0) + measured.wall_s
        requests += measured.requests
    return walls, requests


def _check_cell(
    config: BenchConfig,
    arms: Mapping[str, dict[str, Any]],
    by_arm: Mapping[str, Sequence[Request]],
    cell: Cell,
) -> list[Finding]:
    wrong = validity.check_pairs(cell.condition, by_arm)
    notes = validity.notes_on(
        cell.condition, cell.summaries, cell.comparisons, ties=cell.ties,
        max_tokens=config.max_tokens, ignore_eos=config.ignore_eos,
    )  # fmt: skip
    for arm, requests in by_arm.items():
        said = validity.check_requests(arm, arms[arm], requests)
        said += validity.check_summary(cell.summaries[arm])
        wrong += [f"{cell.condition.title}: {text}" for text in said]
        wrong += validity.check_lengths(
            cell.condition, requests, max_tokens=config.max_tokens, ignore_eos=config.ignore_eos
        )
        outside = validity.undrafted_share(requests)
        if outside > validity.UNDRAFTED_WORTH_TELLING:
            notes.append(
                f"{cell.condition.title}: {arm}: {outside:.0%} of its tokens came from steps in "
                "which nothing was proposed"
            )
    for first, again in equal_arms(arms):
        luck = compare_arms(by_arm[again], by_arm[first], same_text=False)
        notes.append(validity.note_on_equal_arms(cell.condition, luck))
    return [*(Finding("invalid", text) for text in wrong), *(Finding("note", n) for n in notes)]


def _check_counters(
    ledger: Ledger, arms: Mapping[str, Any]
) -> tuple[dict[str, dict[str, float]] | None, bool | None, list[str]]:
    """vLLM's counts by arm, whether they agree with the responses, and where they do not."""
    total: dict[str, dict[str, float]] = {}
    said: list[str] = []

    def take(arm: str, counted: Mapping[str, float], requests: Sequence[Request]) -> None:
        sums = total.setdefault(arm, {})
        for name, value in counted.items():
            sums[name] = sums.get(name, 0.0) + value
        # a failed request may have had rounds that no response tells of
        if all(request.ok for request in requests):
            said.extend(validity.check_counters(arm, counted, requests))

    for measured in ledger.done.values():
        if measured.counted is not None:
            take(measured.requests[0].arm, measured.counted, measured.requests)
    for session in ledger.sessions:
        if session.get("counted") is None:
            continue
        asked = [r for key in session["units"] for r in ledger.done[key].requests]
        counted = session["counted"]
        nameless = {r.arm for r in asked if r.response.num_drafts and r.arm not in counted}
        if nameless:
            # a server with several names for one model counts under the first
            names = [arm for arm in arms if arm in counted]
            pooled = {
                name: sum(counted[arm].get(name, 0.0) for arm in names)
                for arm in names
                for name in counted[arm]
            }
            take(" + ".join(arms), pooled, asked)
            continue
        for arm in arms:
            take(arm, counted.get(arm, {}), [r for r in asked if r.arm == arm])
    if not total:
        return None, None, []
    return total, not said, said
