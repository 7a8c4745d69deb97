"""The answer of a training sweep: a table for the terminal, and one HTML page."""

from __future__ import annotations

from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING

from carryover.pages import Card, Page, add_legend, new_figure, series
from sweeps.ledger import Ledger
from sweeps.training_settings import FINAL, Training, TrainingSweepConfig, trainings_of

if TYPE_CHECKING:
    from rich.console import Console

_MAX_CURVES = 6


def ranked(config: TrainingSweepConfig, ledger: Ledger) -> list[tuple[Training, float]]:
    """Trainings that ended, best acceptance length first."""
    found = [
        (training, ledger.figures[training.name][(FINAL,)][0])
        for training in trainings_of(config)
        if ledger.has(training.name, (FINAL,))
    ]
    return sorted(found, key=lambda each: -each[1] if isfinite(each[1]) else 0.0)


def show_best(config: TrainingSweepConfig, ledger: Ledger, console: Console) -> None:
    """Print the trainings that ended, and where the best checkpoint is."""
    from rich.table import Table

    best = ranked(config, ledger)
    table = Table(box=None, pad_edge=False)
    for key in sorted(config.values):
        table.add_column(key, justify="right")
    table.add_column("acceptance length", justify="right")
    for training, length in best:
        table.add_row(*(f"{value}" for _, value in training.values), f"{length:.3f}")
    console.print(table)
    if best:
        folder = config.out / "trainings" / best[0][0].name / "best"
        console.print(f"best: {folder}", markup=False, highlight=False, soft_wrap=True)


def write_page(config: TrainingSweepConfig, ledger: Ledger, file: Path) -> Path:
    """Write the page of what a training sweep has found so far."""
    best, keys = ranked(config, ledger), sorted(config.values)
    page = Page(
        f"Training sweep {config.out.name}",
        lead=f"{len(best)} of {len(trainings_of(config))} trainings ended; swept: "
        f"{', '.join(keys)}.",
        footer="Acceptance length is the held-out one of `platform train`, at its best step.",
    )
    page.section("What to train with")
    if best:
        training, length = best[0]
        words = ", ".join(f"{key} {value}" for key, value in training.values)
        page.cards([Card("best acceptance length", f"{length:.3f}", words, tone="good")])
    page.table(
        "Trainings that ended, the best first",
        [*keys, "acceptance length"],
        [[*(str(value) for _, value in training.values), length] for training, length in best],
        digits=4,
    )
    _curves(page, ledger)
    _marginals(page, config, best)
    out = [e for e in ledger.ends.values() if e.outcome in ("failed", "stopped")]
    if out:
        page.section("Trainings that did not come to their end")
        rows = [[e.setting, e.outcome, (e.reason.strip() or "–").splitlines()[-1]] for e in out]
        page.table("What happened", ["training", "what happened", "why"], rows)
    page.details("Configuration", config.to_yaml())
    return page.write(file)


def _curves(page: Page, ledger: Ledger) -> None:
    curves = {
        name: sorted((int(at), values[0]) for (at,), values in parts.items() if at != FINAL)
        for name, parts in ledger.figures.items()
    }
    curves = {name: curve for name, curve in curves.items() if curve}
    if not curves:
        return
    page.section("Held-out acceptance while training")
    shown = sorted(curves, key=lambda name: -max(value for _, value in curves[name]))[:_MAX_CURVES]
    figure, axes = new_figure(height=3.4)
    for index, name in enumerate(shown):
        axes.plot(*zip(*curves[name], strict=True), **series(index), label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("acceptance length")
    add_legend(axes, columns=1)
    ends = [f"{name} ends at {curves[name][-1][1]:.3f}" for name in shown]
    page.figure(
        figure, title="Acceptance length by step", description="; ".join(ends) + ".",
        caption="" if len(shown) == len(curves) else f"the best {len(shown)} of {len(curves)}",
    )  # fmt: skip


def _marginals(page: Page, config: TrainingSweepConfig, best: list[tuple[Training, float]]) -> None:
    """What each value came to, over all trainings that had it."""
    rows = []
    for key, values in sorted(config.values.items()):
        for value in values:
            lengths = [length for t, length in best if dict(t.values)[key] == value]
            if lengths:
                mean = sum(lengths) / len(lengths)
                rows.append([key, str(value), len(lengths), mean, max(lengths, default=nan)])
    if rows:
        page.section("Value by value")
        page.table(
            "Acceptance length of all trainings with a value",
            ["key", "value", "trainings", "mean", "best"], rows, digits=4,
        )  # fmt: skip
