"""What `platform sweep` shows while it runs: lines, or a table in a terminal."""

import io

import pytest
from rich.console import Console

from carryover.commands import sweep_display
from carryover.commands.sweep_display import SweepView
from sweeps.conductor import Task
from sweeps.ledger import TrialEnd

TASKS = [Task(name, {}, {}, ((0.0, 1), (0.0, 8))) for name in ("plain", "dflash-7", "dflash-2")]


def row(setting, concurrency, rate, length=None):
    figures = {"output_tokens_per_s": rate}
    if length is not None:
        figures["acceptance_length"] = length
    return {"setting": setting, "temperature": 0.0, "concurrency": concurrency, "figures": figures}


@pytest.fixture
def screen(monkeypatch):
    """Makes the console that the view writes to; returns its text so far."""

    def make(*, terminal):
        said = io.StringIO()
        console = Console(file=said, force_terminal=terminal, width=110, color_system=None)
        monkeypatch.setattr(sweep_display, "log_console", lambda: console)
        return said

    return make


def play(view):
    plain, long, short = TASKS
    view.started(plain, 1)
    view.ready(plain, 41.0)
    view.measured(plain, row("plain", 1, 20.0))
    view.measured(plain, row("plain", 8, 120.5))
    view.ended(plain, TrialEnd("plain", "done"))
    view.started(long, 1)
    view.ended(long, TrialEnd("dflash-7", "failed", "a traceback\nlength 7 exceeds 4"))
    view.started(short, 2)
    view.ready(short, 39.0)
    view.measured(short, row("dflash-2", 1, 31.25, 1.75))


def test_lines_where_there_is_no_terminal(screen):
    said = screen(terminal=False)
    view = SweepView(3, parts=2, done=1)
    with view.shown():
        play(view)
    lines = said.getvalue().splitlines()
    assert "plain: ready after 41 s" in lines
    assert "3/6  plain T=0 c=8: 120.5 tokens/s" in lines
    assert "dflash-7 failed: length 7 exceeds 4" in lines
    assert "dflash-2: starting (attempt 2)" in lines
    assert "4/6  dflash-2 T=0 c=1: 31.25 tokens/s, acceptance length 1.75" in lines


def test_a_table_of_what_runs_and_what_ended_in_a_terminal(screen):
    said = screen(terminal=True)
    view = SweepView(3, parts=2, budget_s=1800.0)
    with view.shown():
        play(view)
    shown = said.getvalue()
    final = shown[shown.rindex("measured, ") - 5 :]
    assert "3/6 measured, 2 settings ended" in final
    assert "to go" in final and "30 min of the budget left" in final
    for cells in (("plain", "done"), ("dflash-7", "failed", "length 7 exceeds 4"),
                  ("dflash-2", "measuring", "1", "31.25 tokens/s")):  # fmt: skip
        (line,) = [each for each in final.splitlines() if each.strip().startswith(cells[0])]
        assert all(cell in line for cell in cells), line


def test_of_many_that_run_only_some_are_shown(screen):
    said = screen(terminal=True)
    view = SweepView(100, parts=1)
    with view.shown():
        for number in range(64):
            view.started(Task(f"s{number}", {}, {}, ((0.0, 1),)), 1)
    assert "and 56 more that run" in said.getvalue()
