"""The table of an online bench for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING

from rich.table import Table

from carryover.bench.statistics import Interval

if TYPE_CHECKING:
    from carryover.bench.online import BenchResult


def result_table(result: BenchResult) -> Table:
    """One column per arm; ratios are over the reference arm, brackets are 95% intervals."""
    config = result.config
    table = Table(
        title=f"{_count(result)} prompts, concurrency {config.concurrency}, temperature "
        f"{config.temperature:g}, at most {config.max_tokens} tokens",
        title_justify="left",
    )
    table.add_column("")
    columns = [_column(arm, result) for arm in result.summaries]
    for arm in result.summaries:
        table.add_column(arm, justify="right")
    for name in columns[0]:
        cells = [column[name] for column in columns]
        if any(cells):
            table.add_row(name, *cells)
    return table


def _column(arm: str, result: BenchResult) -> dict[str, str]:
    summary, comparison = result.summaries[arm], result.comparisons.get(arm)
    differing = speedup = ""
    if comparison is not None:
        speedup = _interval(comparison.speedup, 2, "x")
        if comparison.differing is not None:
            differing = _share(comparison.differing, comparison.prompts, bad="yellow")
    elif result.baseline is not None:
        speedup = "1 (reference)"
    return {
        "acceptance length": _interval(summary.acceptance_length, 2),
        "output tokens/s": _interval(summary.output_tokens_per_s, 1),
        "speed-up": speedup,
        "TTFT p50 / p95": _milliseconds(summary.ttft_ms),
        "TPOT p50 / p95": _milliseconds(summary.tpot_ms),
        "end to end p50 / p95": _seconds(summary.latency_ms),
        "failed": _share(summary.failed, summary.requests, bad="red"),
        "other text than the reference": differing,
    }


def remarks(result: BenchResult) -> list[str]:
    """What a reader must know beside the table, one sentence each."""
    said = []
    for arm, comparison in result.comparisons.items():
        if comparison.differing:
            said.append(
                f"{arm}: {comparison.differing} of {comparison.prompts} texts differ from "
                f"{comparison.baseline}'s at temperature 0, so its speed-up is on partly "
                "different text"
            )
    if result.counters_agree is False:
        said.append("vLLM's own counters disagree with the responses; do not trust acceptance here")
    for arm, summary in result.summaries.items():
        if summary.cut == summary.requests - summary.failed and not result.config.ignore_eos:
            said.append(f"{arm}: every response was cut at {result.config.max_tokens} tokens")
    return said


def _count(result: BenchResult) -> int:
    return len({request.prompt_id for request in result.requests})


def _interval(interval: Interval | None, digits: int, unit: str = "") -> str:
    if interval is None or not isfinite(interval.value):
        return "-"
    text = f"{interval.value:,.{digits}f}{unit}"
    if interval.bounded:
        text += f" [dim]\\[{interval.low:,.{digits}f}, {interval.high:,.{digits}f}][/]"
    return text


def _milliseconds(values: Sequence[float]) -> str:
    return (
        " / ".join(f"{value:,.0f}" if value >= 100 else f"{value:.1f}" for value in values) + " ms"
    )


def _seconds(values_ms: Sequence[float]) -> str:
    return " / ".join(f"{value / 1000:.2f}" for value in values_ms) + " s"


def _share(count: int, total: int, *, bad: str) -> str:
    return f"[{bad}]{count}/{total}[/]" if count else f"0/{total}"
