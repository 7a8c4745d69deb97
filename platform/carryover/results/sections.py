"""One section of the results page."""

from __future__ import annotations

from collections.abc import Sequence

from carryover.diagnostics.recording import KIND_TAG
from carryover.results import figures, records, tables
from carryover.results.collect import REGIMES, SectionResults, greedy
from carryover.results.document import ResultsPage
from carryover.results.markdown import details, slug
from carryover.results.measured import Measured
from carryover.results.runs import BenchRun

NOT_YET = "Not measured yet."


def add_section(page: ResultsPage, results: SectionResults) -> None:
    """Append a section's tables and figures to the page."""
    runs = results.runs
    page.add(f"## {runs.section.name}", runs.section.text)
    _offline(page, results)
    _online(page, results)
    page.add(f"### {runs.section.name}: what training cost")
    page.add(records.training_table(runs.costs) if runs.costs else NOT_YET)
    _payback(page, results)
    _diagnoses(page, results)
    if runs.ablation:
        page.add(
            f"### {runs.section.name}: what to carry, and how to mark it",
            "Each drafter at the anchors of its own greedy decoding, over rounds with something "
            "carried: tokens a round with it (ON), by the same weights without (OFF), and by the "
            "baseline, which decodes nothing itself. Differences are paired over rounds, with 95% "
            "intervals (paper, Qwen3-4B Markov: hidden states best, the target's tokens modest, "
            "draft tokens inconsistent; no mark still competitive, a projector slightly better).",
            records.ablation_table(runs.ablation),
        )
    if runs.tried:
        page.add(f"### {runs.section.name}: what was tried", records.tried_table(runs.tried))
    if results.unused:
        listed = ", ".join(records.label(run.record) for run in results.unused)
        page.add(f"Listed, and in no table, since other runs count before them: {listed}.")


def _offline(page: ResultsPage, results: SectionResults) -> None:
    name = results.runs.section.name
    page.add(f"### {name}: offline")
    if not results.offline:
        page.add(NOT_YET)
        return
    _warn(page, results.runs.offline)
    for temperature, measured in _by_temperature(results.offline).items():
        title = f"T={temperature:g}"
        stem = f"{slug(name)}-t{slug(f'{temperature:g}')}"
        page.add(f"#### {name}: offline, {title}, by set")
        page.add(
            "Acceptance length of each role, gain of Carryover in acceptance length (paired over "
            "prompts), speed-up over the target alone; 95% intervals."
        )
        for each in measured:
            page.add(f"**{each.regime}** {_from(each)}", tables.offline_table(each))
        page.show(figures.gain_picture(f"{stem}-gain", measured))
        seeds = tables.seed_table(measured, "acceptance_ratio")
        if seeds:
            page.add("Gain in acceptance length, seed by seed:", seeds, _spread(measured))
        positions = tables.position_table(measured)
        if positions:
            page.add(f"#### {name}: offline, {title}, by position")
            page.add("Share of rounds that accept at least so many proposals.", positions)
            page.show(figures.position_picture(f"{stem}-positions", measured))


def _online(page: ResultsPage, results: SectionResults) -> None:
    name = results.runs.section.name
    page.add(f"### {name}: online")
    if not results.online:
        page.add(NOT_YET)
        return
    _warn(page, results.runs.online)
    for temperature, measured in _by_temperature(results.online).items():
        title = f"T={temperature:g}"
        single = [each for each in measured if each.condition.concurrency == 1]
        page.add(f"#### {name}: online, concurrency 1, {title}")
        if single:
            page.add(" ".join(f"**{each.regime}** {_from(each)}" for each in single))
            page.add(tables.load_table(single))
            seeds = tables.seed_table(single, "speedup")
            if seeds:
                page.add("Gain in output tokens/s, seed by seed:", seeds)
        else:
            page.add(NOT_YET)
        page.add(f"#### {name}: online, sweep over concurrency, {title}")
        sweeps = {
            regime: [each for each in measured if each.regime == regime] for regime in REGIMES
        }
        shown = {regime: loads for regime, loads in sweeps.items() if len(loads) > 1}
        if not shown:
            page.add(NOT_YET)
        for regime, loads in shown.items():
            runs = {run.record.id: run for each in loads for run in each.runs}
            page.add(f"**{regime}** {_listed(list(runs.values()))}", tables.sweep_table(loads))
            stem = f"{slug(name)}-t{slug(f'{temperature:g}')}-sweep-{regime}"
            page.show(figures.sweep_picture(stem, loads))


