"""`platform train`: a drafter from scratch, or from a checkpoint with carried context."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from carryover.commands.options import (
    ConfigOption,
    DryRunOption,
    SetOption,
    TrackingUriOption,
    examples,
    show_config,
)

if TYPE_CHECKING:
    from carryover.training.config import TrainConfig

app = typer.Typer(
    no_args_is_help=True, help="Train drafters, and small targets, through Ray Train."
)

DataOption = Annotated[
    Path | None,
    typer.Option(
        "--data", "-d", metavar="PATH", help="Responses of the target: Parquet or JSON lines."
    ),
]
NameOption = Annotated[
    str | None,
    typer.Option("--name", metavar="NAME", help="Name of the run: a folder below runs/train."),
]
FromOption = Annotated[
    Path,
    typer.Option(
        "--from",
        metavar="CHECKPOINT",
        help="Baseline checkpoint to begin at: a folder, or embedded:dflash.",
    ),
]
BaselineFromOption = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="CHECKPOINT",
        help="Begin at the weights of this baseline drafter, of the same regime or the other.",
    ),
]
RestartOption = Annotated[
    bool, typer.Option("--restart", help="Delete the run of this name and train it again.")
]
SkipVerifyOption = Annotated[
    bool,
    typer.Option("--skip-verify", help="Do not load the drafter into vLLM before the first step."),
]


@app.command(
    epilog=examples(
        "platform train baseline --config jobs/configs/embedded.yaml --data runs/data/responses",
        "platform train baseline -c jobs/configs/embedded.yaml -d FILE.jsonl --set max_steps=200",
        "platform train baseline -c jobs/configs/embedded.yaml --set optimizer.lr=1e-3 --dry-run",
        "platform train baseline -c jobs/configs/embedded.yaml -d runs/data/responses "
        "--from runs/train/embedded/best --name embedded-markov --set regime=markov",
    )
)
def baseline(
    start_from: BaselineFromOption = None,
    config: ConfigOption = None,
    data: DataOption = None,
    name: NameOption = None,
    set_: SetOption = None,
    restart: RestartOption = False,
    skip_verify: SkipVerifyOption = False,
    dry_run: DryRunOption = False,
    tracking_uri: TrackingUriOption = None,
) -> None:
    """Train a DFlash or Markov drafter, from scratch or from an earlier one.

    The same command again continues a run that was stopped or killed, and reuses a finished one.
    Ctrl-C stops after the current step and leaves a checkpoint.
    """
    _run(
        "baseline", config, data, name, set_, restart, skip_verify, dry_run, tracking_uri,
        start_from,
    )  # fmt: skip


@app.command(
    epilog=examples(
        "platform train carryover --from runs/train/embedded/best "
        "-c jobs/configs/embedded.yaml -d runs/data/responses",
        "platform train carryover --from CHECKPOINT -c jobs/configs/embedded.yaml -d PATH "
        "--set carried.carried=target_tokens",
    )
)
def carryover(
    start_from: FromOption,
    config: ConfigOption = None,
    data: DataOption = None,
    name: NameOption = None,
    set_: SetOption = None,
    restart: RestartOption = False,
    skip_verify: SkipVerifyOption = False,
    dry_run: DryRunOption = False,
    tracking_uri: TrackingUriOption = None,
) -> None:
    """Teach a baseline drafter to use the rejected states of its last round.

    Draft, verify, draft: the drafter proposes at every anchor, the frozen target verifies, and the
    drafter learns from the shifted anchors with what was rejected in view. The drafter's shape and
    regime are those of the checkpoint; epochs and learning rate are those of `continuation`.
    """
    _run(
        "carryover", config, data, name, set_, restart, skip_verify, dry_run, tracking_uri,
        start_from,
    )  # fmt: skip


@app.command(
    epilog=examples(
        "platform train control --from runs/train/embedded/best "
        "-c jobs/configs/embedded.yaml -d runs/data/responses",
    )
)
def control(
    start_from: FromOption,
    config: ConfigOption = None,
    data: DataOption = None,
    name: NameOption = None,
    set_: SetOption = None,
    restart: RestartOption = False,
    skip_verify: SkipVerifyOption = False,
    dry_run: DryRunOption = False,
    tracking_uri: TrackingUriOption = None,
) -> None:
    """Train the baseline on for as many steps as carryover training, with nothing carried.

    The equal-compute control: same data, steps, anchors and schedule. What carryover training
    gains over it is due to carrying, not to more training.
    """
    _run(
        "control", config, data, name, set_, restart, skip_verify, dry_run, tracking_uri,
        start_from,
    )  # fmt: skip


@app.command(
    epilog=examples(
        "platform train target -c jobs/configs/laboratory_target.yaml -d runs/data/responses",
        "platform train target -d runs/data/responses --set shape.vocab_size=8192 --name larger",
        "platform data regenerate --target runs/targets/laboratory/best",
    )
)
def target(
    config: ConfigOption = None,
    data: DataOption = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="Name of the run: a folder in runs/targets."),
    ] = None,
    set_: SetOption = None,
    restart: RestartOption = False,
    dry_run: DryRunOption = False,
    tracking_uri: TrackingUriOption = None,
) -> None:
    """Train a small target from scratch, on text that another target wrote.

    A laboratory: a Llama of some million parameters with its own tokenizer, on which all arms can
    be trained to convergence in hours on two cores. The same command again continues a run that was
    stopped or killed, and reuses a finished one.
    """
    from carryover.guardian import guard
    from carryover.runtime import engine_environment

    if not dry_run:
        guard(environment=engine_environment())
    from carryover.training.target_config import TargetTrainConfig

    settings = TargetTrainConfig.load(config, overrides=_overrides(data, name, set_))
    if dry_run:
        show_config(settings)
        return
    from jobs.train_target import train_target

    train_target(settings, restart=restart, tracking_uri=tracking_uri)


def _run(
    kind: str,
    config: Path | None,
    data: Path | None,
    name: str | None,
    overrides: list[str] | None,
    restart: bool,
    skip_verify: bool,
    dry_run: bool,
    tracking_uri: str | None,
    start_from: Path | None = None,
) -> None:
    from carryover.guardian import guard
    from carryover.runtime import engine_environment

    if not dry_run:
        guard(environment=engine_environment())
    settings = _settings(config, data, name, overrides, skip_verify)
    if kind != "baseline" and name is None:
        settings = settings.model_copy(update={"name": f"{settings.name}-{kind}"})
    if dry_run:
        if start_from is not None:
            from carryover.drafters.shipped import drafter_folder
            from jobs.train import continue_from

            settings = continue_from(drafter_folder(start_from), settings, kind=kind)
        show_config(settings)
        return
    from jobs.train import train

    train(settings, kind=kind, start_from=start_from, restart=restart, tracking_uri=tracking_uri)


def _settings(
    config: Path | None,
    data: Path | None,
    name: str | None,
    overrides: list[str] | None,
    skip_verify: bool,
) -> TrainConfig:
    from carryover.training.config import TrainConfig

    values = _overrides(data, name, overrides)
    if skip_verify:
        values.append("verify_first=false")
    return TrainConfig.load(config, overrides=values)


def _overrides(data: Path | None, name: str | None, overrides: list[str] | None) -> list[str]:
    """Assignments of the options, after the user's own."""
    values = list(overrides or [])
    for key, value in (("data", data), ("name", name)):
        if value is not None:
            values.append(f"{key}={str(value)!r}")
    return values


def register(root: typer.Typer) -> None:
    """Add the command group."""
    root.add_typer(app, name="train")
