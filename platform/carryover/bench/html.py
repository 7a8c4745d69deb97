"""`report.html` of a bench: everything on one page that needs nothing else."""

from __future__ import annotations

import json
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carryover.bench import figures, paper
from carryover.bench.report import percent, remarks, set_counts, settings_line
from carryover.bench.statistics import Interval
from carryover.pages import Card, Page

if TYPE_CHECKING:
    from carryover.bench.result import BenchResult, Cell

_PROVENANCE = ("provenance", "machine", "prompts_sha256", "config_sha256")
DEFINITIONS = (
    "Acceptance length is the mean of accepted proposals plus one over rounds: sums over sums "
    "(micro average); the macro average is the mean of the sets. TPOT is the time per output token "
    "after the first. Speed-up is the ratio of output tokens/s to the reference arm's, gain that "
    "to the baseline drafter's, over the prompts that both answered. Brackets are 95% intervals "
    "by bootstrap over prompts, paired."
)


def write_report(result: BenchResult, path: Path) -> None:
    """Write the page, and its figures as PNG beside it."""
    page = Page(
        f"{result.mode} bench", lead=set_counts(result),
        footer="definitions: " + DEFINITIONS,
    )  # fmt: skip
    _banner(page, result)
    _headlines(page, result)
    shown = _representative(result)
    page.section("Acceptance and gain")
    # the same kind for each temperature side by side
    for draw in (figures.acceptance_by_set, figures.gain_by_set, figures.position_curves):
        for cell in shown:
            _draw(page, draw(result, cell))
    page.section("Speed")
    for temperature in dict.fromkeys(cell.condition.temperature for cell in result.cells):
        _draw(page, figures.throughput_over_load(result, temperature))
    for cell in shown:
        _draw(page, figures.latency_percentiles(result, cell))
    _arm_tables(page, result)
    _table_one(page, result, shown)
    _beside_paper(page, result)
    page.section("How it was measured")
    page.paragraph(settings_line(result))
    for remark in remarks(result):
        page.note(remark)
    page.details("settings", result.config.to_yaml())
    page.details("code, versions, machine", json.dumps(_provenance(result), indent=2))
    page.details("arms", json.dumps(result.arms, indent=2, default=str))
    page.write(path, figures=path.parent)


def _banner(page: Page, result: BenchResult) -> None:
    cards = []
    wrong = [finding.text for finding in result.findings if finding.severity == "invalid"]
    if wrong:
        text = f"{len(wrong)} contradictions; the first: {wrong[0]}"
        cards.append(Card("This run is", "invalid", text, tone="bad"))
    if result.partial:
        cards.append(Card("This run is", "partial", result.partial, tone="bad"))
    if cards:
        page.cards(cards)


def _headlines(page: Page, result: BenchResult) -> None:
    cards = []
    for cell in _representative(result):
        for arm, gain in cell.gains.items():
            ratio = gain.speedup
            tone = "neutral"
            if ratio.bounded and (ratio.low > 1 or ratio.high < 1):
                tone = "good" if ratio.low > 1 else "bad"
            value, _, bounds = percent(gain, "speedup").partition(" ")
            text = (
                f"{bounds} output tokens/s over {gain.baseline}, {cell.condition.load}; "
                f"acceptance {percent(gain, 'acceptance_ratio')}"
            )
            title = f"{arm}, T={cell.condition.temperature:g}"
            cards.append(Card(title, value, text, tone))
        if not cell.gains:
            for arm, comparison in cell.comparisons.items():
                value = f"{comparison.speedup.value:.2f}x"
                text = f"the speed of {comparison.baseline}, {cell.condition.load}"
                cards.append(Card(f"{arm}, T={cell.condition.temperature:g}", value, text))
    if cards:
        page.cards(cards)


def _draw(page: Page, drawing: figures.Drawing | None) -> None:
    if drawing is not None:
        page.figure(
            drawing.figure, title=drawing.title, description=drawing.description,
            caption=drawing.caption,
        )  # fmt: skip