def _diagnoses(page: ResultsPage, results: SectionResults) -> None:
    runs = results.runs
    heading = f"### {runs.section.name}: is there anything to carry?"
    headrooms, replays = (
        [record for record in runs.diagnoses if record.tags[KIND_TAG] == kind]
        for kind in ("headroom", "replay")
    )
    if headrooms:
        page.add(
            heading,
            "Baselines, with nothing carried: what the target predicts at the rows of rejected "
            "proposals, for each rejected round, against what it committed later. A prediction "
            "re-converges if it is committed at its position or beside it (paper, Qwen3-4B, 15 "
            "proposals: Markov 2.76, DFlash 2.51). The mixture is a reader without training: the "
            "drafter's distribution times fitted powers of the target's at those rows.",
            records.headroom_table(headrooms),
            "By slot of the next draft, where a rejected row predicts its position: how often the "
            "drafter is right, and how often only that row is. A perfect reader would add the "
            "latter.",
            records.slot_table(headrooms),
        )
    if replays:
        page.add(
            *([] if headrooms else [heading]),
            "Carryover drafters at the anchors of their own decoding, with the carried rows (ON) "
            "and without (OFF), and the baseline. Recall@1 by block position, ON less OFF in "
            "points, over rounds in which ON and the baseline are right so far (paper: +1.28 to "
            "+5.60).",
            records.replay_table(replays),
        )


def _payback(page: ResultsPage, results: SectionResults) -> None:
    page.add("What the continuation costs against what it saves, at T=0 online:")
    found = results.paybacks
    if found:
        page.add(
            records.payback_table(found),
            "Core-hours of training are means over seeds. What the control's training took would "
            "have been spent without Carryover too, if the baseline is trained on; the difference "
            "is what drafting and verifying in training cost.",
        )
    else:
        page.add(NOT_YET)
    missing = [
        regime
        for regime in REGIMES
        if greedy(results.online, regime) and regime not in {each.regime for each in found}
    ]
    if missing and results.runs.costs:
        page.add(
            f"Not computed for {' and '.join(missing)}: it takes a finished Carryover training on "
            "CPU, and a gain over the baseline online."
        )


def _warn(page: ResultsPage, runs: Sequence[BenchRun]) -> None:
    """Say loudly what is wrong with runs, and quietly what else must be known."""
    for run in runs:
        name = records.label(run.record)
        if not run.valid:
            wrong = [text for severity, text in run.findings if severity == "invalid"]
            first = f": {records.without_folders(wrong[0])}" if wrong else ""
            page.add(f"> **INVALID: no figure of {name} is to be believed**{first}")
        if run.partial:
            page.add(f"> **PARTIAL: {name}**: {records.without_folders(run.partial)}")
    notes = [
        f"{records.label(run.record)}: {records.without_folders(text)}"
        for run in runs
        for severity, text in run.findings
        if severity != "invalid"
    ]
    if notes:
        page.add(details(f"Notes of the benches themselves: {len(notes)}", notes))


def _spread(measured: Sequence[Measured]) -> str:
    alone = [each.regime for each in measured if each.gains and len(each.seeds) == 1]
    if not alone:
        return ""
    return f"One seed of {' and '.join(alone)}: how much trainings differ is not known."


def _from(measured: Measured) -> str:
    return _listed(measured.runs)


def _listed(runs: Sequence[BenchRun]) -> str:
    marks = [
        records.label(run.record)
        + ("" if run.valid else " **INVALID**")
        + (" **PARTIAL**" if run.partial else "")
        for run in runs
    ]
    return f"from {', '.join(marks)}"


def _by_temperature(measured: Sequence[Measured]) -> dict[float, list[Measured]]:
    found: dict[float, list[Measured]] = {}
    for each in measured:
        found.setdefault(each.condition.temperature, []).append(each)
    return found
