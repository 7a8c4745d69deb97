"""`platform data`: prompts that the target writes, its responses, and what is in the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from carryover.commands.options import (
    ConfigOption,
    DryRunOption,
    SetOption,
    console,
    examples,
    show_config,
)

TargetOption = Annotated[
    str | None,
    typer.Option("--target", "-t", metavar="NAME", help="embedded, a local folder or a hub name."),
]


def register(app: typer.Typer) -> None:
    """Add the group to the command line."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
    group.command(
        epilog=examples(
            "platform data synthesize -n 1000",
            "platform data synthesize -n 200 --out runs/try/prompts --set temperature=0.8",
            "platform data synthesize --target Qwen/Qwen3-4B -n 50000 "
            "--set engine.max_num_seqs=512 --set pool.engines=8",
            "platform data synthesize --dry-run > my-prompts.yaml",
        )
    )(synthesize)
    group.command(
        epilog=examples(
            "platform data regenerate",
            "platform data regenerate --prompts my-prompts.jsonl --out runs/mine --limit 500",
            "platform data regenerate --prompts HuggingFaceH4/ultrachat_200k --split train_sft "
            "--target Qwen/Qwen3-4B --set max_new_tokens=2048 --set engine.max_model_len=4096",
            "platform data regenerate --set temperatures=[0,0,0.8] --set engine.max_num_seqs=128",
        )
    )(regenerate)
    group.command(
        epilog=examples(
            "platform data merge runs/data/responses runs/data/responses-2 --out runs/data/both",
            "platform data merge embedded-a.parquet embedded-b.parquet -o runs/data/both",
        )
    )(merge)
    group.command(
        epilog=examples(
            "platform data inspect runs/data/responses",
            "platform data inspect runs/data/prompts --samples 10",
            "platform data inspect responses.jsonl --target embedded",
            "platform data inspect runs/data/responses --json | jq .cut",
        )
    )(inspect)
    app.add_typer(group, name="data", help="Make prompts and target responses, and look at them.")


def synthesize(
    config: ConfigOption = None,
    target: TargetOption = None,
    num_prompts: Annotated[
        int | None, typer.Option("--num-prompts", "-n", min=1, help="Prompts in the end.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for the prompts (Parquet).")
    ] = None,
    overrides: SetOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Let the target write prompts itself, by sampling the user's turn of its chat template.

    No outside data is needed. Prompts that are cut, repeated, near-duplicates or no requests are
    left out. Run it again to go on after an interruption, or with more prompts to extend the set.
    """
    from carryover.data.synthesis import SynthesizeConfig

    given = {"target": target, "num_prompts": num_prompts, "out": out}
    resolved = SynthesizeConfig.load(config, overrides=_overrides(given, overrides))
    if dry_run:
        show_config(resolved)
        return
    _guard()
    from carryover.commands.data_display import Reporter, show_synthesis
    from jobs import synthesize as job

    with Reporter("prompts", resume_hint=resolved.out) as reporter:
        summary = job.synthesize(resolved, report=reporter)
    show_synthesis(console(), summary)


def regenerate(
    config: ConfigOption = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            "--prompts",
            "-p",
            metavar="PATH",
            help="JSON lines or Parquet file, folder, or Hugging Face data set. Repeatable.",
        ),
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split of the data set.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="At most so many prompts of each source.")
    ] = None,
    target: TargetOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for the responses (Parquet).")
    ] = None,
    overrides: SetOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Let the target answer prompts with vLLM, and keep its token ids for training.

    Run it again to go on after an interruption: rows that are there are neither lost nor asked
    again. A folder made with another target or other sampling settings is refused.
    """
    from carryover.data.regeneration import RegenerateConfig
    from carryover.errors import ConfigError

    if prompts is None and (split is not None or limit is not None):
        raise ConfigError("--split and --limit select from --prompts; give that too")
    chosen = {key: value for key, value in (("split", split), ("limit", limit)) if value}
    sources = None if prompts is None else [{"path": path, **chosen} for path in prompts]
    given = {"prompts": sources, "target": target, "out": out}
    resolved = RegenerateConfig.load(config, overrides=_overrides(given, overrides))
    if dry_run:
        show_config(resolved)
        return
    _guard()
    from carryover.commands.data_display import Reporter, show_regeneration
    from jobs import regenerate as job

    with Reporter("responses", resume_hint=resolved.out) as reporter:
        summary = job.regenerate(resolved, report=reporter)
    show_regeneration(console(), summary, max_prompt_tokens=resolved.max_prompt_tokens)


def merge(
    sources: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Responses: folders or Parquet files.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for all of them (Parquet).")],
) -> None:
    """Put responses of one target together, to train on all of them.

    Rows are numbered anew; one whose prompt and response are there already is left out.
    """
    from carryover.data.merging import merge as put_together

    found = put_together(sources, out)
    for source, count in found.taken.items():
        typer.echo(f"{count:,} from {source}")
    repeated = f"; {found.repeated:,} left out as repeated" if found.repeated else ""
    typer.echo(f"{found.rows:,} responses in {found.path}{repeated}")


def inspect(
    path: Annotated[str, typer.Argument(help="Prompts or responses: file, folder or data set.")],
    samples: Annotated[int, typer.Option("--samples", "-s", min=0, help="Rows to show.")] = 3,
    seed: Annotated[int, typer.Option(help="Chooses the rows.")] = 0,
    target: TargetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Show what a prompts or responses file holds: counts, lengths, cut share, samples.

    Samples of responses are decoded with the target that the file names; for a file that names
    none, give --target.
    """
    from dataclasses import asdict

    from carryover.data.inspection import inspect as look

    found, rows = look(path)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
        return
    from carryover.commands.data_display import show_inspection, show_samples

    show_inspection(console(), found)
    show_samples(console(), found, rows, count=samples, seed=seed, target=target)


def _overrides(given: dict[str, Any], overrides: list[str] | None) -> list[str]:
    """Flags as assignments (JSON is YAML), before those of --set, which win."""
    flags = [f"{key}={json.dumps(value, default=str)}" for key, value in given.items() if value]
    return [*flags, *(overrides or [])]


def _guard() -> None:
    from carryover.guardian import guard
    from carryover.runtime import engine_environment

    guard(environment=engine_environment())
