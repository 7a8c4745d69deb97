"""What `platform bench` shows: a bar while it measures, then tables and remarks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from carryover.commands.options import console, log_console, progress


def run_with_progress(
    run: Callable[..., Any], config: Any, *, tracker: Any, resume: Path | None = None
) -> Any:
    """Run a bench behind a progress bar with requests/s and the remaining time.

    A bench that is cut short shows what was finished, and how to go on.
    """
    with progress() as bar:
        task = bar.add_task("starting", total=None, rate="")
        started_s, first = time.monotonic(), None

        def advance(done: int, total: int, what: str) -> None:
            nonlocal started_s, first
            if first is None or done < first:
                started_s, first = time.monotonic(), done
                bar.reset(task, total=total)
            rate = (done - first) / max(time.monotonic() - started_s, 1e-9)
            bar.update(
                task, completed=done, total=total, description=what,
                rate=f"{rate:.1f} requests/s" if done > first else "",
            )  # fmt: skip

        def show_partial(result: Any) -> None:
            bar.stop()
            show_result(result)
            log_console().print(
                f"go on with: platform bench {result.mode} --resume {result.folder}",
                highlight=False, soft_wrap=True,
            )  # fmt: skip

        return run(
            config, tracker=tracker, on_progress=advance, on_partial=show_partial, resume=resume
        )


def show_result(result: Any) -> None:
    """Print the tables, what must be known beside them, and where everything is."""
    from rich.markup import escape

    from carryover.bench.outputs import output_files
    from carryover.bench.report import remarks, result_tables, set_counts, settings_line

    log = log_console()
    log.print(escape(set_counts(result)), highlight=False, soft_wrap=True)
    log.print(escape(settings_line(result)), highlight=False, soft_wrap=True, style="dim")
    for table in result_tables(result):
        console().print(table)
    for remark in remarks(result):
        grave = remark.startswith(("INVALID", "PARTIAL"))
        colour = "red" if grave else "yellow"
        log.print(f"[{colour}]note:[/] {escape(remark)}", highlight=False)
    for path in output_files(result):
        log.print(str(path), highlight=False, soft_wrap=True, style="dim")
    if result.run_id is not None:
        log.print(f"MLflow run {result.run_id} (see it with `platform ui`)", highlight=False)
