"""What a sweep would run, how long and how much: calculated from parts that were measured; pure
but for reading the folder of the sweep that they come from.
"""

from __future__ import annotations

import heapq
import json
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import log
from pathlib import Path
from statistics import median

from sweeps.ledger import Ledger
from sweeps.settings import Load, Setting, SweepConfig

_ENOUGH_RUNS = 200


@dataclass(frozen=True)
class Parts:
    """What was measured by a sweep, to plan others with.

    Attributes:
        start_s: median seconds from a trial's start until its engine answers.
        end_s: median seconds of a trial that were neither that nor measuring.
        request_s: by concurrency, median seconds of the whole load per request.
        load_s: median seconds of a load beside its requests: warm-up, figures.
        overhead_s: seconds of a slot that pass between trials, per trial.
        request_bytes: stored per request.
        row_bytes: of a line in the ledger.
        record_bytes: of a run in the MLflow store; None if it holds too few to tell.
        max_tokens: of a response, when these were measured.
        num_trials: that started an engine.
        num_loads: that were measured.
    """

    start_s: float
    end_s: float
    request_s: dict[int, float]
    load_s: float
    overhead_s: float
    request_bytes: float
    row_bytes: float
    record_bytes: float | None
    max_tokens: int
    num_trials: int
    num_loads: int

    def load_seconds(self, concurrency: int, *, requests: int, max_tokens: int) -> float:
        """Time of a load: interpolated over concurrency, longer by longer responses.

        Args:
            concurrency: requests in flight; beyond the measured ones it counts as the nearest.
            requests: sent.
            max_tokens: of each; time is taken to grow with it, which is so if all are cut.
        """
        scale = max_tokens / self.max_tokens
        return self.load_s + requests * scale * _interpolate(self.request_s, concurrency)

    def unmeasured(self, concurrencies: Iterable[int]) -> list[int]:
        """Concurrencies outside the measured ones."""
        few, many = min(self.request_s), max(self.request_s)
        return [each for each in sorted(set(concurrencies)) if not few <= each <= many]


def _interpolate(curve: dict[int, float], at: int) -> float:
    """Between neighbours on a logarithmic axis; the nearest outside."""
    below = max((each for each in curve if each <= at), default=min(curve))
    above = min((each for each in curve if each >= at), default=max(curve))
    if below == above or not below <= at <= above:
        return curve[below if at >= below else above]
    share = log(at / below) / log(above / below)
    return curve[below] + share * (curve[above] - curve[below])


def measured_parts(config: SweepConfig, ledger: Ledger) -> Parts | None:
    """Parts of a sweep that has measured at least one load with requests; None otherwise.

    Args:
        config: of that sweep.
        ledger: of its folder.
    """
    per_request: dict[int, list[float]] = {}
    loads, sizes, walls = [], [], {}
    for row in ledger.rows():
        figures = row["figures"]
        requests = figures.get("requests", 0)
        if not requests or "measured_s" not in figures:
            continue
        per_request.setdefault(row["concurrency"], []).append(figures["measured_s"] / requests)
        loads.append(row["wall_s"] - figures["measured_s"])
        sizes.append(row["stored_bytes"] / requests)
        walls[row["setting"]] = walls.get(row["setting"], 0.0) + row["wall_s"]
    ends = [end for end in ledger.trials() if end.outcome == "done" and end.start_s is not None]
    ends = [end for end in ends if end.setting in walls]
    if not loads or not ends:
        return None
    return Parts(
        start_s=median(end.start_s for end in ends),
        end_s=median(max(0.0, e.wall_s - e.start_s - walls[e.setting]) for e in ends),
        request_s={c: median(values) for c, values in sorted(per_request.items())},
        load_s=max(0.0, median(loads)),
        overhead_s=_overhead_s(ledger.folder / "runs.jsonl"),
        request_bytes=median(sizes),
        row_bytes=ledger.rows_file.stat().st_size / max(1, len(loads)),
        record_bytes=_record_bytes(ledger.folder / "mlflow.json"),
        max_tokens=config.max_tokens,
        num_trials=len(ends),
        num_loads=len(loads),
    )


def _overhead_s(file: Path) -> float:
    runs = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    trials = sum(run["trials"] for run in runs)
    return sum(run["trials"] * run["overhead_s"] for run in runs) / trials if trials else 0.0


def _record_bytes(file: Path) -> float | None:
    """Size of an SQLite store per run in it."""
    uri = json.loads(file.read_text())["uri"] if file.exists() else ""
    store = Path(uri.removeprefix("sqlite:///"))
    if not uri.startswith("sqlite:///") or not store.is_file():
        return None
    try:
        with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as database:
            (count,) = database.execute("select count(*) from runs").fetchone()
    except sqlite3.Error:
        return None
    # of fewer, the size is that of an empty store
    return store.stat().st_size / count if count >= _ENOUGH_RUNS else None


@dataclass(frozen=True)
class Forecast:
    """How long a sweep takes and what it comes to.

    Attributes:
        trial_s: of one trial that measures all loads.
        wall_s: of the sweep.
        busy_s: of all slots together, in trials.
        stored_bytes: by what is stored.
        extrapolated: concurrencies that lie outside the measured ones.
    """

    trial_s: float
    wall_s: float
    busy_s: float
    stored_bytes: dict[str, float]
    extrapolated: list[int]


def forecast(
    config: SweepConfig,
    missing: Sequence[tuple[Setting, Sequence[Load]]],
    parts: Parts,
    *,
    slots: int,
    num_prompts: int,
) -> Forecast:
    """Calculate a sweep from measured parts.

    Args:
        config: of the sweep.
        missing: loads of each setting that are to be measured, in order.
        parts: of another sweep, or of this one so far.
        slots: trials at once.
        num_prompts: at each load.
    """

    def seconds(loads: Sequence[Load]) -> float:
        return sum(
            parts.load_seconds(load.concurrency, requests=num_prompts, max_tokens=config.max_tokens)
            for load in loads
        )

    trials = [parts.start_s + seconds(loads) + parts.end_s for _, loads in missing]
    measured = sum(len(loads) for _, loads in missing)
    stored = {
        "requests": measured * num_prompts * parts.request_bytes,
        "ledger": measured * parts.row_bytes,
    }
    if parts.record_bytes is not None:
        stored["MLflow"] = measured * parts.record_bytes
    return Forecast(
        trial_s=parts.start_s + seconds(config.loads()) + parts.end_s,
        wall_s=makespan([trial + parts.overhead_s for trial in trials], slots),
        busy_s=sum(trials),
        stored_bytes=stored,
        extrapolated=parts.unmeasured(load.concurrency for _, each in missing for load in each),
    )


def makespan(durations: Iterable[float], slots: int) -> float:
    """When the last of these has ended if each begins on the slot that is free first, in order."""
    free = [0.0] * slots
    for duration in durations:
        heapq.heapreplace(free, free[0] + duration)
    return max(free)
