"""`platform sweep`: which arm and proposal length to deploy at which load."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from carryover.commands.options import (
    ConfigOption,
    DryRunOption,
    SetOption,
    TrackingUriOption,
    console,
    examples,
    log_console,
    show_config,
)

if TYPE_CHECKING:
    from sweeps.settings import Measurement, Setting, SweepConfig

DEFAULT_CONFIG = "sweeps/configs/decoding_embedded.yaml"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            f"platform sweep --config {DEFAULT_CONFIG}",
            f"platform sweep -c {DEFAULT_CONFIG} --set 'concurrencies=[1, 2]' --set out=runs/mine",
            f"platform sweep -c {DEFAULT_CONFIG} --dry-run",
        )
    )(sweep)


def sweep(
    config: ConfigOption = None,
    overrides: SetOption = None,
    tracking_uri: TrackingUriOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Measure every arm and proposal length at every load, and say which to deploy where.

    One engine at a time is started, and measured at all temperatures and concurrencies. The same
    command again measures what is missing.
    """
    from carryover.errors import ConfigError
    from carryover.guardian import guard
    from carryover.runtime import engine_environment
    from sweeps.settings import SweepConfig

    if config is None:
        raise ConfigError(f"name the sweep's configuration: --config {DEFAULT_CONFIG}")
    settings = SweepConfig.load(config, overrides=overrides or ())
    if dry_run:
        show_config(settings)
        return
    guard(environment=engine_environment())

    from carryover.tracking import Tracker
    from sweeps.decoding import run

    log = log_console()

    def tell(done: int, total: int, what: Measurement | Setting, problem: str | None) -> None:
        if problem is not None:
            log.print(f"{what.name} failed: {problem.splitlines()[-1]}", markup=False, style="red")
            return
        figures = what.figures
        length = figures.get("acceptance_length")
        log.print(
            f"{done}/{total}  {what.title}: {figures['output_tokens_per_s']:.1f} tokens/s"
            + ("" if length is None else f", acceptance length {length:.2f}"),
            markup=False,
            highlight=False,
        )

    _show(settings.absolute(), run(settings, tracker=Tracker(tracking_uri), on_progress=tell))


def _show(settings: SweepConfig, measured: list[Measurement]) -> None:
    """Print the answer, and write the recommended application."""
    from rich.table import Table

    from sweeps.settings import application_for, choose, recommend

    table = Table(box=None, pad_edge=False)
    for header in ("temperature", "concurrency", "best setting", "tokens/s", "speed-up"):
        table.add_column(header, justify="left" if header == "best setting" else "right")
    for choice in choose(settings, measured):
        table.add_row(
            f"{choice.temperature:g}",
            str(choice.concurrency),
            choice.setting,
            f"{choice.tokens_per_s:.1f}",
            "" if choice.speedup is None else f"{choice.speedup:.2f}x",
        )
    console().print(table)
    best = recommend(settings, measured)
    if best is not None:
        file = settings.out / "serve.yaml"
        head = "# Recommended by a sweep: the highest throughput over its loads.\n"
        file.write_text(head + application_for(settings, best).to_yaml())
        typer.echo(f"over all loads: {best.name}; serve it with: platform serve --config {file}")
