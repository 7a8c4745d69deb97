"""`platform checkpoint`: what a drafter is, and whether it serves."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from carryover.commands.options import TrackingUriOption, console, examples, log_console

if TYPE_CHECKING:
    from collections.abc import Callable

    from carryover.diagnostics.headroom import Headroom
    from carryover.diagnostics.recording import Kind
    from carryover.diagnostics.replay import Recall, Replay
    from carryover.diagnostics.session import Job
    from carryover.drafters.verify import VerifyReport

PathArgument = Annotated[
    Path,
    typer.Argument(
        metavar="PATH", help="Checkpoint folder, or a shipped drafter such as embedded:dflash."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
TargetOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Default: the target that the checkpoint names."),
]
HeldOutOption = Annotated[
    Path,
    typer.Option(
        "--data", "-d", metavar="PATH", help="Responses that the drafter was not trained on."
    ),
]
MaxResponsesOption = Annotated[
    int, typer.Option("--max-responses", "-n", min=1, help="Of temperature 0, no more.")
]
RunNameOption = Annotated[
    str | None, typer.Option("--name", metavar="NAME", help="Of the run in MLflow.")
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(no_args_is_help=True)
    group.command(
        epilog=examples(
            "platform checkpoint show runs/baseline/best",
            "platform checkpoint show runs/baseline/best --json",
        )
    )(show)
    group.command(
        epilog=examples(
            "platform checkpoint verify runs/baseline/best",
            "platform checkpoint verify ./drafter --target Qwen/Qwen3-4B",
        )
    )(verify)
    group.command(
        epilog=examples(
            "platform checkpoint headroom embedded:dflash -d runs/data/responses",
            "platform checkpoint headroom runs/train/embedded/best -d FILE -n 200 --json",
        )
    )(headroom)
    group.command(
        epilog=examples(
            "platform checkpoint replay runs/train/embedded-carryover/best "
            "-d runs/data/responses --baseline runs/train/embedded/best",
            "platform checkpoint replay runs/train/embedded-carryover/best -d FILE --json",
        )
    )(replay)
    group.command(
        epilog=examples(
            "platform checkpoint export runs/train/embedded/best --out embedded-dflash",
            "platform checkpoint export runs/train/embedded/best --out embedded-dflash "
            "--dtype float16 --bench BENCH_RUN --data 'Prompts and responses of the target.'",
        )
    )(export)
    app.add_typer(group, name="checkpoint", help="Look at drafters, try them, give them away.")


def show(path: PathArgument, as_json: JsonOption = False) -> None:
    """Print what a drafter checkpoint is, and the command that serves it in vLLM.

    Regime, shape, target, carried context, provenance.
    """
    from carryover.drafters.checkpoint import describe
    from carryover.drafters.shipped import drafter_folder

    path = drafter_folder(path)
    described = describe(path)
    if as_json:
        _print_json(described)
    else:
        _print_table(described)
        typer.echo(f"\n{_serve_line(path, described)}")


def verify(
    path: PathArgument,
    target: TargetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Load a drafter into stock vLLM with its target, and check every token of a few prompts.

    Takes about a minute. The text must be the target's own greedy text.
    """
    from carryover.guardian import guard
    from carryover.runtime import engine_environment

    guard(environment=engine_environment())

    from dataclasses import asdict

    from carryover.drafters.shipped import drafter_folder

    with log_console().status("starting vLLM with the drafter"):
        report = _verify(drafter_folder(path), target)
    if as_json:
        _print_json({**asdict(report), "acceptance_length": report.acceptance_length})
    else:
        typer.echo(str(report))


def headroom(
    path: PathArgument,
    data: HeldOutOption,
    target: TargetOption = None,
    max_responses: MaxResponsesOption = 64,
    name: RunNameOption = None,
    as_json: JsonOption = False,
    tracking_uri: TrackingUriOption = None,
) -> None:
    """Tell whether Carryover training could pay, before paying for it; on a baseline drafter.

    Verifies the rounds of its own decoding, and asks whether the target's predictions at the
    rejected rows tell the next draft anything that it does not know: how often they come true, how
    often only they are right, and what acceptance a fitted mixture of both reaches.
    """
    from carryover.diagnostics.session import Job, run_headroom
    from carryover.drafters.shipped import drafter_folder

    job = Job(drafter_folder(path), data, None, target, max_responses)
    _diagnose(
        "headroom", run_headroom, job, name or _name(path), _print_headroom, as_json, tracking_uri
    )


