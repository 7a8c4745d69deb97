"""The figures of the results page, as PNG: a role has the same colour in all of them."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg

from carryover.bench.statistics import Interval
from carryover.bench.summary import Comparison
from carryover.page_style import COLOURS
from carryover.pages import add_legend, colour, new_figure, series
from carryover.results.config import DRAFTING_ROLES, ROLES
from carryover.results.measured import OTHERS, Measured

_ALL = "all prompts"


@dataclass(frozen=True)
class Picture:
    """A figure in a file.

    Attributes:
        name: of the file, without the ending.
        png: its bytes, the same whenever the same is drawn.
        description: what it shows, for readers who cannot see it.
    """

    name: str
    png: bytes
    description: str


def position_picture(name: str, measured: Sequence[Measured]) -> Picture | None:
    """Acceptance rate at each position of a round, a panel for each kind of drafter."""
    shown = [each for each in measured if _speculating(each)]
    if not shown:
        return None
    figure, panels = _panels(len(shown), 2.4)
    for axes, each in zip(panels, shown, strict=True):
        for role in _speculating(each):
            rates = each.summaries[role].position_rates
            axes.plot(range(1, len(rates) + 1), rates, **_line(role), label=role)
        axes.set(ylabel=f"{each.regime}: acceptance rate", ylim=(0, None))
        axes.locator_params(axis="x", integer=True)
    panels[-1].set_xlabel("position in the round")
    add_legend(panels[0])
    return _picture(
        figure, name, "Share of rounds that accept at least so many proposals, by position"
    )


def gain_picture(name: str, measured: Sequence[Measured]) -> Picture | None:
    """Acceptance gain of Carryover by set, with intervals, a panel for each kind of drafter."""
    shown = [each for each in measured if each.gains]
    if not shown:
        return None
    rows = max(len(each.sets) for each in shown) + 1
    figure, panels = _panels(len(shown), 0.7 + 0.3 * rows)
    for axes, each in zip(panels, shown, strict=True):
        labels = [*each.sets, _ALL]
        for number, (other, gain) in enumerate(each.gains.items()):
            found = [_acceptance(gain.pooled, label) for label in labels]
            places = [place + 0.24 * (number - 0.5) for place in range(len(labels))]
            _error_bars(axes, found, places, other)
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.axvline(0, color=COLOURS["ink"][0], linewidth=0.8)
        axes.set_title(each.regime, loc="right", fontsize=10)
    panels[-1].set_xlabel("acceptance gain of carryover, %")
    add_legend(panels[0])
    return _picture(figure, name, "Acceptance gain of Carryover by set, with 95% intervals")


def sweep_picture(name: str, measured: Sequence[Measured]) -> Picture | None:
    """Throughput and gains over concurrency, of one kind of drafter; None with one load."""
    if len(measured) < 2:
        return None
    loads = [each.condition.concurrency for each in measured]
    figure, panels = _panels(2, 2.6)
    for role in ROLES:
        found = [each.summaries.get(role) for each in measured]
        if any(found):
            speeds = [s.output_tokens_per_s if s else Interval(nan) for s in found]
            _band(panels[0], loads, speeds, role, scale=lambda value: value)
    for other in OTHERS:
        gains = [each.gains.get(other) for each in measured]
        if any(gains):
            ratios = [gain.pooled.speedup if gain else Interval(nan) for gain in gains]
            _band(panels[1], loads, ratios, other, scale=lambda value: 100 * (value - 1))
    panels[0].set(ylabel="output tokens/s", ylim=(0, None))
    panels[1].axhline(0, color=COLOURS["ink"][0], linewidth=0.8)
    panels[1].set(ylabel="gain of carryover over, %", xlabel="requests in flight")
    panels[1].set_xscale("log", base=2)
    panels[1].set_xticks(loads, [str(load) for load in loads])
    panels[1].minorticks_off()
    add_legend(panels[0], columns=2)
    if panels[1].get_legend_handles_labels()[0]:
        add_legend(panels[1])
    return _picture(
        figure, name, "Output tokens/s and gain of Carryover over concurrency, with 95% intervals"
    )


def _panels(count: int, height: float) -> tuple[Any, Sequence[Any]]:
    figure, panels = new_figure(count, height=count * height, sharex=True, squeeze=False)
    return figure, panels[:, 0]


def _line(role: str) -> Mapping[str, Any]:
    return series(ROLES.index(role))


def _speculating(measured: Measured) -> list[str]:
    return [
        role
        for role in DRAFTING_ROLES
        if role in measured.summaries and measured.summaries[role].position_rates
    ]


def _acceptance(gain: Comparison, label: str) -> Interval:
    part = gain if label == _ALL else gain.by_set.get(label)
    ratio = None if part is None else part.acceptance_ratio
    if ratio is None:
        return Interval(nan)
    return Interval(*(100 * (value - 1) for value in (ratio.value, ratio.low, ratio.high)))


def _error_bars(axes: Any, found: Sequence[Interval], places: Sequence[float], other: str) -> None:
    known = [(each, at) for each, at in zip(found, places, strict=True) if isfinite(each.value)]
    style = series(ROLES.index(other)) | {"linestyle": "none"}
    axes.plot([each.value for each, _ in known], [at for _, at in known], **style,
              label=f"over {other}")  # fmt: skip
    for each, at in known:
        if each.bounded:
            axes.plot([each.low, each.high], [at, at], color=style["color"], linewidth=1.4)


def _band(
    axes: Any, loads: Sequence[int], found: Sequence[Interval], role: str, *, scale: Any
) -> None:
    axes.plot(loads, [scale(each.value) for each in found], **_line(role), label=role)
    lows, highs = [scale(each.low) for each in found], [scale(each.high) for each in found]
    axes.fill_between(loads, lows, highs, color=colour(ROLES.index(role)), alpha=0.16, linewidth=0)


def _picture(figure: Any, name: str, description: str) -> Picture:
    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    # without the drawing program's version, which would change files that look the same
    figure.savefig(
        buffer, dpi=160, facecolor=COLOURS["page"][0], format="png", metadata={"Software": None}
    )
    return Picture(name, buffer.getvalue(), description)
