"""`platform demo`: the whole pipeline on the embedded target."""

from __future__ import annotations

from typing import Annotated

import typer

from carryover.commands.options import (
    ConfigOption,
    DryRunOption,
    SetOption,
    TrackingUriOption,
    console,
    examples,
    show_config,
)


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(
        epilog=examples(
            "platform demo",
            "platform demo --set train.max_steps=400 --set bench.concurrency=8",
            "platform demo --fresh",
            "platform demo --dry-run > my-demo.yaml",
        )
    )(demo)


def demo(
    config: ConfigOption = None,
    overrides: SetOption = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Remove what an earlier demo made, and begin anew.")
    ] = False,
    dry_run: DryRunOption = False,
    tracking_uri: TrackingUriOption = None,
) -> None:
    """Run the whole pipeline on this machine: data, training, serving, bench.

    The embedded 135M-parameter target writes prompts and answers them; a small drafter learns from
    the answers; both ways of decoding are served side by side and measured on the same prompts.
    Everything goes to runs/demo and is recorded in MLflow. A second run reuses what is there.
    """
    from carryover.guardian import guard
    from carryover.runtime import engine_environment

    if not dry_run:
        guard(environment=engine_environment())
    from carryover.commands.demo_display import DemoScreen, show_outcome
    from jobs.demo import DEFAULT_CONFIG, NUM_STAGES, DemoConfig, remove, run_demo

    settings = DemoConfig.load(config or DEFAULT_CONFIG, overrides=overrides or [])
    if dry_run:
        show_config(settings)
        return
    if fresh:
        remove(settings)
    outcome = run_demo(settings, DemoScreen(NUM_STAGES), tracking_uri=tracking_uri)
    show_outcome(console(), outcome)
