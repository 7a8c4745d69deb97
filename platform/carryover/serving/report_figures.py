"""Drawings of the traffic report: what each arm did over time, and how the verdict developed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from carryover.page_style import COLOURS
from carryover.pages import add_legend, colour, new_figure, series
from carryover.serving.history import History

# Points a drawing of phone width can show.
MAX_INTERVALS = 60
MAX_NUMBERED_EVENTS = 12
_UNITS = ((2 * 86400, 86400, "days"), (2 * 3600, 3600, "hours"), (120, 60, "minutes"))
_INK, _MUTED = COLOURS["ink"][0], COLOURS["muted"][0]


@dataclass(frozen=True)
class Event:
    """A change of the split, drawn as a vertical mark with its number in the table of changes."""

    number: int
    time_s: float


class TimeFigures:
    """Drawings that share a time axis, and the arms' colours.

    Args:
        history: of the experiment.
        arms: names in the order of their colours, the control first.
        events: changes to mark.
        until_s: epoch time of the report.
    """

    def __init__(
        self, history: History, *, arms: Sequence[str], events: Sequence[Event], until_s: float
    ) -> None:
        self._history = history.at_most(MAX_INTERVALS)
        self._arms, self._events = list(arms), events
        self._start_s = history.start_s if history.start_s is not None else until_s
        span = max(until_s - self._start_s, 1.0)
        self._scale, self._unit = next(
            ((scale, unit) for least, scale, unit in _UNITS if span >= least), (1, "seconds")
        )
        self._last = span / self._scale

    @property
    def has_data(self) -> bool:
        """Whether there is any interval to draw."""
        return self._history.num_intervals > 0

    def acceptance(self) -> Figure | None:
        """Acceptance length by arm; None if no arm drafts."""
        return self._with_intervals(self._history.acceptance, "acceptance length", scale=1.0)

    def latency(self, name: str) -> Figure | None:
        """Geometric mean of "tpot" or "ttft" by arm, in milliseconds; None without answers."""
        return self._with_intervals(
            lambda arm: self._history.latency(arm, name), f"{name.upper()}, ms", scale=1000.0
        )

    def split(self) -> Figure:
        """Share of the compared requests by arm, stacked."""
        counts = np.array([self._history.sums(arm, "compared") for arm in self._arms])
        total = counts.sum(axis=0)
        shares = 100 * np.divide(counts, total, out=np.zeros_like(counts), where=total > 0)
        figure, axes = new_figure()
        width = self._history.interval_s / self._scale
        floor = np.zeros_like(total)
        for index, (arm, share) in enumerate(zip(self._arms, shares, strict=True)):
            axes.bar(
                self._times(), share, width, bottom=floor, label=arm, color=colour(index), alpha=0.6
            )
            floor = floor + share
        axes.set_ylim(0, 100)
        axes.set_ylabel("% of compared requests")
        return self._finish(figure, axes)

    def failures(self) -> Figure | None:
        """Failures per request by arm, in percent; None if there were none."""
        figure, axes = new_figure()
        any_failure = False
        for index, arm in enumerate(self._arms):
            failed = self._history.sums(arm, "failures")
            total = self._history.sums(arm, "compared")
            any_failure |= bool(failed.any())
            rate = np.divide(100 * failed, total, out=np.full_like(total, np.nan), where=total > 0)
            axes.plot(self._times(), rate, label=arm, **series(index, markers=self._few()))
        axes.set_ylim(bottom=0)
        axes.set_ylabel("failures, % of requests")
        return self._finish(figure, axes) if any_failure else None

    def verdict(
        self, points: Mapping[str, Sequence[Sequence[float]]], arm: str, metric: str
    ) -> Figure | None:
        """How an arm's comparison with the control developed; None if there is nothing to draw.

        Args:
            points: `Trail.points`.
            arm: which one.
            metric: one that is compared by its relative change.
        """
        found = np.array(points.get(f"{arm}/{metric}", ()), dtype=float)
        if not len(found):
            return None
        figure, axes = new_figure()
        times, index = (found[:, 0] - self._start_s) / self._scale, self._arms.index(arm)
        value, low, high = 100 * found[:, 1:].T
        axes.plot(times, value, **series(index, markers=False))
        axes.fill_between(times, low, high, color=colour(index), alpha=0.16, linewidth=0)
        axes.axhline(0, color=_INK, linewidth=1)
        # Early intervals are wide; the eye needs the later ones.
        later = len(found) // 4
        bottom, top = min(low[later:].min(), 0.0), max(high[later:].max(), 0.0)
        margin = 0.1 * (top - bottom) + 0.1
        axes.set_ylim(bottom - margin, top + margin)
        axes.set_ylabel("change, %")
        return self._finish(figure, axes, legend=False)

    def _with_intervals(
        self, get: Callable[[str], tuple[np.ndarray, ...]], label: str, *, scale: float
    ) -> Figure | None:
        figure, axes = new_figure()
        levels: list[np.ndarray] = []
        for index, arm in enumerate(self._arms):
            mean, low, high = (values * scale for values in get(arm))
            if np.isnan(mean).all():
                continue
            axes.plot(self._times(), mean, label=arm, **series(index, markers=self._few()))
            axes.fill_between(
                self._times(), low, high, color=colour(index), alpha=0.16, linewidth=0
            )
            levels += [mean, low, high]
        if not levels:
            return None
        known = np.concatenate(levels)
        known = known[np.isfinite(known)]
        # One interval with two requests must not squeeze the rest.
        low, high = np.percentile(known, [2, 98])
        margin = 0.12 * (high - low) or 0.05 * abs(high) or 1.0
        axes.set_ylim(low - margin, high + margin)
        axes.set_ylabel(label)
        return self._finish(figure, axes)

    def _times(self) -> np.ndarray:
        return (self._history.times_s() - self._start_s) / self._scale

    def _few(self) -> bool:
        return self._history.num_intervals <= 25

    def _finish(self, figure: Figure, axes: Any, *, legend: bool = True) -> Figure:
        """Time axis, marks of changes, legend."""
        axes.set_xlim(0, self._last)
        axes.set_xlabel(f"{self._unit} since the first request")
        inside = [
            (event, (event.time_s - self._start_s) / self._scale) for event in self._events
        ]
        inside = [(event, at) for event, at in inside if 0 <= at <= self._last]
        for event, at in inside:
            axes.axvline(at, color=_MUTED, linewidth=0.9, linestyle=(0, (2, 2)))
            if len(inside) <= MAX_NUMBERED_EVENTS:
                axes.annotate(
                    str(event.number), (at, 1), xycoords=("data", "axes fraction"),
                    xytext=(2, -2), textcoords="offset points", fontsize=8.5, color=_MUTED,
                    va="top",
                )  # fmt: skip
        if legend:
            add_legend(axes)
        return figure


def per_position(rates: Mapping[str, Sequence[float]], *, arms: Sequence[str]) -> Figure | None:
    """Share of rounds that accepted at least k proposals, by arm; None if no arm drafts."""
    figure, axes = new_figure()
    longest = 0
    for index, arm in enumerate(arms):
        shares = rates.get(arm) or ()
        if shares:
            longest = max(longest, len(shares))
            positions = range(1, len(shares) + 1)
            axes.plot(positions, [100 * share for share in shares], label=arm, **series(index))
    if not longest:
        return None
    axes.set_ylim(0, 100)
    axes.set_xlim(0.5, longest + 0.5)
    axes.set_xticks(range(1, longest + 1, 1 if longest <= 16 else 4))
    axes.set_xlabel("position in the proposal")
    axes.set_ylabel("% of rounds that accept it")
    add_legend(axes)
    return figure
