"""A sweep's answer as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan
from pathlib import Path

import numpy as np
from matplotlib.colors import TwoSlopeNorm

from carryover.pages import Card, Page, add_legend, new_figure, series
from sweeps.answer import (
    Gain,
    Point,
    application_for,
    baseline_of,
    choose,
    crossings,
    gains_over_baseline,
    gains_over_plain,
    pareto,
    points_of,
    recommend,
)
from sweeps.ledger import Ledger
from sweeps.settings import MEASURE, Setting, SweepConfig, settings_of

# of a heat map's letters on light and dark cells, whatever the page's colours
_ON_LIGHT, _ON_DARK = "#111111", "#fcfcfc"
_MAX_CURVES = 6
_MAX_ROWS = 24
_MAX_CROSSINGS = 60


def write_page(config: SweepConfig, ledger: Ledger, file: Path) -> Path:
    """Write the page of what a sweep has measured so far."""
    points = points_of(config, ledger.figures)
    settings = settings_of(config)
    whole = len({p.setting for p in points})
    page = Page(
        f"Sweep {config.out.name}",
        lead=f"{whole} of {len(settings)} settings measured at up to {len(config.loads())} loads: "
        f"temperatures {_listed(config.temperatures)}, concurrencies "
        f"{_listed(config.concurrencies)}; target {config.serve.target}.",
        footer=f"Measured by {config.measure}, the figures of `platform bench online`."
        if config.measure == MEASURE
        else f"Measured by {config.measure}.",
    )
    plain = gains_over_plain(points)
    _answer(page, config, points)
    _gains(page, "Gain over decoding without a drafter", plain)
    baseline = baseline_of(config)
    _gains(page, f"Gain over {baseline} at equal proposal length",
           gains_over_baseline(config, points))  # fmt: skip
    _where_it_pays(page, plain)
    _acceptance(page, points)
    _front(page, config, points)
    _everything(page, config, points, ledger)
    return page.write(file)


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in sorted(values))


def _answer(page: Page, config: SweepConfig, points: Sequence[Point]) -> None:
    page.section("What to deploy")
    best = recommend(config, points)
    choices = choose(config, points)
    if not points:
        page.paragraph("Nothing was measured yet.")
        return
    limit = config.objective.max_tpot_p95_ms
    cards = []
    if best is not None:
        cards.append(Card("one setting for all loads", best.name, "highest geometric mean of "
                          "throughput over all loads", tone="good"))  # fmt: skip
    gains = [c.speedup for c in choices if c.speedup is not None]
    if gains:
        top = max(gains, key=lambda gain: gain.ratio)
        where = f"{top.point.setting.name} at {top.point.load.title}"
        tone = "good" if top.low > 1 else "neutral"
        cards.append(Card("largest gain over no drafter", f"{top.ratio:.2f}x", where, tone))
    if best is not None:
        for crossing in crossings(gains_over_plain(points)):
            if crossing.setting == best.name:
                label = f"{best.name} at temperature {crossing.temperature:g}"
                value = (
                    "never" if crossing.kind == "never" else f"{crossing.concurrency:.3g} clients"
                )
                tone = "bad" if crossing.kind == "never" else "neutral"
                cards.append(Card(label, value, crossing.text, tone))
    if limit is not None:
        met = sum(not choice.over_limit for choice in choices)
        text = f"p95; {met} of {len(choices)} loads can meet it"
        tone = "good" if met == len(choices) else "bad"
        cards.append(Card("TPOT limit", f"{limit:g} ms", text, tone))
    page.cards(cards)
    page.table(
        "The best setting at each load",
        ["temperature", "clients", "setting", "tokens/s", "TPOT p95 ms", "over no drafter",
         "acceptance length"],
        [
            [
                c.point.load.temperature, c.point.load.concurrency,
                c.point.setting.name + (" (over the limit)" if c.over_limit else ""),
                c.point.rate, c.point.tpot_ms, _ratio(c.speedup),
                c.point.acceptance_length,
            ]
            for c in choices
        ],
    )  # fmt: skip
    if best is not None:
        page.details(
            f"serve.yaml for {best.name}: platform serve --config {config.out / 'serve.yaml'}",
            application_for(config, best).to_yaml(),
        )


def _ratio(gain: Gain | None) -> str | None:
    if gain is None or not isfinite(gain.ratio):
        return None
    if not (isfinite(gain.low) and isfinite(gain.high)):
        return f"{gain.ratio:.2f}x"
    return f"{gain.ratio:.2f}x [{gain.low:.2f}, {gain.high:.2f}]"


def _gains(page: Page, title: str, gains: Sequence[Gain]) -> None:
    drafted = [gain for gain in gains if gain.point.setting.drafter is not None]
    if not drafted:
        return
    page.section(title)
    page.note(
        "Ratio of output tokens/s at equal load; above 1 (blue) is faster, below 1 (red) slower. "
        "In brackets: the intervals of both measurements leave room for no difference."
    )
    furthest = max(abs(np.log(gain.ratio)) for gain in drafted)
    shown = _best_rows(page, drafted)
    drafted = [gain for gain in drafted if gain.point.setting in shown]
    groups = sorted({(g.point.load.temperature, g.point.setting.arm) for g in drafted})
    for temperature, arm in groups:
        here = [
            gain
            for gain in drafted
            if (gain.point.load.temperature, gain.point.setting.arm) == (temperature, arm)
        ]
        _heat_map(page, f"{arm}, temperature {temperature:g}", here, float(furthest), title)


def _best_rows(page: Page, gains: Sequence[Gain]) -> set[Setting]:
    """Of each arm the settings with the highest gains, as many as a heat map can show."""
    best: dict[Setting, float] = {}
    for gain in gains:
        best[gain.point.setting] = max(gain.ratio, best.get(gain.point.setting, 0.0))
    shown: set[Setting] = set()
    for arm in {setting.arm for setting in best}:
        mine = sorted((s for s in best if s.arm == arm), key=lambda s: -best[s])
        shown |= set(mine[:_MAX_ROWS])
    if len(shown) < len(best):
        page.note(f"The best {len(shown)} of {len(best):,} settings, at most {_MAX_ROWS} an arm.")
    return shown


def _heat_map(page: Page, name: str, gains: Sequence[Gain], furthest: float, what: str) -> None:
    rows = list(dict.fromkeys(gain.point.setting for gain in gains))
    rows.sort(key=lambda s: (s.num_speculative_tokens or 0, s.name))
    columns = sorted({gain.point.load.concurrency for gain in gains})
    values = np.full((len(rows), len(columns)), nan)
    clear = np.zeros(values.shape, dtype=bool)
    for gain in gains:
        at = rows.index(gain.point.setting), columns.index(gain.point.load.concurrency)
        values[at], clear[at] = gain.ratio, gain.is_clear
    figure, axes = new_figure(height=max(1.6, 0.75 + 0.42 * len(rows)))
    norm = TwoSlopeNorm(0, vmin=-max(furthest, 0.05), vmax=max(furthest, 0.05))
    drawn = axes.pcolormesh(
        np.log(values), norm=norm, cmap="RdBu", edgecolors="none", linewidth=0, rasterized=False
    )
    for (row, column), value in np.ndenumerate(values):
        if isfinite(value):
            red, green, blue, _ = drawn.cmap(norm(np.log(value)))
            dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
            text = f"{value:.2f}" if clear[row, column] else f"({value:.2f})"
            axes.text(
                column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=9.5,
                color=_ON_DARK if dark else _ON_LIGHT,
            )  # fmt: skip
    engines = any(setting.engine for setting in rows)
    labels = [s.name if engines else f"{s.num_speculative_tokens or 'own'}" for s in rows]
    axes.set_yticks(np.arange(len(rows)) + 0.5, labels)
    axes.set_xticks(np.arange(len(columns)) + 0.5, [str(c) for c in columns])
    axes.set_xlabel("clients")
    axes.set_ylabel("setting" if engines else "proposal length")
    axes.grid(False)
    axes.tick_params(length=0)
    best = max(gains, key=lambda gain: gain.ratio)
    worst = min(gains, key=lambda gain: gain.ratio)
    page.figure(
        figure, title=name,
        description=f"{what}: heat map of {len(rows)} proposal lengths by {len(columns)} numbers "
        f"of clients. Highest {best.ratio:.2f} with {best.point.setting.name} at "
        f"{best.point.load.concurrency} clients, lowest {worst.ratio:.2f} with "
        f"{worst.point.setting.name} at {worst.point.load.concurrency}.",
    )  # fmt: skip


def _where_it_pays(page: Page, gains: Sequence[Gain]) -> None:
    found = crossings(gains)
    if not found:
        return
    page.section("Where speculation stops paying")
    page.note(
        "As clients grow, verifying proposals costs compute that other requests need. The crossing "
        "is interpolated between measured loads, on logarithmic axes."
    )
    for temperature in sorted({crossing.temperature for crossing in found}):
        curves: dict[str, list[tuple[int, float]]] = {}
        for gain in gains:
            if gain.point.setting.drafter is None or gain.point.load.temperature != temperature:
                continue
            curve = curves.setdefault(gain.point.setting.name, [])
            curve.append((gain.point.load.concurrency, gain.ratio))
        shown = sorted(curves, key=lambda name: -max(ratio for _, ratio in curves[name]))
        shown = shown[:_MAX_CURVES]
        figure, axes = new_figure(height=3.2)
        for index, name in enumerate(shown):
            curve = sorted(curves[name])
            axes.plot(*zip(*curve, strict=True), **series(index), label=name)
        axes.axhline(1, linewidth=1, color="#59636e")
        axes.set_xscale("log", base=2)
        ticks = sorted({c for curve in curves.values() for c, _ in curve})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("clients")
        axes.set_ylabel("gain over no drafter")
        add_legend(axes, columns=2)
        said = [c for c in found if c.temperature == temperature and c.setting in shown]
        page.figure(
            figure, title=f"Gain by load, temperature {temperature:g}",
            description="; ".join(f"{c.setting} {c.text}" for c in said) + ".",
            caption="" if len(shown) == len(curves) else f"the best {len(shown)} of {len(curves)}",
        )  # fmt: skip
    highest: dict[str, float] = {}
    for gain in gains:
        name = gain.point.setting.name
        highest[name] = max(gain.ratio, highest.get(name, 0.0))
    listed = sorted(found, key=lambda c: -highest[c.setting])[:_MAX_CROSSINGS]
    page.table(
        "The crossing"
        if len(listed) == len(found)
        else f"The crossing of the best, of {len(found):,}",
        ["setting", "temperature", "more tokens/s than no drafter"],
        [[crossing.setting, crossing.temperature, crossing.text] for crossing in listed],
    )


def _acceptance(page: Page, points: Sequence[Point]) -> None:
    drafted = [point for point in points if isfinite(point.acceptance_length)]
    curves: dict[tuple[str, float], dict[int, list[float]]] = {}
    for point in drafted:
        # of a null length the checkpoint's own is not known here
        if point.setting.num_speculative_tokens is not None and not point.setting.engine:
            curve = curves.setdefault((point.setting.arm, point.load.temperature), {})
            lengths = curve.setdefault(point.setting.num_speculative_tokens, [])
            lengths.append(point.acceptance_length)
    if not curves:
        return
    page.section("Acceptance")
    page.note(
        "Mean of accepted proposals plus one over rounds, averaged over numbers of clients, which "
        "do not change what is accepted."
    )
    figure, axes = new_figure(height=3.2)
    said = []
    for index, ((arm, temperature), curve) in enumerate(sorted(curves.items())):
        lengths = sorted(curve)
        means = [float(np.mean(curve[length])) for length in lengths]
        name = f"{arm}, T={temperature:g}"
        axes.plot(lengths, means, **series(index), label=name)
        said.append(f"{name}: from {means[0]:.2f} at {lengths[0]} to {means[-1]:.2f} at "
                    f"{lengths[-1]}")  # fmt: skip
    axes.set_xlabel("proposal length")
    axes.set_ylabel("acceptance length")
    axes.xaxis.get_major_locator().set_params(integer=True)
    add_legend(axes, columns=2)
    page.figure(
        figure, title="Acceptance length by proposal length", description="; ".join(said) + "."
    )


def _front(page: Page, config: SweepConfig, points: Sequence[Point]) -> None:
    if not pareto(points):
        return
    page.section("Throughput against speed for one client")
    page.note(
        "On the line: settings and loads that no other beats in both. To the right each client "
        "gets its tokens faster (1 / TPOT p95), above the engine gives more of them in all."
    )
    limit = config.objective.max_tpot_p95_ms
    for temperature in sorted({point.load.temperature for point in points}):
        here = [point for point in points if point.load.temperature == temperature]
        front = pareto(here)
        if not front:
            continue
        figure, axes = new_figure(height=3.4)
        arms = list(dict.fromkeys(point.setting.arm for point in here))
        for index, arm in enumerate(arms):
            mine = [p for p in here if p.setting.arm == arm and isfinite(p.tpot_ms)]
            style = series(index) | {"linestyle": "none", "alpha": 0.75}
            axes.plot([1000 / p.tpot_ms for p in mine], [p.rate for p in mine], **style, label=arm)
        axes.plot([1000 / p.tpot_ms for p in front], [p.rate for p in front], color="#59636e",
                  linewidth=1.2, zorder=0.5)  # fmt: skip
        if limit is not None:
            axes.axvline(1000 / limit, color="#cf222e", linewidth=1, linestyle="--")
        axes.set_xlabel("tokens/s for one client")
        axes.set_ylabel("output tokens/s in all")
        add_legend(axes)
        page.figure(
            figure, title=f"Pareto front, temperature {temperature:g}",
            description="From the fastest for one client to the most in all: "
            + "; ".join(f"{p.setting.name} at {p.load.concurrency} clients" for p in front) + ".",
        )  # fmt: skip
        page.table(
            f"The front at temperature {temperature:g}",
            ["setting", "clients", "tokens/s for one client", "tokens/s in all"],
            [[p.setting.name, p.load.concurrency, 1000 / p.tpot_ms, p.rate] for p in front],
        )


def _everything(page: Page, config: SweepConfig, points: Sequence[Point], ledger: Ledger) -> None:
    names = {setting.name for setting in settings_of(config)}
    ended = [end for name, end in ledger.ends.items() if name in names]
    kept_out = [end for end in ended if end.outcome in ("failed", "stopped")]
    page.section("All measurements")
    if kept_out:
        page.table(
            "Settings that were not measured to the end",
            ["setting", "what happened", "why"],
            [[e.setting, e.outcome, _last_line(e.reason)] for e in kept_out],
        )
    if len(points) <= 400:
        page.table(
            "Every setting at every load",
            ["setting", "temperature", "clients", "tokens/s", "95% interval", "TPOT p95 ms",
             "acceptance length"],
            [
                [
                    p.setting.name, p.load.temperature, p.load.concurrency, p.rate,
                    f"{p.low:.4g} – {p.high:.4g}" if isfinite(p.low) else None, p.tpot_ms,
                    p.acceptance_length,
                ]
                for p in points
            ],
        )  # fmt: skip
    else:
        page.note(f"All {len(points):,} are in {ledger.rows_file} and in MLflow.")
    page.details("Configuration", config.to_yaml())


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""
