"""`platform checkpoint`: what a drafter is, and whether it serves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from carryover.commands.options import console, examples, log_console

if TYPE_CHECKING:
    from carryover.drafters.verify import VerifyReport

PathArgument = Annotated[Path, typer.Argument(metavar="PATH", help="Checkpoint folder.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


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
    app.add_typer(group, name="checkpoint", help="Look at drafters, and try them in vLLM.")


def show(path: PathArgument, as_json: JsonOption = False) -> None:
    """Print what a drafter checkpoint is, and the command that serves it in vLLM.

    Regime, shape, target, carried context, provenance.
    """
    from carryover.drafters.checkpoint import describe

    described = describe(path)
    if as_json:
        _print_json(described)
    else:
        _print_table(described)
        typer.echo(f"\n{_serve_line(path, described)}")


def verify(
    path: PathArgument,
    target: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Default: the target that the checkpoint names."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Load a drafter into stock vLLM with its target, and check every token of a few prompts.

    Takes about a minute. The text must be the target's own greedy text.
    """
    from carryover.guardian import guard
    from carryover.runtime import engine_environment

    guard(environment=engine_environment())

    from dataclasses import asdict

    with log_console().status("starting vLLM with the drafter"):
        report = _verify(path, target)
    if as_json:
        _print_json({**asdict(report), "acceptance_length": report.acceptance_length})
    else:
        typer.echo(str(report))


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
