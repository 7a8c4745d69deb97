"""How `platform traffic` draws what the controller answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_STATUS_STYLES = {"running": "green", "paused": "yellow", "ended": "dim"}
_VERDICT_STYLES = {"better": "green", "worse": "red", "inconclusive": "dim"}
_METRIC_NAMES = {
    "acceptance_length": "acceptance length", "tpot_s": "TPOT", "ttft_s": "TTFT",
    "e2e_s": "end to end", "error_rate": "error rate",
}  # fmt: skip
_NOTHING = "-"


def overview_view(answer: Mapping[str, Any]) -> RenderableType:
    """The answer to `show`: the split, the arms, the verdicts, and what to know beside them."""
    parts: list[RenderableType] = [_headline(answer), "", arm_table(answer)]
    if answer["comparisons"]:
        parts += ["", comparison_table(answer)]
    return Group(*parts, "", *(Text(line) for line in remarks(answer)))


def arm_table(answer: Mapping[str, Any]) -> Table:
    """One column for each arm."""
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    rows = answer["arms"]
    for row in rows:
        style = "red" if row["arm"] in answer["down"] else ""
        table.add_column(Text(row["arm"], style=style), justify="right")
    for name, cell in _ROWS.items():
        table.add_row(name, *(cell(row) for row in rows))
    return table


def comparison_table(answer: Mapping[str, Any]) -> Table:
    """Each arm against the control, one row for each metric that has data."""
    table = Table(box=None, pad_edge=False)
    for heading in ("compared with " + answer["control"], "metric", "verdict"):
        table.add_column(heading)
    level = 100 * (1 - answer["guard"]["alpha"])
    table.add_column(f"difference [{level:g}% interval]", justify="right")
    for arm, by_metric in answer["comparisons"].items():
        shown = arm
        for metric, found in by_metric.items():
            style = _VERDICT_STYLES[found["verdict"]]
            table.add_row(
                Text(shown),
                _METRIC_NAMES.get(metric, metric),
                Text(found["verdict"], style=style),
                _difference(found),
            )
            shown = ""
    return table


def remarks(answer: Mapping[str, Any]) -> list[str]:
    """Lines under the tables: ramp, shadow, guard, and whatever is not as it should be."""
    lines = []
    if answer["standby"]:
        lines.append(
            "STANDING BY: another application has the state folder; until it is gone, this one "
            "follows its split, and neither evaluates nor changes anything"
        )
    if answer["kept_weights"] is not None:
        lines.append(f"paused: resume brings back {weights_text(answer['kept_weights'])}")
    if (ramp := answer["ramp"]) is not None:
        steps = " ".join(
            f"[{_percent(step)}]" if index == ramp["position"] else _percent(step)
            for index, step in enumerate(ramp["steps"])
        )
        lines.append(f"ramp of {ramp['arm']}: {steps}")
    if (shadow := answer["shadow"]) is not None:
        lines.append(f"shadow: {_percent(shadow['share'])} copied to {shadow['arm']}")
    lines.append(_evaluation_line(answer))
    if answer["down"]:
        lines.append(f"down: {', '.join(answer['down'])}")
    behind = [r for r in answer["replicas"] if r["version"] < answer["version"]]
    count = len(answer["replicas"])
    lines.append(
        f"ingress replicas: {count}"
        + (f", {len(behind)} of them not yet on split {answer['version']}" if behind else "")
    )
    if lost := answer["dropped"] + answer["unknown"]:
        lines.append(f"the statistics lack {lost:,} requests that could not be delivered")
    if answer["unrecorded"]:
        lines.append(f"not in MLflow: {answer['unrecorded']}")
    return lines


def log_text(entries: Sequence[Mapping[str, Any]]) -> Text:
    """The audit log, oldest first: what and who in a line, what changed and why below it."""
    lines = Text()
    for entry in entries:
        lines.append(f"{datetime.fromtimestamp(entry['time_s']):%Y-%m-%d %H:%M:%S}  ")
        lines.append(entry["action"], style="bold")
        lines.append(f"  by {entry['who']}  (split {entry['version']})\n")
        lines.append(f"    {difference_text(entry['before'], entry['after'])}\n")
        if entry["why"]:
            lines.append(f"    why: {entry['why']}\n", style="italic")
    return lines


def change_line(action: str, answer: Mapping[str, Any]) -> Text:
    """What holds after a change."""
    replicas = len(answer["replicas"])
    confirmed = f"confirmed by {replicas} ingress replica" + ("" if replicas == 1 else "s")
    if answer["late"]:
        confirmed = f"not confirmed by all of {replicas} ingress replicas"
    state = f"{weights_text(answer['weights'])}"
    if answer["ramp"] is not None:
        steps = ", ".join(_percent(step) for step in answer["ramp"]["steps"])
        state += f"; ramp of {answer['ramp']['arm']} over {steps}"
    if answer["status"] == "ended":
        state = f"experiment {answer['experiment']} has ended; {state}"
    return Text(f"{action}: split {answer['version']}: {state} ({confirmed})")


def weights_text(weights: Mapping[str, float]) -> str:
    """Weights in percent."""
    return "  ".join(f"{arm} {_percent(weight)}" for arm, weight in weights.items())


def difference_text(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """What changed between two states of the audit log."""
    parts = []
    old, new = before.get("weights") or {}, after.get("weights") or {}
    for arm, weight in new.items():
        if not old:
            parts.append(f"{arm} {_percent(weight)}")
        elif old.get(arm) != weight:
            parts.append(f"{arm} {_percent(old.get(arm, 0.0))} -> {_percent(weight)}")
    for key in sorted((before.keys() | after.keys()) - {"weights"}):
        if before.get(key) != after.get(key):
            parts.append(f"{key} {_value(after.get(key))}")
    return "; ".join(parts) or _NOTHING


def _failed(row: Mapping[str, Any]) -> str:
    share = f" ({_percent(row['error_rate'])})" if row["failures"] else ""
    return f"{row['failures']:,}{share}"


def _headline(answer: Mapping[str, Any]) -> Text:
    status = answer["status"]
    return Text.assemble(
        (answer["experiment"], "bold"), "  ", (status, _STATUS_STYLES[status]),
        f"  split {answer['version']}, weights since {_duration(answer, 'since_s')}, "
        f"experiment since {_duration(answer, 'began_s')}",
    )  # fmt: skip


def _evaluation_line(answer: Mapping[str, Any]) -> str:
    evaluation = answer["evaluation"]
    if evaluation["failed"]:
        return f"guard: the last evaluation FAILED, so nothing ramps: {evaluation['failed']}"
    if "time_s" not in evaluation:
        return f"guard: evaluates every {evaluation['period_s']:g} s; not yet done"
    ago = max(0.0, answer["time_s"] - evaluation["time_s"])
    return f"guard: {evaluation['why'] or 'no rule broken'} ({ago:.0f} s ago)"


def _difference(found: Mapping[str, Any]) -> str:
    """The relative change; of the error rate the difference; or why there is none."""
    if found["metric"] == "error_rate":
        values, unit = [found[name] for name in ("estimate", "low", "high")], " points"
    else:
        values = [found[name] for name in ("relative", "relative_low", "relative_high")]
        unit = "%"
    if None in values:
        return found["why"]
    value, low, high = (_points(number) for number in values)
    return f"{value}{unit} [{low}, {high}]"


def _points(share: float) -> str:
    # The first few requests bound nothing; a hundred digits would say so less clearly.
    return f"{100 * share:+.1f}" if share < 10 else "> +1000"


def _duration(answer: Mapping[str, Any], key: str) -> str:
    seconds = max(0.0, answer["time_s"] - answer[key])
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _percent(share: float) -> str:
    return f"{100 * share:.4g}%"


def _number(value: float | None, form: str) -> str:
    return _NOTHING if value is None else format(value, form)


def _pair(row: Mapping[str, Any], name: str, scale: float, form: str, unit: str) -> str:
    first, second = row[f"{name}_p50_s"], row[f"{name}_p95_s"]
    if first is None or second is None:
        return _NOTHING
    return f"{first * scale:{form}} / {second * scale:{form}} {unit}"


def _value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return " ".join(f"{key}={_value(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value)


_ROWS = {
    "weight": lambda row: _percent(row["weight"]),
    "requests": lambda row: f"{row['requests']:,}",
    "failed": _failed,
    "acceptance length": lambda row: _number(row["acceptance_length"], ".2f"),
    "TPOT p50 / p95": lambda row: _pair(row, "tpot", 1000, ".1f", "ms"),
    "TTFT p50 / p95": lambda row: _pair(row, "ttft", 1000, ".0f", "ms"),
    "end to end p50 / p95": lambda row: _pair(row, "e2e", 1, ".2f", "s"),
    "output tokens/s per request": lambda row: _number(row["output_tokens_per_s"], ".1f"),
    "not compared": lambda row: f"{row['overrides'] + row['fallbacks_taken']:,}",
    "shadows": lambda row: f"{row['shadows']:,}",
}
