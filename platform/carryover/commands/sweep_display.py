"""What `platform sweep` shows while it runs, and its answer."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from carryover.commands.options import console, log_console

if TYPE_CHECKING:
    from rich.console import RenderableType

    from sweeps.conductor import Task
    from sweeps.ledger import TrialEnd

_RECENT = 8
_STYLES = {"done": "green", "stopped": "yellow", "failed": "red", "died": "red"}


class SweepView:
    """A `conductor.Listener`: a live table in a terminal, else a line for each event.

    Args:
        settings: how many there will be, at most.
        parts: of each setting.
        done: parts that were measured before.
        budget_s: of this run, if it has one.
        figure: the figure of a measurement that is shown, and its unit.
    """

    def __init__(
        self,
        settings: int,
        *,
        parts: int,
        done: int = 0,
        budget_s: float | None = None,
        figure: tuple[str, str] = ("output_tokens_per_s", "tokens/s"),
    ) -> None:
        self._settings, self._parts, self._budget_s = settings, parts, budget_s
        self._done, self._new, self._ended = done, 0, 0
        self._figure, self._unit = figure
        self._began = time.monotonic()
        self._running: dict[str, list[Any]] = {}
        self._recent: deque[tuple[str, str, str]] = deque(maxlen=_RECENT)
        self._console = log_console()
        self._live: Any = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the table inside the block, in a terminal."""
        if not self._console.is_terminal:
            yield
            return
        from rich.live import Live

        with Live(get_renderable=self._table, console=self._console, refresh_per_second=2) as live:
            self._live = live
            yield
            self._live = None

    def started(self, task: Task, attempt: int) -> None:
        """See `conductor.Listener`."""
        self._running[task.name] = ["starting", time.monotonic(), 0, ""]
        again = f" (attempt {attempt})" if attempt > 1 else ""
        self._line(f"{task.name}: starting{again}")

    def ready(self, task: Task, start_s: float) -> None:
        """See `conductor.Listener`."""
        if task.name in self._running:
            self._running[task.name][0] = "measuring"
        self._line(f"{task.name}: ready after {start_s:.0f} s")

    def measured(self, task: Task, row: Mapping[str, Any]) -> None:
        """See `conductor.Listener`."""
        self._new += 1
        value = row["figures"].get(self._figure)
        shown = "" if value is None else f"{value:,.4g} {self._unit}"
        if task.name in self._running:
            self._running[task.name][2:] = [self._running[task.name][2] + 1, shown]
        length = row["figures"].get("acceptance_length")
        if length is not None and self._figure != "acceptance_length":
            shown += f", acceptance length {length:.2f}"
        self._line(f"{self._count()}  {task.name} {_where(row)}: {shown}")

    def ended(self, task: Task, end: TrialEnd) -> None:
        """See `conductor.Listener`."""
        self._ended += end.outcome != "died"
        self._running.pop(task.name, None)
        why = end.reason.strip().splitlines()[-1] if end.reason.strip() else ""
        self._recent.append((task.name, end.outcome, why))
        if end.outcome != "done":
            self._line(f"{task.name} {end.outcome}: {why}", style=_STYLES[end.outcome])

    def _count(self) -> str:
        return f"{self._done + self._new}/{self._settings * self._parts}"

    def _line(self, text: str, style: str = "") -> None:
        if self._live is None:
            self._console.print(text, markup=False, highlight=False, style=style, soft_wrap=True)

    def _table(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        from sweeps.durations import show_duration

        now = time.monotonic()
        spent = now - self._began
        head = f"{self._count()} measured, {self._ended} settings ended, {show_duration(spent)}"
        left = self._settings * self._parts - self._done - self._new
        if self._new and left > 0:
            head += f", about {show_duration(spent / self._new * left)} to go"
        if self._budget_s is not None:
            head += f", {show_duration(max(0.0, self._budget_s - spent))} of the budget left"
        table = Table(box=None, pad_edge=False)
        for name in ("setting", "state", "loads", "time", "last"):
            table.add_column(name, justify="right" if name in ("loads", "time") else "left")
        for name, outcome, why in self._recent:
            table.add_row(Text(name), Text(outcome, style=_STYLES[outcome]), "", "", Text(why[:60]))
        for name, (state, since, count, last) in list(self._running.items())[:_RECENT]:
            cells = (str(count), show_duration(now - since), last)
            table.add_row(Text(name), Text(state, style="cyan"), *cells)
        hidden = len(self._running) - _RECENT
        more = [Text(f"and {hidden} more that run")] if hidden > 0 else []
        return Group(Text(head), table, *more)


def _where(row: Mapping[str, Any]) -> str:
    if "concurrency" in row:
        return f"T={row['temperature']:g} c={row['concurrency']}"
    return f"step {row['step']}"


def show_choices(config: Any, points: list[Any]) -> None:
    """Print the best setting of each load."""
    from rich.table import Table

    from sweeps.answer import choose

    table = Table(box=None, pad_edge=False)
    for header in ("temperature", "clients", "best setting", "tokens/s", "over no drafter"):
        table.add_column(header, justify="left" if header == "best setting" else "right")
    for choice in choose(config, points):
        gain = choice.speedup
        table.add_row(
            f"{choice.point.load.temperature:g}",
            str(choice.point.load.concurrency),
            choice.point.setting.name + (" (over the TPOT limit)" if choice.over_limit else ""),
            f"{choice.point.rate:,.1f}",
            "" if gain is None else f"{gain.ratio:.2f}x",
        )
    console().print(table)


def show_crossings(points: list[Any], setting: str) -> None:
    """Print where a setting stops paying."""
    from sweeps.answer import crossings, gains_over_plain

    out = console()
    for crossing in crossings(gains_over_plain(points)):
        if crossing.setting == setting:
            text = f"{setting} at temperature {crossing.temperature:g} {crossing.text}"
            out.print(text, markup=False, highlight=False)
