"""Prints what a training sweep would run, how long that takes and what it costs."""

from __future__ import annotations

from statistics import median

from rich.console import Console

from sweeps.durations import show_duration
from sweeps.loading import CONFIG_FILE
from sweeps.plan import makespan
from sweeps.plan_display import LISTED, say
from sweeps.search import sample
from sweeps.training import open_ledger
from sweeps.training_settings import FINAL, TrainingSweepConfig, trainings_of


def show_training_plan(
    config: TrainingSweepConfig,
    *,
    slots: int | None,
    price_per_hour: float | None,
    console: Console | None = None,
) -> None:
    """Print the plan of a training sweep.

    Args:
        config: with absolute paths.
        slots: trainings at once.
        price_per_hour: of a worker.
        console: to print on.
    """
    out = console or Console()
    slots = slots or config.resources.max_concurrent or 1
    ledger = open_ledger(config) if (config.out / CONFIG_FILE).exists() else None
    every = trainings_of(config)
    if config.search.kind != "grid":
        every = sample(every, config.search)
    left = [
        training
        for training in every
        if ledger is None
        or not (ledger.is_over(training.name) or ledger.has(training.name, (FINAL,)))
    ]
    say(out, f"training sweep {config.out.name}, {config.search.kind} search")
    for training in left[:LISTED]:
        say(out, "  " + ", ".join(f"{key} {value}" for key, value in training.values))
    if len(left) > LISTED:
        say(out, f"... and {len(left) - LISTED:,} more")
    say(out, f"{len(left)} of {len(every)} trainings, {slots} at a time")
    took = [] if ledger is None else [e.wall_s for e in ledger.trials() if e.outcome == "done"]
    if not took:
        say(out, "how long: not known, as none of them was trained yet; run it for a while "
                  "(platform sweep --budget 10m)")  # fmt: skip
        return
    each_s = median(took)
    wall_s = makespan([each_s] * len(left), slots)
    say(out, f"one training: {show_duration(each_s)} (median of {len(took)})")
    say(out, f"time: {show_duration(wall_s)} at most")
    if price_per_hour is not None:
        workers = config.train.resources.num_workers
        cost = wall_s / 3600 * slots * workers * price_per_hour
        say(out, f"cost: {cost:,.0f} at {price_per_hour:g} an hour for each worker")
