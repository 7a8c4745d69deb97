"""`platform sweep`: which arm and proposal length to deploy at which load."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    from sweeps.ledger import Ledger
    from sweeps.settings import SweepConfig
    from sweeps.training_settings import TrainingSweepConfig

DEFAULT_CONFIG = "sweeps/configs/decoding_embedded.yaml"
PAGE = "report.html"
TRAINING_CONFIG = "sweeps/configs/training_embedded.yaml"

ResumeOption = Annotated[
    str | None,
    typer.Option(
        "--resume", metavar="NAME", help="Go on with a sweep: its name in runs/sweeps, or folder."
    ),
]
BudgetOption = Annotated[
    str | None,
    typer.Option("--budget", metavar="TIME", help="Stop after 30m, 2h ...; resume measures more."),
]
RetryOption = Annotated[
    bool, typer.Option("--retry-failed", help="Try settings again that failed for good.")
]


def register(app: typer.Typer) -> None:
    """Add the group; without a subcommand it runs a sweep."""
    group = typer.Typer(rich_markup_mode="rich")
    group.callback(
        invoke_without_command=True,
        epilog=examples(
            f"platform sweep --config {DEFAULT_CONFIG}",
            f"platform sweep -c {DEFAULT_CONFIG} --budget 30m --set 'concurrencies=[1, 2]'",
            f"platform sweep -c {TRAINING_CONFIG}",
            "platform sweep --resume decoding_embedded",
        ),
    )(sweep)
    group.command(epilog=examples(f"platform sweep run --config {DEFAULT_CONFIG}"))(run)
    group.command(
        epilog=examples(
            f"platform sweep plan --config {DEFAULT_CONFIG}",
            f"platform sweep plan -c {DEFAULT_CONFIG} --measured decoding_embedded --gpus 64 "
            "--gpu-hour 2.5",
        )
    )(plan)
    group.command(epilog=examples("platform sweep report decoding_embedded"))(report)
    app.add_typer(group, name="sweep", help="Find the best setting for your traffic.")


def sweep(
    context: typer.Context,
    config: ConfigOption = None,
    overrides: SetOption = None,
    resume: ResumeOption = None,
    budget: BudgetOption = None,
    retry_failed: RetryOption = False,
    tracking_uri: TrackingUriOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Measure every arm and proposal length at every load, and say which to deploy where.

    A trial starts one engine and measures it at all temperatures and concurrencies; on CPU one at a
    time, on a cluster one on each GPU. The same command again, or --resume, measures what is
    missing. A configuration with the key `train` sweeps training settings instead.
    """
    if context.invoked_subcommand is None:
        run(config, overrides, resume, budget, retry_failed, tracking_uri, dry_run)


def run(
    config: ConfigOption = None,
    overrides: SetOption = None,
    resume: ResumeOption = None,
    budget: BudgetOption = None,
    retry_failed: RetryOption = False,
    tracking_uri: TrackingUriOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """The same as `platform sweep` without a subcommand."""
    from carryover.guardian import guard
    from carryover.runtime import engine_environment
    from sweeps.durations import parse_duration

    settings = _load(config, overrides, resume)
    budget_s = None if budget is None else parse_duration(budget)
    if dry_run:
        show_config(settings)
        return
    guard(environment=engine_environment())

    from sweeps.settings import SweepConfig

    is_decoding = isinstance(settings, SweepConfig)
    runner = _run_decoding if is_decoding else _run_training
    runner(settings.absolute(), tracking_uri, budget_s, retry_failed)


def plan(
    config: ConfigOption = None,
    overrides: SetOption = None,
    resume: ResumeOption = None,
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", min=1, help="Trials at once; default: as configured, else one."),
    ] = None,
    gpu_hour: Annotated[
        float | None,
        typer.Option("--gpu-hour", min=0.0, help="Price of a GPU or node for an hour."),
    ] = None,
    measured: Annotated[
        str | None,
        typer.Option("--measured", metavar="NAME", help="A sweep to take times and sizes from."),
    ] = None,
) -> None:
    """Print what a sweep would run, how long that takes, what it stores and costs; starts nothing.

    Times and sizes are those that were measured: by this sweep so far, or by another one.
    """
    from sweeps.loading import folder_of
    from sweeps.settings import SweepConfig

    settings = _load(config, overrides, resume).absolute()
    if not isinstance(settings, SweepConfig):
        from sweeps.training_plan_display import show_training_plan

        show_training_plan(settings, slots=gpus, price_per_hour=gpu_hour)
        return
    from sweeps.plan_display import show_plan

    source = None if measured is None else folder_of(measured)
    show_plan(settings, source=source, slots=gpus, price_per_hour=gpu_hour)


def report(
    name: Annotated[str, typer.Argument(help="A sweep in runs/sweeps, or its folder.")],
) -> None:
    """Write the page and the recommended application of a sweep again, from what it measured."""
    from sweeps.settings import SweepConfig

    settings = _load(None, None, name).absolute()
    if isinstance(settings, SweepConfig):
        from sweeps.loading import open_ledger

        ledger = open_ledger(settings)
        _write_decoding(settings, ledger)
        _show_decoding(settings, ledger)
    else:
        from sweeps.training import open_ledger

        ledger = open_ledger(settings)
        _write_training(settings, ledger)
        _show_training(settings, ledger)


