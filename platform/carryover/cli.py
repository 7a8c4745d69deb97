"""The `platform` command: assembles the command groups and turns errors into exit codes.

Exit codes: 0 fine, 2 the user's input, 1 ours, 130 interrupted. Nothing heavy is imported here
or at the top of any command module, so that `platform --help` is instant.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from carryover import __version__
from carryover.commands import (
    bench,
    checkpoint,
    data,
    demo,
    doctor,
    results,
    serve,
    sweep,
    traffic,
    train,
    ui,
)
from carryover.errors import UserError

app = typer.Typer(
    name="platform",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with: [bold]platform doctor[/], then [bold]platform demo[/].",
)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"carryover {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Train, serve and measure Carryover Drafting for speculative decoding."""


for module in (doctor, demo, data, train, serve, traffic, bench, sweep, results, checkpoint, ui):
    module.register(app)


def main() -> None:
    """Run the command line; the entry point of the `platform` script."""
    try:
        app(prog_name="platform")
    except UserError as error:
        _fail(str(error), 2)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except BrokenPipeError:
        sys.exit(0)


def _fail(message: str, code: int) -> None:
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, soft_wrap=True).print(
        Text("error: ", style="bold red"), message, sep="", markup=False
    )
    sys.exit(code)
