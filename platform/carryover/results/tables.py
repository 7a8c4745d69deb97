"""Tables of what benches measured. Offline and online figures stand in tables of their own."""

from __future__ import annotations

from collections.abc import Sequence

from carryover.bench.html import plain
from carryover.bench.summary import ArmSummary, Comparison
from carryover.results.config import DRAFTING_ROLES, ROLES
from carryover.results.markdown import DASH, narrow, percent, table
from carryover.results.measured import OTHERS, Measured

_MICRO, _MACRO = "**micro average**", "**macro average**"


def offline_table(measured: Measured) -> str:
    """Acceptance length, gains and speed-ups by set, of one kind of drafter."""
    columns = ["set", "prompts", *DRAFTING_ROLES, *(f"gain over {other}" for other in OTHERS)]
    columns += [f"speed-up, {role}" for role in DRAFTING_ROLES]
    summaries = measured.summaries
    counted = next(iter(summaries.values()))
    rows = []
    for name in measured.sets:
        cells = [name, str(counted.by_set[name].requests)]
        for role in DRAFTING_ROLES:
            part = summaries[role].by_set.get(name) if role in summaries else None
            cells.append(plain(part.acceptance_length if part else None, 2))
        for other in OTHERS:
            part = _part(measured.gains[other].pooled, name) if other in measured.gains else None
            cells.append(percent(part.acceptance_ratio if part else None))
        for role in DRAFTING_ROLES:
            part = _part(measured.speedups[role], name) if role in measured.speedups else None
            cells.append(plain(part.speedup if part else None, 2, "x"))
        rows.append(cells)
    rows.append(_micro(measured, counted))
    if measured.sets:
        rows.append(_macro(measured, counted))
    return table(columns, [[narrow(cell) for cell in row] for row in rows])


def _micro(measured: Measured, counted: ArmSummary) -> list[str]:
    summaries, gains, speedups = measured.summaries, measured.gains, measured.speedups
    return [
        _MICRO, str(counted.requests),
        *(plain(summaries[r].acceptance_length if r in summaries else None, 2)
          for r in DRAFTING_ROLES),
        *(percent(gains[o].pooled.acceptance_ratio if o in gains else None) for o in OTHERS),
        *(plain(speedups[r].speedup if r in speedups else None, 2, "x") for r in DRAFTING_ROLES),
    ]  # fmt: skip


def _macro(measured: Measured, counted: ArmSummary) -> list[str]:
    summaries, gains, speedups = measured.summaries, measured.gains, measured.speedups
    return [
        _MACRO, str(counted.requests),
        *(plain(summaries[r].acceptance_length_macro if r in summaries else None, 2)
          for r in DRAFTING_ROLES),
        *(percent(gains[o].acceptance_macro if o in gains else None) for o in OTHERS),
        *(plain(speedups[r].speedup_macro if r in speedups else None, 2, "x")
          for r in DRAFTING_ROLES),
    ]  # fmt: skip


def seed_table(measured: Sequence[Measured], figure: str) -> str:
    """Each seed's own gain, and the pooled one; empty without any gain.

    Args:
        measured: of several kinds of drafter and conditions.
        figure: `acceptance_ratio` or `speedup`.
    """
    rows = []
    for each in measured:
        by_seed = {name: {} for gain in each.gains.values() for name in gain.seeds}
        for other, gain in each.gains.items():
            for name, comparison in gain.seeds.items():
                by_seed[name][other] = comparison
        named = list(by_seed.items())
        if len(named) > 1:
            pooled = {other: gain.pooled for other, gain in each.gains.items()}
            named.append((f"**all {len(named)} seeds**", pooled))
        for name, gains in named:
            shown = [percent(_ratio(gains.get(other), figure)) for other in OTHERS]
            prompts = max(comparison.prompts for comparison in gains.values())
            rows.append([each.regime, each.condition.title, name, str(prompts), *shown])
    if not rows:
        return ""
    columns = ["drafter", "condition", "Carryover arm", "prompts"]
    return table([*columns, *(f"gain over {other}" for other in OTHERS)], rows, left=3)


def position_table(measured: Sequence[Measured]) -> str:
    """Acceptance rate at each position, pooled over seeds; empty without speculation."""
    rows = [
        [each.regime, role, *(f"{rate:.3f}" for rate in each.summaries[role].position_rates)]
        for each in measured
        for role in DRAFTING_ROLES
        if role in each.summaries and each.summaries[role].position_rates
    ]
    if not rows:
        return ""
    longest = max(map(len, rows))
    rows = [row + [DASH] * (longest - len(row)) for row in rows]
    return table(["drafter", "arms", *map(str, range(1, longest - 1))], rows, left=2)


def load_table(measured: Sequence[Measured]) -> str:
    """Every arm at one load: acceptance, speed and latencies."""
    rows, told = [], set()
    for each in measured:
        for role in ROLES:
            for (of_role, name), (summary, speedup) in each.arms.items():
                key = (name, *(run.record.id for run in each.runs))
                if of_role != role or (role == "autoregressive" and key in told):
                    continue
                told.add(key)
                rows.append([
                    DASH if role == "autoregressive" else each.regime, role, name,
                    plain(summary.acceptance_length, 2), plain(summary.output_tokens_per_s, 1),
                    plain(speedup.speedup, 2, "x") if speedup else DASH,
                    _times(summary.tpot_ms), _times(summary.ttft_ms),
                    f"{summary.failed}/{summary.requests}",
                ])  # fmt: skip
    columns = [
        "drafter", "role", "arm", "acceptance length", "output tokens/s", "speed-up",
        "TPOT p50 / p95, ms", "TTFT p50 / p95, ms", "failed",
    ]  # fmt: skip
    return table(columns, [[narrow(cell) for cell in row] for row in rows], left=3)


def sweep_table(measured: Sequence[Measured]) -> str:
    """Throughput of each role and gains over concurrency, of one kind of drafter."""
    rows = []
    for each in measured:
        summaries, gains = each.summaries, each.gains
        speeds = [plain(summaries[r].output_tokens_per_s if r in summaries else None, 1)
                  for r in ROLES]  # fmt: skip
        shown = [percent(gains[o].pooled.speedup if o in gains else None) for o in OTHERS]
        alone = each.speedups.get("carryover")
        prompts = max(summary.requests for summary in summaries.values())
        rows.append([
            str(each.condition.concurrency), str(prompts), *speeds, *shown,
            plain(alone.speedup if alone else None, 2, "x"),
        ])  # fmt: skip
    columns = ["concurrency", "prompts", *(f"{role}, tokens/s" for role in ROLES)]
    columns += [*(f"gain over {other}" for other in OTHERS), "speed-up, carryover"]
    return table(columns, [[narrow(cell) for cell in row] for row in rows])


def _part(comparison: Comparison, name: str) -> Comparison | None:
    return comparison.by_set.get(name)


def _ratio(comparison: Comparison | None, figure: str):
    return None if comparison is None else getattr(comparison, figure)


def _times(values: Sequence[float]) -> str:
    return " / ".join(DASH if v != v else f"{v:,.0f}" if v >= 100 else f"{v:.1f}"
                      for v in values[:2])  # fmt: skip