def _arm_tables(page: Page, result: BenchResult) -> None:
    """All conditions and arms: figures that decide, then latencies."""
    figured, timed = [], []
    for cell in result.cells:
        for arm, summary in cell.summaries.items():
            comparison, gain = cell.comparisons.get(arm), cell.gains.get(arm)
            figured.append(
                [
                    cell.condition.title,
                    arm,
                    plain(summary.acceptance_length, 2),
                    plain(summary.output_tokens_per_s, 1),
                    plain(comparison.speedup, 2, "x") if comparison else "reference",
                    percent(gain, "speedup") if gain else "–",
                    f"{summary.failed}/{summary.requests}",
                    _differing(comparison, cell, arm),
                ]
            )
            timed.append(
                [
                    cell.condition.title,
                    arm,
                    _times(summary.ttft_ms),
                    _times(summary.tpot_ms),
                    _times(summary.latency_ms),
                    *([plain(summary.goodput_per_s, 2)] if result.config.goodput else []),
                ]
            )
    page.table(
        "figures of every condition and arm",
        ["condition", "arm", "acceptance length", "output tokens/s", "speed-up", "gain", "failed",
         "other text (near-ties)"],
        figured,
    )  # fmt: skip
    good = [f"requests/s with {result.config.goodput}"] if result.config.goodput else []
    page.table(
        "times in ms at percentiles 50 / 95 / 99",
        ["condition", "arm", "TTFT", "TPOT", "end to end", *good], timed,
    )  # fmt: skip


def _table_one(page: Page, result: BenchResult, cells: list[Cell]) -> None:
    """Sets as columns, arms as rows: acceptance length and speed-up, as the paper's Table 1."""
    sets = figures.set_names(cells[0]) if cells else []
    if not sets:
        return
    page.section("By set, in the shape of the paper's Table 1")
    rows = []
    for cell in cells:
        for arm, summary in cell.summaries.items():
            comparison = cell.comparisons.get(arm)
            by_set = [
                _length_and_speed(summary.by_set[name], comparison and comparison.by_set[name])
                for name in sets
            ]
            macro = (
                f"{plain(summary.acceptance_length_macro, 2)} · "
                f"{plain(comparison.speedup_macro, 2, 'x') if comparison else '1x'}"
            )
            rows.append(
                [f"{cell.condition.temperature:g}", arm, *by_set,
                 _length_and_speed(summary, comparison), macro]
            )  # fmt: skip
    page.table(
        f"acceptance length · speed-up, {cells[0].condition.load}",
        ["T", "arm", *sets, "micro average", "macro average"], rows,
    )  # fmt: skip


def _beside_paper(page: Page, result: BenchResult) -> None:
    found = paper.beside_paper(result)
    if not found:
        why = paper.why_not(result) or "none of its published figures was measured here"
        page.note(f"The paper's numbers are not shown beside these: {why}.")
        return
    rows = [
        [
            f"{b.published.regime}, T={b.published.temperature:g}: {b.published.what}",
            b.published.baseline, plain(b.baseline, 2), b.published.carryover,
            plain(b.carryover, 2), f"{100 * (b.published.gain - 1):+.1f}%",
            f"{100 * (b.gain.value - 1):+.1f}%",
        ]
        for b in found
    ]  # fmt: skip
    page.table(
        "the paper's figures (one H200) and ours",
        ["figure", "baseline, paper", "baseline, here", "Carryover, paper", "Carryover, here",
         "gain, paper", "gain, here"],
        rows,
    )  # fmt: skip


def _representative(result: BenchResult) -> list[Cell]:
    """One condition per temperature: that of the lightest load, where acceptance is read."""
    chosen: dict[float, Any] = {}
    for cell in result.cells:
        known = chosen.get(cell.condition.temperature)
        if known is None or _weight(cell) < _weight(known):
            chosen[cell.condition.temperature] = cell
    return list(chosen.values())


def _weight(cell: Cell) -> tuple[int, float]:
    if cell.condition.rate is not None:
        return (1, cell.condition.rate)
    return (0, cell.condition.concurrency)


def _length_and_speed(summary: Any, comparison: Any) -> str:
    length = summary.acceptance_length
    speed = "1x" if comparison is None else plain(comparison.speedup, 2, "x").partition(" ")[0]
    return f"{'–' if length is None else f'{length.value:.2f}'} · {speed}"


def _differing(comparison: Any, cell: Cell, arm: str) -> str:
    if comparison is None or comparison.differing is None:
        return "–"
    near = f" ({cell.ties[arm].near})" if arm in cell.ties else ""
    return f"{comparison.differing}/{comparison.prompts}{near}"


def _times(values: tuple[float, ...]) -> str:
    return " / ".join(f"{v:,.0f}" if v >= 100 else f"{v:.1f}" for v in values)


def plain(interval: Interval | None, digits: int, unit: str = "") -> str:
    """A figure with its interval as plain text; a dash where there is none."""
    if interval is None or not isfinite(interval.value):
        return "–"
    text = f"{interval.value:,.{digits}f}{unit}"
    if interval.bounded:
        text += f" [{interval.low:,.{digits}f}, {interval.high:,.{digits}f}]"
    return text


def _provenance(result: BenchResult) -> dict[str, Any]:
    return {name: result.start.get(name) for name in _PROVENANCE}
