"""`platform ui`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from carryover.commands.options import TrackingUriOption, examples, log_console

if TYPE_CHECKING:
    from subprocess import Popen

START_TIMEOUT_S = 120


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=examples("platform ui", "platform ui --port 5001"))(ui)


def ui(
    tracking_uri: TrackingUriOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 5000,
) -> None:
    """Show the recorded runs in MLflow's own interface, until Ctrl-C."""
    from carryover.guardian import guard

    guard()

    from carryover.errors import EnvironmentProblem
    from carryover.stores import database_file, is_server, store_uri, without_password

    uri = store_uri(tracking_uri)
    if is_server(uri):
        typer.echo(f"the store is a server with an interface of its own: {without_password(uri)}")
        return
    file = database_file(uri)
    if file is not None and not file.exists():
        raise EnvironmentProblem(
            f"no MLflow store at {file}; record something first (`platform demo`), change into "
            "the folder where it was recorded, or name the store with --tracking-uri"
        )
    port = _free_port(host, port)
    with log_console().status("starting MLflow"):
        process = _start(uri, host, port)
    typer.echo(f"MLflow shows {without_password(uri)} at http://{host}:{port} (Ctrl-C stops it)")
    try:
        status = process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait(30)
        typer.echo("stopped")
        return
    raise typer.Exit(status)


def _free_port(host: str, port: int) -> int:
    import socket

    from carryover.errors import ConfigError

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another --port (0: any)"
            ) from None
        return probe.getsockname()[1]


def _start(uri: str, host: str, port: int) -> Popen:
    import os
    import subprocess
    import sys
    import tempfile
    import time

    import httpx

    from carryover.errors import EnvironmentProblem
    from carryover.stores import artifact_folder

    command = [sys.executable, "-P", "-m", "mlflow", "server", "--host", host, "--port", str(port)]
    command += ["--workers", "1", "--artifacts-destination", str(artifact_folder(uri))]
    environment = {
        **os.environ,
        "MLFLOW_BACKEND_STORE_URI": uri,  # not an argument, where a password would be seen
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        deadline = time.monotonic() + START_TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline:
            try:
                if httpx.get(f"http://{host}:{port}/health", timeout=2).is_success:
                    return process
            except httpx.HTTPError:
                time.sleep(0.2)
        process.kill()
        process.wait()
        log.seek(0)
        said = [line.strip() for line in log if line.strip()]
    raise EnvironmentProblem(
        f"MLflow's server did not start: {said[-1] if said else 'it said nothing'}; "
        "check the store with `platform doctor`"
    )
