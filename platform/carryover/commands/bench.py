"""`platform bench`: measure the arms of an endpoint, or engines of our own, and compare results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from carryover.commands.options import (
    ConfigOption,
    DryRunOption,
    SetOption,
    TrackingUriOption,
    examples,
    show_config,
)

PromptsOption = Annotated[
    str | None,
    typer.Option(
        "--prompts", "-p", metavar="NAME",
        help="JSON lines, Parquet, folder or data set; speculator-benchmarks; paper-844.",
    ),
]  # fmt: skip
NumPromptsOption = Annotated[
    int | None, typer.Option("--num-prompts", "-n", min=1, help="Prompts; default: all.")
]
MaxTokensOption = Annotated[
    int | None, typer.Option("--max-tokens", min=1, help="Longest response.")
]
TemperatureOption = Annotated[
    list[float] | None,
    typer.Option("--temperature", min=0.0, help="0 compares texts too. Repeatable."),
]
ThinkingOption = Annotated[
    bool | None,
    typer.Option("--thinking/--no-thinking", help="Of the chat template; default: its own."),
]
BudgetOption = Annotated[
    str | None,
    typer.Option("--budget", metavar="TIME", help="Such as 10m: as many prompts as fit, balanced."),
]
OutOption = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="FOLDER", help="For the results.")
]
ResumeOption = Annotated[
    Path | None,
    typer.Option("--resume", metavar="FOLDER", help="Go on with a bench that was cut short."),
]


def register(app: typer.Typer) -> None:
    """Add the group to the command line."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
    group.command(
        epilog=examples(
            "platform bench online --prompts prompts.jsonl",
            "platform bench online --prompts prompts.jsonl --url http://127.0.0.1:8080 "
            "--concurrency 1 --concurrency 8 --concurrency 32 --max-tokens 256",
            "platform bench online --prompts prompts.jsonl --temperature 0 --temperature 1 "
            "--arms dflash --arms autoregressive",
            "platform bench online --prompts prompts.jsonl --rate 4 --goodput ttft=500 "
            "--goodput tpot=50 --budget 10m",
            "platform bench online --resume runs/bench/20260101-120000-000000-online",
        )
    )(online)
    group.command(
        epilog=examples(
            "platform bench offline --prompts prompts.jsonl --arm autoregressive "
            "--arm baseline=runs/train/embedded/best "
            "--arm control=runs/train/embedded-control/best "
            "--arm carryover=runs/train/embedded-carryover/best",
            "platform bench offline --prompts paper-844 --target Qwen/Qwen3-4B --no-thinking "
            "--arm autoregressive --arm carryover=runs/mine --temperature 0 --temperature 1",
            "platform bench offline --resume runs/bench/20260101-120000-000000-offline",
        )
    )(offline)
    group.command(
        epilog=examples(
            "platform bench compare 0123456789abcdef0123456789abcdef runs/bench/20260101-120000",
        )
    )(compare)
    app.add_typer(group, name="bench", help="Measure speed and acceptance.")


