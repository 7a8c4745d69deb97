"""`platform bench`: measure the arms of a running endpoint."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from carryover.commands.options import (
    ConfigOption,
    DryRunOption,
    SetOption,
    TrackingUriOption,
    console,
    examples,
    log_console,
    progress,
    show_config,
)


def register(app: typer.Typer) -> None:
    """Add the group to the command line."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
    group.command(
        epilog=examples(
            "platform bench online --prompts prompts.jsonl",
            "platform bench online --prompts prompts.jsonl --url http://127.0.0.1:8080 "
            "--concurrency 8 --num-prompts 200 --max-tokens 256",
            "platform bench online --prompts prompts.jsonl --temperature 1 --arms dflash "
            "--arms autoregressive",
            "platform bench online --prompts prompts.jsonl --set block_size=4 --set seed=7",
        )
    )(online)
    app.add_typer(group, name="bench", help="Measure speed and acceptance.")


def online(
    config: ConfigOption = None,
    prompts: Annotated[
        str | None,
        typer.Option("--prompts", "-p", metavar="FILE", help="JSON lines, Parquet or data set."),
    ] = None,
    url: Annotated[str | None, typer.Option("--url", help="The endpoint.")] = None,
    arms: Annotated[
        list[str] | None, typer.Option("--arms", metavar="ARM", help="Arm to measure. Repeatable.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", min=1, help="Requests in flight.")
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option("--num-prompts", "-n", min=1, help="Prompts; default: all.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Longest response.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0.0, help="0 compares texts too.")
    ] = None,
    metrics_url: Annotated[
        str | None,
        typer.Option("--metrics-url", metavar="URL", help="Page with vLLM's counters."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FOLDER", help="For the results.")
    ] = None,
    overrides: SetOption = None,
    tracking_uri: TrackingUriOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Send the same prompts to every arm of an endpoint, and compare the arms.

    Arms alternate block by block in random order; warm-up is left out. Shows acceptance length,
    output tokens/s, TTFT, TPOT and end-to-end latency with 95% intervals, writes every request as
    a row of Parquet, and records all of it in MLflow.
    """
    from carryover.bench.online import OnlineConfig

    given = {
        "prompts": prompts, "url": url, "arms": arms or None, "concurrency": concurrency,
        "num_prompts": num_prompts, "max_tokens": max_tokens, "temperature": temperature,
        "metrics_url": metrics_url, "out": None if out is None else str(out),
    }  # fmt: skip
    flags = [f"{name}={json.dumps(value)}" for name, value in given.items() if value is not None]
    resolved = OnlineConfig.load(config, overrides=[*flags, *(overrides or ())])
    if dry_run:
        show_config(resolved)
        return

    from carryover.tracking import Tracker

    show_result(run_with_progress(resolved, tracker=Tracker(tracking_uri)))


def run_with_progress(config: Any, *, tracker: Any) -> Any:
    """Run an online bench behind a progress bar with requests/s."""
    from carryover.bench.online import run

    with progress() as bar:
        task = bar.add_task("warming up", total=None, rate="")
        started = time.monotonic()

        def advance(done: int, total: int, arm: str) -> None:
            rate = f"{done / max(time.monotonic() - started, 1e-9):.1f} requests/s"
            bar.update(task, completed=done, total=total, description=f"bench {arm}", rate=rate)

        return run(config, tracker=tracker, on_progress=advance)


def show_result(result: Any) -> None:
    """Print the table, what must be known beside it, and where the rows are."""
    from carryover.bench.report import remarks, result_table

    console().print(result_table(result))
    log = log_console()
    for remark in remarks(result):
        log.print(f"[yellow]note:[/] {remark}")
    log.print(f"rows: {result.folder / 'requests.parquet'}", highlight=False, soft_wrap=True)
    if result.run_id is not None:
        log.print(f"MLflow run {result.run_id} (see it with `platform ui`)", highlight=False)