def replay(
    path: PathArgument,
    data: HeldOutOption,
    baseline: Annotated[
        Path | None,
        typer.Option(metavar="CHECKPOINT", help="The checkpoint that it was continued from."),
    ] = None,
    target: TargetOption = None,
    max_responses: MaxResponsesOption = 64,
    name: RunNameOption = None,
    as_json: JsonOption = False,
    tracking_uri: TrackingUriOption = None,
) -> None:
    """Tell whether carried rows inform the drafter: recall with and without them, side by side.

    Rounds of the drafter's own decoding are drafted again at the same anchors: with the carried
    rows (ON), with the same weights and no carried rows (OFF), and by the baseline.
    """
    from carryover.diagnostics.session import Job, run_replay
    from carryover.drafters.shipped import drafter_folder

    before = None if baseline is None else drafter_folder(baseline)
    job = Job(drafter_folder(path), data, before, target, max_responses)
    _diagnose("replay", run_replay, job, name or _name(path), _print_replay, as_json, tracking_uri)


class WeightType(StrEnum):
    """Of exported weights."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


def export(
    path: PathArgument,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Where it goes.")],
    dtype: Annotated[WeightType, typer.Option(help="Of the weights.")] = WeightType.bfloat16,
    bench: Annotated[
        list[str] | None,
        typer.Option(metavar="RUN", help="Bench whose figures go into the card. Repeatable."),
    ] = None,
    data: Annotated[str, typer.Option(metavar="TEXT", help="What it was trained on.")] = "",
    limits: Annotated[str, typer.Option(metavar="TEXT", help="What it is not good for.")] = "",
    license_id: Annotated[
        str, typer.Option("--license", metavar="SPDX", help="Licence of the weights.")
    ] = "apache-2.0",
    packed: Annotated[
        bool,
        typer.Option(
            "--packed", help="Leave out the embedded target's LM head, to ship in this package."
        ),
    ] = False,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="With --packed: a shipped drafter; what is the same is left out."
        ),
    ] = None,
    tracking_uri: TrackingUriOption = None,
) -> None:
    """Write a drafter to give away: 16-bit weights, no trace of this machine, and a model card."""
    from carryover.drafters.export import export as write
    from carryover.drafters.shipped import drafter_folder

    if base is not None and not packed:
        raise typer.BadParameter("goes with --packed alone", param_hint="--base")
    figures = ""
    if bench:
        from carryover.bench.compare import markdown_figures, read_runs
        from carryover.tracking import Tracker

        figures = markdown_figures(read_runs(Tracker(tracking_uri), bench))
    folder = write(
        drafter_folder(path), out, dtype=dtype.value, license_id=license_id, data=data,
        figures=figures, limits=limits, packed=packed, base=base,
    )  # fmt: skip
    size = sum(file.stat().st_size for file in folder.iterdir())
    typer.echo(f"{folder}: {size / 1e6:.1f} MB; its card is {folder / 'README.md'}")


def _name(path: Path) -> str:
    """Of a diagnosis: the drafter as the user knows it, without where it lies."""
    return "/".join(path.parts[-2:])


def _diagnose(
    kind: Kind,
    run: Callable[..., Any],
    job: Job,
    name: str,
    show_table: Callable[[Any], None],
    as_json: bool,
    tracking_uri: str | None,
) -> None:
    """Run a diagnosis with its progress, record it, and print it."""
    from dataclasses import asdict

    from carryover.commands.options import progress
    from carryover.diagnostics.recording import EXPERIMENT, record
    from carryover.tracking import Tracker

    tracker = Tracker(tracking_uri)
    tracker.open(EXPERIMENT)  # a store that is down is said before the work
    with progress() as bars:
        task = bars.add_task("rounds", total=None, rate="")
        found = run(job, on_rounds=lambda count: bars.advance(task, count))
    run_id = record(tracker, kind, name, job, found)
    if as_json:
        _print_json({**asdict(found), "mlflow_run": run_id})
    else:
        show_table(found)
        typer.echo(f"MLflow run {run_id} in {tracker.display_uri}")


def _print_headroom(found: Headroom) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in (
        "slot", "drafts", "drafter right", "rejected row right", "only the rejected row right"
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for slot in found.slots:
        rates = (slot.drafter, slot.carried, slot.only_carried)
        table.add_row(str(slot.slot), f"{slot.drafts:,}", *(f"{100 * rate:.1f}%" for rate in rates))
    console().print(table)
    typer.echo(
        f"{found.rejected_rounds:,} of {found.rounds:,} rounds were rejected and lie whole in "
        f"their response. For each: {found.rejected_rows:.2f} rejected rows, of which "
        f"{found.reconverged:.2f} re-converge ({found.reconverged_exactly:.2f} at their very "
        f"position); {found.accepted_after_rejection:.2f} proposals after the first rejected one "
        f"come true. {100 * found.outside_vocabulary:.1f}% ended at a token that the drafter's "
        "vocabulary lacks\n"
        f"acceptance length of the draft that follows: {found.alone.value:.3f}; mixed with what "
        f"the rejected rows predict {found.mixed.value:.3f}, {found.gain.as_gain}\n"
    )


def _print_replay(found: Replay) -> None:
    from rich import box
    from rich.table import Table

    from carryover.diagnostics.replay import TOPS

    drafts = list(found.acceptance_length)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("block position", justify="right")
    table.add_column("rounds", justify="right")
    for top in TOPS:
        for draft in drafts:
            table.add_column(f"{draft.upper()}@{top}", justify="right")
        table.add_column(f"ON-OFF @{top}, points", justify="right")
    by_position: dict[int, list[Recall]] = {}
    for recall in found.recalls:
        by_position.setdefault(recall.position, []).append(recall)
    for position, recalls in by_position.items():
        cells = []
        for recall in recalls:
            cells += [f"{100 * recall.rates[draft]:.1f}%" for draft in drafts]
            cells.append(f"{100 * recall.gain:+.2f} ± {100 * recall.error:.2f}")
        table.add_row(str(position), f"{recalls[0].rounds:,}", *cells)
    console().print(table)
    lengths = ", ".join(f"{name.upper()} {value:.3f}" for name, value in
                        found.acceptance_length.items())  # fmt: skip
    gains = ", ".join(f"{gain.value:+.3f} ± {gain.error:.3f} over {name.upper()}" for name, gain in
                      found.acceptance_gain.items())  # fmt: skip
    typer.echo(
        f"{found.rounds:,} of {found.all_rounds:,} rounds have carried rows; "
        f"acceptance length there: {lengths}; ON is {gains}"
    )


def _verify(path: Path, target: str | None) -> VerifyReport:
    from carryover.drafters.checkpoint import read_config
    from carryover.drafters.verify import verify
    from carryover.targets import resolve

    read_config(path)  # a wrong folder is said before a target is made or downloaded
    return verify(path, resolve(target) if target else None)


def _serve_line(path: Path, described: dict[str, Any]) -> str:
    """The command that serves the drafter in vLLM, the drafting method named."""
    import json
    import shlex

    from carryover.drafters.checkpoint import read_config
    from carryover.engine import drafter_config

    target = read_config(path)["speculators_config"]["verifier"]["name_or_path"]
    settings = drafter_config(path, num_speculative_tokens=described["proposal_length"])
    return shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(settings)])


def _print_json(values: dict[str, Any]) -> None:
    import json

    typer.echo(json.dumps(values, indent=2, default=str))


def _print_table(values: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in _rows(values):
        table.add_row(name, Text(value))
    console().print(table)


def _rows(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows = []
    for name, value in values.items():
        if prefix and name == "target":  # the same as the drafter's own, shown above
            continue
        label = f"{prefix}{name.replace('_', ' ')}"
        if isinstance(value, dict) and value:
            rows += _rows(value, f"{label}: ")
        elif isinstance(value, int) and not isinstance(value, bool):
            rows.append((label, f"{value:,}"))
        elif isinstance(value, list):
            rows.append((label, ", ".join(map(str, value))))
        else:
            rows.append((label, "none" if value in (None, {}) else str(value)))
    return rows
