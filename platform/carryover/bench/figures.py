"""The figures of a bench's report; each is a drawing with the sentence that says what it shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import TYPE_CHECKING, Any

from carryover.bench.statistics import Interval
from carryover.pages import add_legend, colour, new_figure, series

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from carryover.bench.result import BenchResult, Cell


@dataclass(frozen=True)
class Drawing:
    """A figure and its words."""

    figure: Figure
    title: str
    description: str
    caption: str = ""


def set_names(cell: Cell) -> list[str]:
    """Sets of a condition; empty with one set."""
    return list(next(iter(cell.summaries.values())).by_set)


def acceptance_by_set(result: BenchResult, cell: Cell) -> Drawing | None:
    """Bars of acceptance length, a group for each set and one for all."""
    arms = _speculating(cell)
    if not arms:
        return None

    def value(arm: str, name: str | None) -> Interval | None:
        summary = cell.summaries[arm]
        return (summary if name is None else summary.by_set[name]).acceptance_length

    drawn = _bars(result, [*set_names(cell), None], arms, value, "acceptance length", floor=1.0)
    said = ", ".join(f"{arm} {value(arm, None).value:.2f}" for arm in arms)
    return Drawing(
        drawn, f"Acceptance length by set, {cell.condition.title}",
        f"Mean tokens per round over all prompts: {said}.",
        "Bars are micro averages over rounds, lines are 95% intervals; 1 means that no proposal "
        "is ever accepted.",
    )  # fmt: skip


def position_curves(result: BenchResult, cell: Cell) -> Drawing | None:
    """Acceptance rate at each position of a round."""
    arms = _speculating(cell)
    if not arms:
        return None
    figure, axes = new_figure()
    for arm in arms:
        rates = cell.summaries[arm].position_rates
        axes.plot(range(1, len(rates) + 1), rates, **series(_index(result, arm)), label=arm)
    longest = max(len(cell.summaries[arm].position_rates) for arm in arms)
    axes.set(xlabel="position in the round", ylabel="acceptance rate", ylim=(0, None))
    axes.set_xticks(range(1, longest + 1, max(1, longest // 8)))
    add_legend(axes)
    first = ", ".join(f"{arm} {cell.summaries[arm].position_rates[0]:.0%}" for arm in arms)
    return Drawing(
        figure, f"Acceptance by position, {cell.condition.title}",
        f"Share of rounds that accept at least so many proposals. First position: {first}.",
        "The rates never rise; their sum is the acceptance length less 1.",
    )  # fmt: skip


def throughput_over_load(result: BenchResult, temperature: float) -> Drawing | None:
    """Output tokens/s over concurrency, of closed loops; None with one concurrency."""
    cells = [c for c in result.cells if c.condition.temperature == temperature
             and c.condition.rate is None]  # fmt: skip
    if len(cells) < 2:
        return None
    cells.sort(key=lambda cell: cell.condition.concurrency)
    loads = [cell.condition.concurrency for cell in cells]
    figure, axes = new_figure()
    for arm in result.arms:
        found = [cell.summaries[arm].output_tokens_per_s for cell in cells]
        axes.plot(loads, [i.value for i in found], **series(_index(result, arm)), label=arm)
        lows, highs = [i.low for i in found], [i.high for i in found]
        axes.fill_between(loads, lows, highs, color=colour(_index(result, arm)), alpha=0.15)
    axes.set_xscale("log", base=2)
    axes.set_xticks(loads, [str(load) for load in loads])
    axes.minorticks_off()
    axes.set(xlabel="requests in flight", ylabel="output tokens/s", ylim=(0, None))
    add_legend(axes)
    last = ", ".join(
        f"{arm} {cells[-1].summaries[arm].output_tokens_per_s.value:,.0f}" for arm in result.arms
    )
    return Drawing(
        figure, f"Throughput over concurrency, T={temperature:g}",
        f"Output tokens/s from {loads[0]} to {loads[-1]} requests in flight; at the last: {last}.",
        "Bands are 95% intervals.",
    )  # fmt: skip


def gain_by_set(result: BenchResult, cell: Cell) -> Drawing | None:
    """Relative gain of throughput over the baseline drafter, by set."""
    arms = list(cell.gains)
    if not arms:
        return None

    def value(arm: str, name: str | None) -> Interval | None:
        gain = cell.gains[arm]
        found = (gain if name is None else gain.by_set[name]).speedup
        return Interval(*(100 * (part - 1) for part in (found.value, found.low, found.high)))

    drawn = _bars(result, [*set_names(cell), None], arms, value, "throughput gain, %", floor=0.0)
    said = ", ".join(f"{arm} {value(arm, None).value:+.1f}%" for arm in arms)
    return Drawing(
        drawn, f"Gain over {result.baseline} by set, {cell.condition.title}",
        f"Output tokens/s compared with {result.baseline}, prompt by prompt: {said} over all.",
        "A line that crosses 0 means that the prompts do not tell which arm is faster.",
    )  # fmt: skip


def latency_percentiles(result: BenchResult, cell: Cell) -> Drawing:
    """TTFT, TPOT and end to end at percentiles 50, 95 and 99."""
    figure, axes = new_figure(1, 3, height=2.6)
    named = (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("end to end", "latency_ms"))
    for place, (name, attribute) in zip(axes, named, strict=True):
        for arm in result.arms:
            values = getattr(cell.summaries[arm], attribute)
            place.plot(["50", "95", "99"], values, **series(_index(result, arm)), label=arm)
        highest = max(max(getattr(cell.summaries[arm], attribute)) for arm in result.arms)
        place.set(title=f"{name}, ms", ylim=(0, 1.1 * highest if isfinite(highest) else None))
        place.title.set_fontsize(10)
    axes[1].set_xlabel("percentile")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=3, frameon=False, fontsize=9.5)
    said = ", ".join(f"{arm} {cell.summaries[arm].tpot_ms[0]:.1f} ms" for arm in result.arms)
    return Drawing(
        figure, f"Latency percentiles, {cell.condition.title}", f"Median TPOT: {said}.",
        "TPOT is the time per output token after the first, not the time between chunks.",
    )  # fmt: skip


def _bars(
    result: BenchResult,
    groups: Sequence[str | None],
    arms: Sequence[str],
    value: Callable[[str, str | None], Interval | None],
    label: str,
    *,
    floor: float,
) -> Any:
    """Horizontal bars from `floor`, a group of arms for each set (None: all prompts)."""
    thickness = 0.8 / len(arms)
    figure, axes = new_figure(height=0.9 + 0.24 * len(groups) * max(2, len(arms)))
    for number, arm in enumerate(arms):
        found = [value(arm, group) or Interval(nan) for group in groups]
        places = [place - 0.4 + thickness * (number + 0.5) for place in range(len(groups))]
        heights = [i.value - floor if isfinite(i.value) else 0.0 for i in found]
        style = {"color": colour(_index(result, arm)), "height": 0.9 * thickness, "label": arm}
        axes.barh(places, heights, left=floor, **style)
        for place, interval in zip(places, found, strict=True):
            if interval.bounded:
                axes.plot([interval.low, interval.high], [place, place], color="#000000", lw=1.2)
    axes.set_yticks(range(len(groups)), [group or "all prompts" for group in groups])
    axes.invert_yaxis()
    axes.axvline(floor, color="#000000", lw=0.8)
    axes.set_xlabel(label)
    axes.grid(axis="y", visible=False)
    add_legend(axes)
    return figure


def _speculating(cell: Cell) -> list[str]:
    return [arm for arm, s in cell.summaries.items() if s.acceptance_length is not None]


def _index(result: BenchResult, arm: str) -> int:
    return list(result.arms).index(arm)
