"""The page that `platform traffic report` writes: verdicts in words first, then what they rest on.

Made from the controller's answer to `report` alone, so a kept answer can be rendered again later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from carryover.pages import Card, Page, format_number
from carryover.serving.guard import METRICS, WORDS
from carryover.serving.observations import Statistics
from carryover.serving.report_figures import Event, TimeFigures, per_position

_TONES = {"better": "good", "worse": "bad"}
_TIMES = {"tpot_s", "ttft_s", "e2e_s"}
_NOTE = (
    "Verdicts compare requests whose arm was chosen by chance, within periods of equal weights. "
    "Their intervals hold at all times at once, however often one looks, so a verdict may be acted "
    "on as soon as it stands here; together all of them are wrong with a chance of at most "
    "{alpha:.3g}%. Header overrides, requests by an arm's name, fall-backs that another arm took "
    "over, and shadows are counted apart. Latencies are compared by geometric means of answers "
    "given, under the load that each arm has: one with little traffic for its replicas is faster "
    "for that reason alone. Acceptance length is pooled over rounds and does not depend on load. "
    "Requests with one sticky key count together."
)


def render(answer: Mapping[str, Any]) -> str:
    """The page as HTML.

    Args:
        answer: the controller's, to the action `report`.
    """
    return build(answer).html()


def build(answer: Mapping[str, Any]) -> Page:
    """The page, whose `write` can save its figures too."""
    statistics = Statistics.from_json(answer["statistics"])
    rows, control = answer["arms"], answer["control"]
    arms = [row["arm"] for row in rows]
    log = sorted(answer["log"], key=lambda entry: entry["time_s"])
    page = Page(
        f"Traffic: {answer['experiment']}",
        lead=_lead(answer),
        footer=f"Written by platform traffic report at {_clock(answer['time_s'])}.",
    )
    page.section("Verdicts")
    for arm, by_metric in answer["comparisons"].items():
        page.paragraph(_in_words(arm, control, by_metric))
        page.cards([_card(arm, metric, found) for metric, found in by_metric.items()])
    if not answer["comparisons"]:
        page.paragraph("There is one arm, so there is nothing to compare.")
    alpha = answer["guard"]["alpha"]
    page.note(_NOTE.format(alpha=100 * alpha))
    _add_figures(page, answer, statistics, arms=arms, log=log)
    page.section("Arms")
    _add_arms(page, rows)
    _add_labels(page, statistics, arms)
    if answer["comparisons"]:
        _add_comparisons(page, answer["comparisons"])
    page.section("Changes of the split")
    _add_log(page, log)
    page.note(_losses(answer, statistics))
    return page


def _lead(answer: Mapping[str, Any]) -> str:
    compared = sum(row["requests"] for row in answer["arms"])
    weights = ", ".join(
        f"{arm} {100 * weight:.4g}%" for arm, weight in answer["weights"].items() if weight > 0
    )
    return (
        f"{answer['status'].capitalize()} since {_clock(answer['began_s'])}; "
        f"{compared:,} compared requests; now {weights}; control arm: {answer['control']}."
    )


def _in_words(arm: str, control: str, by_metric: Mapping[str, Mapping[str, Any]]) -> str:
    """One sentence on an arm."""
    groups: dict[str, list[str]] = {}
    for metric, found in by_metric.items():
        groups.setdefault(_state(metric, found), []).append(WORDS[metric])
    parts = [
        f"{arm} is {verdict} than {control} on {_listed(groups[verdict])}"
        for verdict in ("better", "worse")
        if verdict in groups
    ]
    for state in ("no difference shown", "too early to tell", "nothing to compare"):
        if state in groups:
            begin = "" if parts else f"{arm} against {control}: "
            parts.append(f"{begin}{state} on {_listed(groups[state])}")
    return "; ".join(parts) + "."


def _state(metric: str, found: Mapping[str, Any]) -> str:
    """The verdict, told apart by why there is none."""
    if found["verdict"] != "inconclusive":
        return found["verdict"]
    if min(found["n_control"], found["n_treatment"]) == 0:
        return "nothing to compare"
    return "too early to tell" if _effect(metric, found)[0] is None else "no difference shown"


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _card(arm: str, metric: str, found: Mapping[str, Any]) -> Card:
    label, state = f"{arm}: {WORDS[metric]}", _state(metric, found)
    value, low, high = _effect(metric, found)
    if value is None:
        return Card(label, state, _sentence(found["why"]))
    levels = f"{_level(metric, found['control'])} to {_level(metric, found['treatment'])}"
    if found["verdict"] == "inconclusive":
        return Card(label, state, f"{value}, between {low} and {high}; {levels}.")
    text = f"Between {low} and {high}; {levels}."
    return Card(label, f"{state}, {value}", text, tone=_TONES[state])


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _effect(metric: str, found: Mapping[str, Any]) -> tuple[str | None, str, str]:
    """Value and bounds, as people read them; the value is None where there is none."""
    names = ("estimate", "low", "high")
    unit = "\N{NO-BREAK SPACE}points"
    if METRICS[metric].relative:
        names, unit = ("relative", "relative_low", "relative_high"), "%"
    numbers = [found[name] for name in names]
    if any(number is None or not math.isfinite(number) for number in numbers):
        return None, "", ""
    # Bounds beyond a tenfold change say that nothing is known yet.
    words = [f"{100 * number:+.1f}{unit}" if number < 10 else "+∞" for number in numbers]
    return tuple(word.replace("-", "−") for word in words)


def _level(metric: str, value: float | None) -> str:
    if value is None:
        return "–"
    if metric == "error_rate":
        return f"{100 * value:.2f}%"
    return _milliseconds(value) if metric in _TIMES else f"{value:.2f}"


def _milliseconds(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    number, unit = (format_number(value), "s") if value >= 1 else (f"{1000 * value:.3g}", "ms")
    return f"{number}\N{NO-BREAK SPACE}{unit}"


def _clock(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, tz=UTC).strftime("%d %b %Y, %H:%M UTC")


def _add_figures(
    page: Page, answer: Mapping[str, Any], statistics: Statistics, *, arms: Sequence[str],
    log: Sequence[Mapping[str, Any]],
) -> None:  # fmt: skip
    events = [Event(number, entry["time_s"]) for number, entry in enumerate(log, 1)]
    figures = TimeFigures(
        statistics.history, arms=arms, events=events, until_s=answer["time_s"]
    )  # fmt: skip
    if not figures.has_data:
        page.section("Over time")
        page.paragraph("No request has finished yet.")
        return
    drawn = [
        (figure, arm, WORDS[metric])
        for arm in answer["comparisons"]
        for metric in ("acceptance_length", "tpot_s")
        if (figure := figures.verdict(statistics.trail.points, arm, metric)) is not None
    ]
    if drawn:
        page.section("How the verdict developed")
        page.note("Bands are always-valid intervals: a verdict stands once one leaves out zero.")
    for figure, arm, word in drawn:
        page.figure(
            figure, title=f"{arm}: {word} against {answer['control']}",
            description=f"Change of {word} over time, in percent, with a band that narrows.",
        )  # fmt: skip
    page.section("Over time")
    page.note("Bands are 95% intervals of each point by itself. Numbers mark changes of the split.")
    for figure, title, text in (
        (figures.acceptance(), "Acceptance length", "Tokens per round by arm over time."),
        (figures.latency("tpot"), "TPOT", "Time per output token by arm over time."),
        (figures.split(), "Split", "Share of the compared requests by arm over time."),
        (figures.latency("ttft"), "TTFT", "Time to the first token by arm over time."),
        (figures.failures(), "Failures", "Share of failed requests by arm over time."),
    ):
        if figure is not None:
            page.figure(figure, title=title, description=text)
    rates = {row["arm"]: row["acceptance_per_position"] for row in answer["arms"]}
    positions = per_position(rates, arms=arms)
    if positions is not None:
        page.figure(
            positions, title="Acceptance by position", caption="Over the whole experiment",
            description="Share of rounds that accept the proposal at each position, by arm.",
        )  # fmt: skip


def _add_arms(page: Page, rows: Sequence[Mapping[str, Any]]) -> None:
    def pair(row: Mapping[str, Any], name: str) -> str:
        return " / ".join(_milliseconds(row[f"{name}_p{rank}_s"]) for rank in (50, 95))

    page.table(
        "What each arm did (p50 / p95 of the last requests; kept apart: for another arm, by "
        "override, shadows)",
        ["arm", "weight", "requests", "failed", "error rate", "TTFT", "TPOT", "end to end",
         "tokens/s", "acceptance", "kept apart"],
        [
            [row["arm"], f"{100 * row['weight']:.4g}%", row["requests"], row["failures"],
             _level("error_rate", row["error_rate"]), pair(row, "ttft"), pair(row, "tpot"),
             pair(row, "e2e"), row["output_tokens_per_s"], row["acceptance_length"],
             f"{row['fallbacks_taken']:,}, {row['overrides']:,}, {row['shadows']:,}"]
            for row in rows
        ],
    )  # fmt: skip


def _add_labels(page: Page, statistics: Statistics, arms: Sequence[str]) -> None:
    kept = {arm: statistics.arms[arm].by_label for arm in arms if arm in statistics.arms}
    labels = sorted({label for by_label in kept.values() for label in by_label})
    if labels:
        page.table(
            "Acceptance length by label (requests)",
            ["label", *kept],
            [
                [label, *(_length(by_label.get(label)) for by_label in kept.values())]
                for label in labels
            ],
        )


def _length(totals: Any) -> str:
    if totals is None:
        return "–"
    return f"{format_number(totals.acceptance_length)} ({totals.requests:,})"


def _add_comparisons(page: Page, comparisons: Mapping[str, Mapping[str, Any]]) -> None:
    rows = []
    for arm, by_metric in comparisons.items():
        for metric, found in by_metric.items():
            value, low, high = _effect(metric, found)
            between = "–" if value is None else f"{low} to {high}"
            rows.append(
                [f"{arm}: {WORDS[metric]}", _state(metric, found), value, between,
                 _level(metric, found["control"]), _level(metric, found["treatment"]),
                 found["n_control"], found["n_treatment"]]
            )  # fmt: skip
    page.table(
        "Comparisons with the control arm",
        ["what", "verdict", "change", "interval", "control", "arm", "control's requests",
         "arm's requests"],
        rows,
    )  # fmt: skip


def _add_log(page: Page, log: Sequence[Mapping[str, Any]]) -> None:
    if not log:
        page.paragraph("No change so far.")
        return
    page.table(
        "Audit log",
        ["number", "time", "who", "action", "weights", "why"],
        [
            [str(number), _clock(entry["time_s"]), entry["who"], entry["action"],
             _weights(entry.get("after") or {}), entry["why"]]
            for number, entry in enumerate(log, 1)
        ],
    )  # fmt: skip


def _weights(after: Mapping[str, Any]) -> str:
    weights = after.get("weights")
    if not isinstance(weights, Mapping):
        return "–"
    return ", ".join(f"{arm} {100 * weight:.4g}%" for arm, weight in weights.items() if weight > 0)


def _losses(answer: Mapping[str, Any], statistics: Statistics) -> str:
    """What is missing from the numbers."""
    counts = (
        (answer.get("dropped") or 0, "observations were dropped while the controller was away"),
        (answer.get("unknown") or 0, "could not be read or named no arm"),
        (sum(arm.uncompared for arm in statistics.arms.values()),
         "came after so many changes of the weights that they were not compared"),
        (sum(arm.totals["compared"].invalid for arm in statistics.arms.values()),
         "times were no positive number"),
    )  # fmt: skip
    lost = [f"{count:,} {text}" for count, text in counts if count]
    return f"Missing from these numbers: {'; '.join(lost) or 'nothing'}."