def online(
    config: ConfigOption = None,
    prompts: PromptsOption = None,
    url: Annotated[str | None, typer.Option("--url", help="The endpoint.")] = None,
    arms: Annotated[
        list[str] | None, typer.Option("--arms", metavar="ARM", help="Arm to measure. Repeatable.")
    ] = None,
    concurrency: Annotated[
        list[int] | None,
        typer.Option("--concurrency", min=1, help="Requests in flight. Repeatable."),
    ] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option("--rate", help="Requests per second, arriving at random. Repeatable."),
    ] = None,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            "--goodput",
            metavar="WHAT=MS",
            help="Objective: ttft=, tpot= or e2e=, in milliseconds. Repeatable.",
        ),
    ] = None,
    num_prompts: NumPromptsOption = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    thinking: ThinkingOption = None,
    budget: BudgetOption = None,
    metrics_url: Annotated[
        str | None,
        typer.Option("--metrics-url", metavar="URL", help="Page with vLLM's counters."),
    ] = None,
    out: OutOption = None,
    resume: ResumeOption = None,
    overrides: SetOption = None,
    tracking_uri: TrackingUriOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Send the same prompts to every arm of an endpoint, and compare the arms.

    Arms alternate block by block in random order; warm-up is left out. Shows acceptance length,
    output tokens/s, TTFT, TPOT and end-to-end latency with 95% intervals, writes every request as
    a row and a report, and records all of it in MLflow. An API key is taken from
    CARRYOVER_API_KEY.
    """  # fmt: skip
    from carryover.bench.online import OnlineConfig, run

    loads = {"concurrency": concurrency or None, "rate": rate or None}
    if rate and not concurrency:
        loads["concurrency"] = []
    given = {
        "prompts": prompts, "url": url, "arms": arms or None, **loads,
        "num_prompts": num_prompts, "max_tokens": max_tokens, "temperature": temperature or None,
        "thinking": thinking, "budget_s": budget, "metrics_url": metrics_url,
        "goodput": _objective(goodput), "out": None if out is None else str(out),
    }  # fmt: skip
    _run(
        OnlineConfig, run, given, config=config, overrides=overrides, resume=resume,
        tracking_uri=tracking_uri, dry_run=dry_run,
    )  # fmt: skip


def offline(
    config: ConfigOption = None,
    prompts: PromptsOption = None,
    target: Annotated[
        str | None, typer.Option("--target", help="'embedded', a folder, or a hub name.")
    ] = None,
    arms: Annotated[
        list[str] | None,
        typer.Option(
            "--arm",
            metavar="NAME[=FOLDER]",
            help="An arm and its drafter checkpoint, none for the target alone. Repeatable.",
        ),
    ] = None,
    num_prompts: NumPromptsOption = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    thinking: ThinkingOption = None,
    budget: BudgetOption = None,
    out: OutOption = None,
    resume: ResumeOption = None,
    overrides: SetOption = None,
    tracking_uri: TrackingUriOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Measure arms in vLLM engines of our own, one request at a time, set by set.

    The engines stand side by side and take turns block by block where memory allows; else one
    runs at a time, and the result says so. Shows acceptance length and speed-up over the target
    alone with 95% intervals, writes every request as a row and a report, and records all of it in
    MLflow.
    """
    from carryover.bench.offline import OfflineConfig, run
    from carryover.guardian import guard
    from carryover.runtime import engine_environment

    given = {
        "prompts": prompts, "target": target, "arms": _arms(arms), "num_prompts": num_prompts,
        "max_tokens": max_tokens, "temperature": temperature or None, "thinking": thinking,
        "budget_s": budget, "out": None if out is None else str(out),
    }  # fmt: skip
    _run(
        OfflineConfig, run, given, config=config, overrides=overrides, resume=resume,
        tracking_uri=tracking_uri, dry_run=dry_run,
        before=lambda: guard(environment=engine_environment()),
    )  # fmt: skip


def compare(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="MLflow run ids, or result folders.")
    ],
    tracking_uri: TrackingUriOption = None,
) -> None:
    """Put benches side by side, from what MLflow recorded of them.

    Says what the runs differ in besides the figures, and which of them are invalid or partial.
    """
    from rich.markup import escape

    from carryover.bench.compare import comparison_remarks, comparison_tables, read_runs
    from carryover.commands.options import console, log_console
    from carryover.tracking import Tracker

    recorded = read_runs(Tracker(tracking_uri), runs)
    for number, parent_id in dict.fromkeys((each.run, each.parent_id) for each in recorded):
        console().print(f"run {number}: {parent_id}", highlight=False)
    for table in comparison_tables(recorded):
        console().print(table)
    for remark in comparison_remarks(recorded):
        log_console().print(f"[yellow]note:[/] {escape(remark)}", highlight=False)


def _run(
    kind: Any,
    run: Callable[..., Any],
    given: dict[str, Any],
    *,
    config: Path | None,
    overrides: list[str] | None,
    resume: Path | None,
    tracking_uri: str | None,
    dry_run: bool,
    before: Callable[[], None] = lambda: None,
) -> None:
    """Resolve the settings, measure behind a progress bar, show."""
    from carryover.bench.ledger import load_settings
    from carryover.commands.bench_display import run_with_progress, show_result
    from carryover.errors import ConfigError

    flags = [f"{name}={json.dumps(value)}" for name, value in given.items() if value is not None]
    if resume is not None and (config is not None or flags or overrides):
        raise ConfigError(
            "--resume goes on under the settings that the bench began with; leave out "
            + ", ".join(["--config"] * (config is not None) + [*flags, *(overrides or ())])
        )
    if resume is not None:
        resolved = load_settings(resume, kind)
    else:
        resolved = kind.load(config, overrides=[*flags, *(overrides or ())])
    if dry_run:
        show_config(resolved)
        return
    before()

    from carryover.tracking import Tracker

    result = run_with_progress(run, resolved, tracker=Tracker(tracking_uri), resume=resume)
    show_result(result)
    if not result.valid:
        raise typer.Exit(1)


def _arms(given: list[str] | None) -> list[dict[str, str]] | None:
    if not given:
        return None
    arms = []
    for text in given:
        name, _, folder = text.partition("=")
        arms.append({"name": name, **({"drafter": folder} if folder else {})})
    return arms


def _objective(given: list[str] | None) -> dict[str, float] | None:
    from carryover.errors import ConfigError

    if not given:
        return None
    found = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            if name not in ("ttft", "tpot", "e2e"):
                raise ValueError(name)
            found[f"{name}_ms"] = float(value)
        except ValueError:
            raise ConfigError(
                f"--goodput takes ttft=MS, tpot=MS or e2e=MS, got {text!r}; for example ttft=500"
            ) from None
    return found
