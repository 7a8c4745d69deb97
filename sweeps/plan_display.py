"""Prints what a sweep would run, how long that takes and what it costs."""

from __future__ import annotations

from math import log10
from pathlib import Path

from rich.console import Console
from rich.table import Table

from carryover.data.prompts import read_prompts
from carryover.errors import ConfigError
from sweeps.durations import show_duration
from sweeps.ledger import Ledger
from sweeps.loading import CONFIG_FILE, load, open_ledger
from sweeps.plan import Forecast, Parts, forecast, measured_parts
from sweeps.search import sample
from sweeps.settings import Load, Setting, SweepConfig, settings_of

# settings that are listed one by one
LISTED = 24
_UNITS = ("B", "kB", "MB", "GB", "TB")


def show_plan(
    config: SweepConfig,
    *,
    source: Path | None,
    slots: int | None,
    price_per_hour: float | None,
    console: Console | None = None,
) -> None:
    """Print the plan of a sweep.

    Args:
        config: with absolute paths.
        source: folder of the sweep that times and sizes come from; None: this one, as far as it is.
        slots: GPUs, or machines, that trials are spread over.
        price_per_hour: of one of them.
        console: to print on.

    Raises:
        ConfigError: `source` has measured nothing to plan with.
    """
    out = console or Console()
    each = config.serve.engine.tensor_parallel_size * config.serve.resources.replicas
    each = each if config.serve.resources.device == "gpu" else 1
    at_once = max(1, slots // each) if slots else config.resources.max_concurrent or 1
    ledger = _existing(config)
    missing = missing_of(config, ledger)
    say(out, f"sweep {config.out.name}, target {config.serve.target}, {config.search.kind} search")
    _list(out, config, missing)
    done = 0 if ledger is None else sum(len(parts) for parts in ledger.figures.values())
    measurements = sum(len(loads) for _, loads in missing)
    say(
        out,
        f"{len(missing):,} engines, {measurements:,} measurements "
        f"({len(config.temperatures)} temperatures x {len(config.concurrencies)} concurrencies), "
        f"{at_once} at a time; {done:,} measurements are there",
    )
    if config.early_stop is not None:
        say(out, "early stopping is on, so this is the most that it can come to")
    parts = _parts(config, ledger, source)
    if parts is None:
        say(
            out,
            "how long: not known, as nothing like it was measured yet; run it for a while "
            "(platform sweep --budget 10m), or give --measured NAME of another sweep",
        )
        return
    prompts = _num_prompts(config)
    found = forecast(config, missing, parts, slots=at_once, num_prompts=prompts)
    _show_forecast(out, found, parts, engines=len(missing), slots=at_once, each=each,
                   prompts=prompts, price_per_hour=price_per_hour)  # fmt: skip


def missing_of(config: SweepConfig, ledger: Ledger | None) -> list[tuple[Setting, list[Load]]]:
    """Loads of each setting that are still to be measured; with Optuna, as if it asked in order."""
    every = settings_of(config)
    if config.search.kind != "grid":
        drafting = [setting for setting in every if setting.drafter is not None]
        every = sample(
            drafting, config.search,
            references=lambda s: [p for p in every if p.drafter is None and p.engine == s.engine],
        )  # fmt: skip
    found = []
    for setting in every:
        if ledger is not None and ledger.is_over(setting.name):
            continue
        loads = [
            load
            for load in config.loads()
            if ledger is None or not ledger.has(setting.name, (load.temperature, load.concurrency))
        ]
        if loads:
            found.append((setting, loads))
    return found


def _existing(config: SweepConfig) -> Ledger | None:
    """The ledger of a sweep that was begun; looking at a plan must not begin one."""
    return open_ledger(config) if (config.out / CONFIG_FILE).exists() else None


def _parts(config: SweepConfig, ledger: Ledger | None, source: Path | None) -> Parts | None:
    if source is None:
        return None if ledger is None else measured_parts(config, ledger)
    other = load(source / CONFIG_FILE, [f"out={source.absolute()}"])
    parts = None
    if isinstance(other, SweepConfig):
        parts = measured_parts(other, open_ledger(other.absolute()))
    if parts is None:
        raise ConfigError(f"{source} has measured no engine with requests to plan with")
    return parts


def _num_prompts(config: SweepConfig) -> int:
    return config.num_prompts or len(list(read_prompts(config.prompts)))


def _list(out: Console, config: SweepConfig, missing: list[tuple[Setting, list[Load]]]) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("engine", "drafter", "loads to measure"):
        table.add_column(name)
    for setting, loads in missing[:LISTED]:
        shown = "all" if len(loads) == len(config.loads()) else ", ".join(x.title for x in loads)
        table.add_row(setting.name, setting.drafter or "none", shown)
    out.print(table, highlight=False)
    if len(missing) > LISTED:
        say(out, f"... and {len(missing) - LISTED:,} more")


def _show_forecast(
    out: Console,
    found: Forecast,
    parts: Parts,
    *,
    engines: int,
    slots: int,
    each: int,
    prompts: int,
    price_per_hour: float | None,
) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("measured part", "value"):
        table.add_column(name)
    table.add_column("")
    basis = f"median of {parts.num_trials} engines"
    table.add_row("engine start", f"{parts.start_s:.1f} s", basis)
    table.add_row("engine end", f"{parts.end_s:.1f} s", basis)
    for concurrency, seconds in parts.request_s.items():
        table.add_row(f"request at {concurrency} clients", f"{seconds:.3g} s", "wall / requests")
    table.add_row("warm-up and figures of a load", f"{parts.load_s:.1f} s",
                  f"median of {parts.num_loads} loads")  # fmt: skip
    table.add_row("scheduling of a trial", f"{parts.overhead_s:.1f} s", "slot time between trials")
    table.add_row("stored for a request", _size(parts.request_bytes), "")
    out.print(table, highlight=False)
    say(out, f"one engine, all loads, {prompts:,} prompts each: {show_duration(found.trial_s)}")
    say(out, f"time: {show_duration(found.wall_s)} on {slots * each:,} GPUs or machines")
    use = found.busy_s / (found.wall_s * slots) if found.wall_s else 0.0
    hours = found.wall_s / 3600 * slots * each
    say(out, f"reserved: {hours:,.1f} GPU or machine hours, of which {use:.0%} in trials")
    if price_per_hour is not None:
        say(out, f"cost: {hours * price_per_hour:,.0f} at {price_per_hour:g} an hour")
    sizes = ", ".join(f"{name} {_size(size)}" for name, size in found.stored_bytes.items())
    say(out, f"storage: {_size(sum(found.stored_bytes.values()))} ({sizes})")
    if found.extrapolated:
        listed = ", ".join(map(str, found.extrapolated))
        say(out, f"note: nothing was measured near {listed} clients; they count as the nearest")


def _size(size: float) -> str:
    power = min(len(_UNITS) - 1, int(log10(size) / 3)) if size >= 1 else 0
    return f"{size / 1000**power:.3g} {_UNITS[power]}"


def say(out: Console, text: str) -> None:
    """Print a line as it is."""
    out.print(text, markup=False, highlight=False, soft_wrap=True)
