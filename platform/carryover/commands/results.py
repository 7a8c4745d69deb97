"""`platform results`: the page that says whether Carryover pays, from MLflow's runs alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from carryover.commands.options import (
    ConfigOption,
    DryRunOption,
    SetOption,
    TrackingUriOption,
    examples,
    log_console,
    show_config,
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "platform results --config jobs/configs/results.yaml --out docs/RESULTS.md",
            "platform results --config jobs/configs/results.yaml --check",
            "platform results -c mine.yaml -o runs/RESULTS.md --tracking-uri http://127.0.0.1:5000",
        )
    )(results)


def results(
    config: ConfigOption = None,
    overrides: SetOption = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="The page; figures go beside it.")
    ] = Path("docs/RESULTS.md"),
    check: Annotated[
        bool,
        typer.Option("--check", help="Write nothing; exit with 2 if the page is not up to date."),
    ] = False,
    dry_run: DryRunOption = False,
    tracking_uri: TrackingUriOption = None,
) -> None:
    """Write the results page from MLflow's runs: goals, tables, figures, where they come from.

    The configuration names benches and training runs. Every figure is computed from the requests
    that the benches recorded, and the same runs always give the same page. They are kept beside the
    page, from where it can be made again without the store.
    """
    from carryover.errors import ConfigError
    from carryover.results.config import ResultsConfig

    if config is None:
        raise ConfigError(
            "the page needs a configuration that names its runs; give --config, such as "
            "jobs/configs/results.yaml"
        )
    settings = ResultsConfig.load(config, overrides=overrides or ())
    if dry_run:
        show_config(settings)
        return
    from carryover.results.document import differences, picture_folder, write_page
    from carryover.results.kept import KeptRuns
    from carryover.results.page import make_page
    from carryover.results.runs import RunReader
    from carryover.tracking import Tracker

    kept = KeptRuns(picture_folder(out) / "runs")
    reader = RunReader(Tracker(tracking_uri), kept)
    with log_console().status("reading runs") as status:
        page = make_page(
            settings, reader, folder=picture_folder(out).name,
            on_section=lambda name: status.update(f"computing {name}"),
        )  # fmt: skip
    if not check:
        write_page(page, out)
        reader.keep(kept)
        typer.echo(f"{out} and {len(page.pictures)} figures in {picture_folder(out)}")
        return
    said = differences(page, out)
    if said:
        raise ConfigError(
            "the page is not what MLflow gives: " + "; ".join(said) + ". Write it again without "
            "--check"
        )
    typer.echo(f"{out} is what MLflow gives")
