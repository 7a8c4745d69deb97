"""`platform doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from carryover.commands.options import TrackingUriOption, console, examples, log_console

_COLOURS = {"green": "green", "yellow": "yellow", "red": "bold red"}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=examples("platform doctor", "platform doctor --json"))(doctor)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    tracking_uri: TrackingUriOption = None,
) -> None:
    """Check that this machine can run everything, and say how to fix what cannot.

    Versions, target classes, vLLM and its plugin, threads, GPU, memory, disk, Ray, MLflow. Exits
    with 1 when a row is red; yellow rows work, but cost speed or comfort.
    """
    from carryover.guardian import guard
    from carryover.runtime import engine_environment

    guard(environment=engine_environment())

    import json
    from dataclasses import asdict

    from rich.markup import escape
    from rich.table import Table

    from carryover.doctor import diagnose

    with log_console().status("checking; importing vLLM and starting Ray take a while"):
        findings = diagnose(tracking_uri=tracking_uri)
    count = {colour: sum(f.status == colour for f in findings) for colour in _COLOURS}
    if as_json:
        rows = [asdict(finding) for finding in findings]
        typer.echo(json.dumps({"ready": not count["red"], "findings": rows}, indent=2))
    else:
        table = Table("check", "", box=None, pad_edge=False)
        for header in ("found", "fix"):
            table.add_column(header, overflow="fold")
        for finding in findings:
            colour = _COLOURS[finding.status]
            status = f"[{colour}]{finding.status}[/]"
            table.add_row(finding.name, status, escape(finding.found), escape(finding.fix))
        console().print(table)
        verdict = "not ready" if count["red"] else "ready"
        console().print(f"{verdict}: " + ", ".join(f"{n} {c}" for c, n in count.items() if n))
    if count["red"]:
        raise typer.Exit(1)
