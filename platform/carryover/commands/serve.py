"""`platform serve`: host the arms of an application until told to stop."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from carryover.commands.options import (
    ConfigOption,
    DryRunOption,
    SetOption,
    console,
    examples,
    log_console,
    show_config,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from carryover.serving.config import ServeConfig
    from carryover.serving.endpoint import Endpoint
    from carryover.serving.startup import ArmState

DEFAULT_CONFIG = "serve_apps/configs/embedded.yaml"
AB_CONFIG = "serve_apps/configs/ab_embedded.yaml"


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(
        epilog=examples(
            f"platform serve --config {DEFAULT_CONFIG}",
            f"platform serve -c {DEFAULT_CONFIG} --set http.port=8080 "
            "--set arms.1.drafter=runs/mine",
            f"platform serve -c {AB_CONFIG} --set traffic.weights.carryover=50 "
            "--set traffic.weights.baseline=50",
            f"platform serve -c {DEFAULT_CONFIG} --dry-run",
            f"platform serve -c {DEFAULT_CONFIG} --address auto",
        )
    )(serve)


def serve(
    config: ConfigOption = None,
    overrides: SetOption = None,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="ADDRESS",
            help="Ray cluster to deploy on; default: start one on this machine.",
        ),
    ] = None,
    dry_run: DryRunOption = False,
) -> None:
    """Serve the arms of an application behind one OpenAI-compatible endpoint, until Ctrl-C.

    An arm is the target alone, or the target with a drafter; each is a vLLM deployment of its own.
    Requests for the application's model are split between the arms as `traffic` says, which
    `platform traffic` changes live; an arm's name as the model asks that arm.
    """  # fmt: skip
    from carryover.errors import ConfigError
    from carryover.guardian import guard, leftovers
    from carryover.runtime import engine_environment
    from carryover.serving.config import ServeConfig

    if config is None:
        raise ConfigError(f"name the application's configuration: --config {DEFAULT_CONFIG}")
    application = ServeConfig.load(config, overrides=overrides or ())
    if dry_run:
        show_config(application)
        return
    guard(environment=engine_environment())

    from carryover.serving.endpoint import running, watch_health

    log = log_console()
    if not (application.http.is_local or application.security.keys):
        log.print(
            f"[yellow]warning:[/] anyone who reaches {application.http.host}:"
            f"{application.http.port} may use the endpoint; set security.keys, or http.host to "
            "127.0.0.1",
            highlight=False,
        )
    stray = leftovers()
    if stray:
        listed = ", ".join(str(process.pid) for process in stray)
        log.print(
            f"[yellow]warning:[/] engines of an earlier run are still there (processes {listed}); "
            "they take memory and cores; end them with: kill " + listed.replace(",", "")
        )
    with ExitStack() as stack:
        with startup_view() as show:
            endpoint = stack.enter_context(running(application, address=address, report=show))
        _announce(endpoint, application)
        try:
            watch_health(application.name, tell=partial(log.print, highlight=False, markup=False))
        except KeyboardInterrupt:
            log.print("stopping ...")
    log.print("stopped; nothing is left running")


@contextmanager
def startup_view() -> Iterator[Callable[[list[ArmState]], None]]:
    """Show how far each arm is: a live table in a terminal, else one line per change."""
    from rich.live import Live
    from rich.table import Table

    log = log_console()

    def table(states: list[ArmState]) -> Table:
        drawn = Table(box=None, pad_edge=False)
        for heading in ("arm", "state"):
            drawn.add_column(heading)
        drawn.add_column("seconds", justify="right")
        for state in states:
            style = "green" if state.ready else "yellow"
            drawn.add_row(state.arm, f"[{style}]{state.stage}[/]", f"{state.seconds:.0f}")
        return drawn

    if log.is_terminal:
        with Live(console=log, refresh_per_second=4) as live:
            live.update("starting Ray ...")
            yield lambda states: live.update(table(states))
        return
    log.print("starting Ray ...")
    shown: dict[str, str] = {}

    def lines(states: list[ArmState]) -> None:
        for state in states:
            if shown.get(state.arm) != state.stage:
                shown[state.arm] = state.stage
                log.print(f"{state.seconds:5.0f} s  {state.arm}: {state.stage}", highlight=False)

    yield lines


def example_request(url: str, model: str) -> str:
    """A curl command that asks the endpoint something."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 64,
    }
    return (
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-d '{json.dumps(body)}'"
    )


def _announce(endpoint: Endpoint, application: ServeConfig) -> None:
    out, log = console(), log_console()
    out.print(
        f"[bold green]ready[/] {endpoint.url}/v1  model {endpoint.model}; "
        f"arms: {', '.join(endpoint.arms)}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    out.print(
        example_request(endpoint.url, endpoint.arms[-1]),
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
    if endpoint.metrics_url is not None:
        out.print(f"metrics {endpoint.metrics_url}", markup=False, highlight=False, soft_wrap=True)
    weights = application.traffic.resolve(arms=endpoint.arms, application=application.name).weights
    shares = ", ".join(f"{arm} {weight:.4g}" for arm, weight in weights.items())
    log.print(
        f"configured split: {shares}; see and change it with: platform traffic show "
        f"--url {endpoint.url} --key-file {endpoint.admin_key_file}",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
    log.print("stop with Ctrl-C")
