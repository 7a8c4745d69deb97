"""Tables of a bench for the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, TypeVar

from rich import box
from rich.table import Table

from carryover.bench.statistics import Interval

if TYPE_CHECKING:
    from carryover.bench.result import BenchResult, Cell
    from carryover.bench.summary import ArmSummary, Comparison

Item = TypeVar("Item")

# What a terminal of usual width shows beside each other.
_ARMS_BESIDE, _FIGURES_BESIDE = 4, 6


def result_tables(result: BenchResult) -> list[Table]:
    """For each condition: tables of the arms, and of the sets if there are several.

    So many arms or figures stand side by side as a terminal shows; the others follow below.
    """
    tables = []
    for cell in result.cells:
        arms = list(cell.summaries)
        tables += [result_table(result, cell, arms=part) for part in _groups(arms, _ARMS_BESIDE)]
        if any(summary.by_set for summary in cell.summaries.values()):
            tables += _set_tables(cell)
    return tables


def result_table(
    result: BenchResult, cell: Cell | None = None, *, arms: Sequence[str] | None = None
) -> Table:
    """One column per arm; ratios are over the reference arm, brackets are 95% intervals.

    Args:
        result: of a bench.
        cell: the condition to show; None: the first.
        arms: to show; None: all.
    """
    cell = cell or result.cells[0]
    condition = cell.condition
    table = Table(
        title=_marks(result) + f"{_count(result, cell)} prompts, {condition.load}, temperature "
        f"{condition.temperature:g}, at most {result.config.max_tokens} tokens",
        title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip
    table.add_column("")
    shown = list(cell.summaries) if arms is None else arms
    columns = [_column(arm, result, cell) for arm in shown]
    for arm in shown:
        table.add_column(arm, justify="right", overflow="fold")
    for name in columns[0]:
        cells = [column[name] for column in columns]
        if any(cells):
            table.add_row(name, *cells)
    return table


@dataclass(frozen=True)
class _Figure:
    """A column of a table of sets."""

    heading: str
    by_set: Mapping[str, Interval | None]
    micro: Interval | None
    macro: Interval | None
    unit: str = ""

    def show(self, interval: Interval | None) -> str:
        return _stacked(interval, 2, self.unit)


def _set_tables(cell: Cell) -> list[Table]:
    """One row per set: acceptance length and speed-up of each arm; micro and macro at the end."""
    figures = [
        _Figure(
            f"{arm}\nacceptance",
            {name: part.acceptance_length for name, part in summary.by_set.items()},
            summary.acceptance_length,
            summary.acceptance_length_macro,
        )
        for arm, summary in cell.summaries.items()
        if summary.acceptance_length is not None
    ] + [
        _Figure(
            f"{arm}\nspeed-up",
            {name: part.speedup for name, part in comparison.by_set.items()},
            comparison.speedup,
            comparison.speedup_macro,
            "x",
        )
        for arm, comparison in cell.comparisons.items()
    ]
    return [_set_table(cell, part) for part in _groups(figures, _FIGURES_BESIDE)]


def _set_table(cell: Cell, figures: Sequence[_Figure]) -> Table:
    table = Table(
        title=f"by set, {cell.condition.load}, T={cell.condition.temperature:g}",
        title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip
    table.add_column("set")
    table.add_column("prompts", justify="right")
    for figure in figures:
        table.add_column(figure.heading, justify="right", overflow="fold")
    first = next(iter(cell.summaries.values()))
    for name, part in first.by_set.items():
        cells = [figure.show(figure.by_set.get(name)) for figure in figures]
        table.add_row(name, str(part.requests), *cells)
    table.add_section()
    total = str(first.requests)
    table.add_row("micro average", total, *(figure.show(figure.micro) for figure in figures))
    table.add_row("macro average", total, *(figure.show(figure.macro) for figure in figures))
    return table


def _groups(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _column(arm: str, result: BenchResult, cell: Cell) -> dict[str, str]:
    summary, comparison = cell.summaries[arm], cell.comparisons.get(arm)
    differing = ties = same_text = speedup = ""
    if comparison is not None:
        speedup = show_interval(comparison.speedup, 2, "x")
        if comparison.differing is not None:
            differing = _share(comparison.differing, comparison.prompts, bad="yellow")
        if comparison.same_text_speedup is not None:
            same_text = show_interval(comparison.same_text_speedup, 2, "x")
        if arm in cell.ties:
            ties = f"{cell.ties[arm].near}/{comparison.differing}"
    elif result.reference is not None:
        speedup = "1 (reference)"
    return {
        "acceptance length": show_interval(summary.acceptance_length, 2),
        "output tokens/s": show_interval(summary.output_tokens_per_s, 1),
        "speed-up": speedup,
        "speed-up on equal texts": same_text,
        **_gain(arm, result, cell),
        "TTFT p50 / p95": show_milliseconds(summary.ttft_ms[:2]),
        "TPOT p50 / p95": show_milliseconds(summary.tpot_ms[:2]),
        "end to end p50 / p95": _seconds(summary.latency_ms[:2]),
        "goodput, requests/s": _goodput(summary),
        "failed": _share(summary.failed, summary.requests, bad="red"),
        "other text than the reference": differing,
        "of them near-ties": ties,
    }


def _gain(arm: str, result: BenchResult, cell: Cell) -> dict[str, str]:
    gain = cell.gains.get(arm)
    is_base = gain is None and arm == result.baseline and bool(cell.gains)
    base = "1 (baseline)" if is_base else ""
    return {
        "acceptance gain": _dimmed(percent(gain, "acceptance_ratio")) if gain else base,
        "throughput gain": _dimmed(percent(gain, "speedup")) if gain else base,
    }


def _goodput(summary: ArmSummary) -> str:
    if summary.goodput_per_s is None:
        return ""
    return f"{show_interval(summary.goodput_per_s, 2)} {summary.good}/{summary.requests}"


def remarks(result: BenchResult) -> list[str]:
    """What a reader must know beside the table, one sentence each; the gravest first."""
    said = []
    if result.partial:
        said.append(f"PARTIAL: {result.partial}; figures are of what was finished")
    ordered = sorted(result.findings, key=lambda finding: finding.severity != "invalid")
    for finding in ordered:
        said.append(("INVALID: " if finding.severity == "invalid" else "") + finding.text)
    if result.budget is not None:
        budget = result.budget
        said.append(
            f"the budget of {budget['budget_s']:.0f} s takes {budget['prompts']} of "
            f"{budget['of_prompts']} prompts, as evenly over the sets as they allow"
        )
    if result.counters_agree is None:
        said.append("vLLM's own counters were not read, so acceptance has no second witness")
    return said


def settings_line(result: BenchResult) -> str:
    """The settings that the arms share, checked before measuring."""
    described = [about for about in result.arms.values() if about]
    if not described:
        return "the server tells nothing about its engines, so their settings were not compared"
    shared = {name: described[0].get(name) for name in ("target", "engine")}
    return f"shared by {len(described)} arms: {json.dumps(shared, default=str)}"


def set_counts(result: BenchResult) -> str:
    """Prompts per set of the workload."""
    counted = ", ".join(f"{name} {count}" for name, count in result.prompts.items())
    return f"{result.config.prompts}: {sum(result.prompts.values())} prompts ({counted})"


def show_interval(interval: Interval | None, digits: int, unit: str = "") -> str:
    """A figure with its interval, as markup for a terminal; `-` where there is none."""
    if interval is None or not isfinite(interval.value):
        return "-"
    text = f"{interval.value:,.{digits}f}{unit}"
    if interval.bounded:
        text += f" [dim]\\[{interval.low:,.{digits}f}, {interval.high:,.{digits}f}][/]"
    return text


def _stacked(interval: Interval | None, digits: int, unit: str = "") -> str:
    """The same with the interval below the figure, for tables of many columns."""
    return show_interval(interval, digits, unit).replace(" [dim]", "\n[dim]")


def show_milliseconds(values: Sequence[float]) -> str:
    """Times beside each other."""
    return (
        " / ".join(f"{value:,.0f}" if value >= 100 else f"{value:.1f}" for value in values) + " ms"
    )


def percent(comparison: Comparison | None, figure: str) -> str:
    """A gain of a comparison in percent, without markup."""
    interval = None if comparison is None else getattr(comparison, figure)
    return "-" if interval is None or not isfinite(interval.value) else interval.as_gain


def _dimmed(gain: str) -> str:
    """Its interval in grey, as rich's markup."""
    value, bracket, bounds = gain.partition(" [")
    return f"{value} [dim]\\[{bounds}[/]" if bracket else value


def _marks(result: BenchResult) -> str:
    return ("" if result.valid else "[bold red]INVALID[/] ") + (
        "[bold yellow]PARTIAL[/] " if result.partial else ""
    )


def _count(result: BenchResult, cell: Cell) -> int:
    return len({r.prompt_id for r in result.requests if r.condition == cell.condition})


def _seconds(values_ms: Sequence[float]) -> str:
    return " / ".join(f"{value / 1000:.2f}" for value in values_ms) + " s"


def _share(count: int, total: int, *, bad: str) -> str:
    return f"[{bad}]{count}/{total}[/]" if count else f"0/{total}"
