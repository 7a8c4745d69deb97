"""Options and output that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from carryover.config import Config

ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", metavar="FILE", help="YAML configuration file.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key, as in a.b=c. Repeatable."),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Print the resolved configuration and stop.")
]
TrackingUriOption = Annotated[
    str | None,
    typer.Option(
        "--tracking-uri",
        metavar="URI",
        envvar="MLFLOW_TRACKING_URI",
        help="MLflow store or server; default: mlflow.db in the working folder.",
    ),
]


def examples(*lines: str) -> str:
    """Epilog for a command's --help: one example a line."""
    return "\n\n".join(["[bold]Examples[/]", *(f"[cyan]$ {line}[/]" for line in lines)])


def console() -> Console:
    """Console for what a command prints as its result (stdout)."""
    from rich.console import Console

    return Console()


def log_console() -> Console:
    """Console for progress and remarks (stderr), so that results can be piped."""
    from rich.console import Console

    return Console(stderr=True)


def progress() -> Progress:
    """Progress bar with count, speed (`task.fields['rate']`, free text) and remaining time."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=log_console(),
        refresh_per_second=4,
    )


def show_config(config: Config) -> None:
    """Print the resolved configuration for --dry-run, as YAML that can be used again."""
    typer.echo(config.to_yaml(), nl=False)
