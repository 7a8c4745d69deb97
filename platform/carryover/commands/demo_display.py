"""What `platform demo` shows: one line per stage, bars while it runs, the table at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from carryover.commands.data_display import Reporter, duration
from carryover.commands.options import log_console, progress

if TYPE_CHECKING:
    from jobs.demo import DemoOutcome


class DemoScreen:
    """Shows the stages on standard error.

    Args:
        num_stages: in all.
    """

    def __init__(self, num_stages: int) -> None:
        self._console = log_console()
        self._num_stages = num_stages
        self._head = ""

    def stage(self, number: int, title: str) -> None:
        """A stage begins."""
        self._head = f"[bold cyan]\\[{number}/{self._num_stages}][/] [bold]{title:<9}[/]"
        self._console.print(f"{self._head} …", highlight=False)

    def done(self, text: str, *, reused: bool, seconds: float) -> None:
        """The stage ended."""
        verb = "[yellow]reused[/]" if reused else "[green]done[/]"
        self._console.print(
            f"{self._head} {verb} in {duration(seconds)}: {escape(text)}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip

    @contextmanager
    def jobs(self, what: str, hint: str) -> Iterator[Callable[[Any], None]]:
        """Show the events of a data job."""
        with Reporter(what, resume_hint=hint) as reporter:
            yield reporter

    @contextmanager
    def arms(self) -> Iterator[Callable[[Any], None]]:
        """Show arms that start."""
        with progress() as bars:
            task = bars.add_task("arms ready", total=None, rate="")

            def report(states: list) -> None:
                stages = ", ".join(f"{state.arm}: {state.stage}" for state in states)
                ready = sum(state.ready for state in states)
                bars.update(task, completed=ready, total=len(states), rate=stages)

            yield report

    @contextmanager
    def requests(self) -> Iterator[Callable[[int, int, str], None]]:
        """Show requests of the bench."""
        with progress() as bars:
            task = bars.add_task("requests", total=None, rate="warming up")

            def report(done: int, total: int, arm: str) -> None:
                bars.update(task, completed=done, total=total, rate=arm)

            yield report


def show_outcome(console: Console, outcome: DemoOutcome) -> None:
    """The comparison, what to make of it, and what to do next."""
    from carryover.bench.report import remarks, result_table

    console.print()
    console.print(result_table(outcome.bench))
    for remark in remarks(outcome.bench):
        console.print(f"[yellow]note[/] {escape(remark)}", highlight=False)
    short = (
        "The Carryover arm went on from the baseline for a few steps on a few dozen responses: "
        if outcome.baseline_trained_before
        else "The drafters were trained for minutes on a few dozen responses: "
    )
    console.print(
        "Ratios are over the reference arm, the target alone; brackets are 95% intervals. "
        f"{short}that shows the path, not the gain, which docs/RESULTS.md measures.",
        highlight=False,
    )
    console.print(
        f"finished in {duration(outcome.seconds)}; "
        f"drafter: [cyan]{escape(str(outcome.drafter))}[/]; "
        f"records: {escape(outcome.tracking_uri)}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    for line in (
        "platform ui                                  # every run of this demo, in MLflow",
        f"platform checkpoint show {outcome.drafter}",
        "platform train baseline --help               # train one that pays",
    ):
        console.print(f"[cyan]$ {escape(line)}[/]", highlight=False, soft_wrap=True)