def _load(
    config: Path | None, overrides: list[str] | None, resume: str | None
) -> SweepConfig | TrainingSweepConfig:
    from carryover.errors import ConfigError
    from sweeps.loading import CONFIG_FILE, folder_of, load

    if (config is None) == (resume is None):
        raise ConfigError(
            f"name the sweep's configuration with --config {DEFAULT_CONFIG}, or an earlier sweep "
            "with --resume NAME"
        )
    if resume is None:
        return load(config, overrides or ())
    folder = folder_of(resume)
    # where it is now, should it have been moved
    return load(folder / CONFIG_FILE, [*(overrides or ()), f"out={json.dumps(str(folder))}"])


def _run_decoding(
    settings: SweepConfig, tracking_uri: str | None, budget_s: float | None, retry_failed: bool
) -> None:
    from carryover.commands.sweep_display import SweepView
    from carryover.tracking import Tracker
    from sweeps.decoding import DecodingPlan
    from sweeps.decoding import run as run_sweep
    from sweeps.loading import open_ledger

    ledger = open_ledger(settings)
    planned = DecodingPlan(settings, ledger)
    done = sum(
        ledger.has(task.name, part) for task in planned.tasks.values() for part in task.parts
    )
    view = SweepView(planned.size, parts=len(settings.loads()), done=done, budget_s=budget_s)
    with _resumable(settings.out), view.shown():
        figures = run_sweep(
            settings, tracker=Tracker(tracking_uri), listeners=[view], budget_s=budget_s,
            retry_failed=retry_failed, answer=partial(_write_decoding, settings),
        )  # fmt: skip
    _show_decoding(settings, open_ledger(settings))
    _say_how_it_went(figures, settings.out)


def _write_decoding(settings: SweepConfig, ledger: Ledger) -> list[Path]:
    """Write the page and the recommended application."""
    from sweeps.answer import application_for, points_of, recommend
    from sweeps.page import write_page

    files = [write_page(settings, ledger, settings.out / PAGE)]
    best = recommend(settings, points_of(settings, ledger.figures))
    if best is not None:
        file = settings.out / "serve.yaml"
        head = "# Recommended by a sweep: the highest throughput over its loads.\n"
        file.write_text(head + application_for(settings, best).to_yaml())
        files.append(file)
    return files


def _show_decoding(settings: SweepConfig, ledger: Ledger) -> None:
    """Print the answer."""
    from carryover.commands.sweep_display import show_choices, show_crossings
    from sweeps.answer import points_of, recommend

    points = points_of(settings, ledger.figures)
    show_choices(settings, points)
    best = recommend(settings, points)
    if best is not None:
        show_crossings(points, best.name)
        file = settings.out / "serve.yaml"
        _say(f"over all loads: {best.name}; serve it with: platform serve --config {file}")
    _say(f"page: {settings.out / PAGE}")


def _run_training(
    settings: TrainingSweepConfig,
    tracking_uri: str | None,
    budget_s: float | None,
    retry_failed: bool,
) -> None:
    from carryover.commands.sweep_display import SweepView
    from carryover.tracking import Tracker
    from sweeps.training import TrainingPlan, open_ledger
    from sweeps.training import run as run_sweep

    planned = TrainingPlan(settings, open_ledger(settings))
    view = SweepView(
        planned.size, parts=1, budget_s=budget_s, figure=("acceptance_length", "acceptance length")
    )
    with _resumable(settings.out), view.shown():
        figures = run_sweep(
            settings, tracker=Tracker(tracking_uri), listeners=[view], budget_s=budget_s,
            retry_failed=retry_failed, answer=partial(_write_training, settings),
        )  # fmt: skip
    _show_training(settings, open_ledger(settings))
    _say_how_it_went(figures, settings.out)


def _write_training(settings: TrainingSweepConfig, ledger: Ledger) -> list[Path]:
    from sweeps.training_page import write_page

    return [write_page(settings, ledger, settings.out / PAGE)]


def _show_training(settings: TrainingSweepConfig, ledger: Ledger) -> None:
    from sweeps.training_page import show_best

    show_best(settings, ledger, console())
    _say(f"page: {settings.out / PAGE}")


@contextmanager
def _resumable(out: Path) -> Iterator[None]:
    """Say how to go on when the sweep inside the block is interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        log_console().print(
            f"stopped; go on with: platform sweep --resume {out}",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
        raise


def _say_how_it_went(figures: Any, out: Path) -> None:
    from sweeps.durations import show_duration

    if figures is None:
        return
    log = log_console()
    log.print(
        f"{figures.trials} trials in {show_duration(figures.wall_s)}; scheduling took "
        f"{figures.overhead_s:.1f} s of a slot for each",
        highlight=False,
    )
    if figures.out_of_time:
        log.print(
            f"the budget is spent; measure the rest with: platform sweep --resume {out}",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip


def _say(text: str) -> None:
    console().print(text, markup=False, highlight=False, soft_wrap=True)
