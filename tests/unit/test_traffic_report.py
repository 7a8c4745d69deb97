"""The page of `platform traffic report`: what it says must be what the numbers say."""

import json
import re
from dataclasses import asdict, replace

import numpy as np
import pytest
from guard_arms import EVEN, T0, arm_pair
from test_pages import parse

from carryover.serving.guard import GuardRules, compare_all
from carryover.serving.observations import Observation, Statistics
from carryover.serving.report import build, render
from carryover.serving.views import without_nan

ARMS = ("baseline", "carryover")
LOG = [
    {"time_s": T0, "who": "anna@ops", "action": "set", "experiment": "may", "version": 2,
     "before": {}, "after": {"weights": {"baseline": 0.9, "carryover": 0.1}}, "why": "<begin>"},
    {"time_s": T0 + 300, "who": "guard", "action": "rollback", "experiment": "may", "version": 3,
     "before": {}, "after": {}, "why": "error rate 34%"},
]  # fmt: skip


def answer_of(statistics, *, log=(), arms=ARMS, time_s=T0 + 600):
    """As the controller answers, over JSON."""
    control, *treatments = arms
    compared = compare_all(
        statistics.arms[control], {arm: statistics.arms[arm] for arm in treatments}
    )
    answer = {
        "experiment": "may", "status": "running", "time_s": time_s, "began_s": T0,
        "control": control, "weights": dict.fromkeys(arms, 1 / len(arms)),
        "arms": [{"arm": arm, "weight": 1 / len(arms), **statistics.arms[arm].summary()}
                 for arm in arms],
        "comparisons": {arm: {metric: asdict(found) for metric, found in by_metric.items()}
                        for arm, by_metric in compared.items() if treatments},
        "guard": GuardRules().model_dump(mode="json"), "statistics": statistics.to_json(),
        "log": list(log), "dropped": 7, "unknown": 0,
    }  # fmt: skip
    return json.loads(json.dumps(without_nan(answer), allow_nan=False))


@pytest.fixture(scope="module")
def statistics():
    """Two arms over ten minutes, the treatment faster and failing more."""
    statistics, rng = Statistics(ARMS), np.random.default_rng(0)
    for arm, source in zip(ARMS, arm_pair(1600, tpot=0.7), strict=True):
        statistics.arms[arm] = source
    for index in range(800):
        arm = ARMS[index % 2]
        failed = arm == "carryover" and index % 5 == 0
        seen = Observation(
            T0 + 0.75 * index, arm, arm, "weighted", EVEN, "error" if failed else "ok",
            label="code <1>" if index % 3 else "chat", ttft_s=0.1, tpot_s=float(rng.uniform(1, 2)),
            e2e_s=2.0, rounds=10, accepted=20, accepted_per_position=(10, 6, 4),
        )  # fmt: skip
        statistics.history.add(seen)
        statistics.arms[arm].add(seen)
        if index % 100 == 99:
            compared = compare_all(statistics.arms["baseline"], {
                "carryover": statistics.arms["carryover"]})  # fmt: skip
            statistics.trail.note(seen.time_s, compared)
    return statistics


@pytest.fixture(scope="module")
def page(statistics):
    return build(answer_of(statistics, log=LOG))


def text_of(html):
    return re.sub(r"\s+", " ", " ".join(parse(html).text))


def test_the_page_needs_nothing_outside_itself(page):
    html = page.html()
    found = parse(html)
    assert {reference[0] for reference in found.references} == {"#"}
    assert {reference[1:] for reference in found.references} <= set(found.ids)
    assert not re.search(r"https?:|<script|@import", html)


def test_the_verdicts_come_first_and_in_words(page, statistics):
    text = text_of(page.html())
    found = compare_all(statistics.arms["baseline"], {"carryover": statistics.arms["carryover"]})
    worse = found["carryover"]["error_rate"]
    assert worse.verdict == "worse"
    assert "carryover is worse than baseline on error rate; no difference shown on" in text
    assert f"worse, +{100 * worse.estimate:.1f} points" in text
    assert text.index("carryover is worse") < text.index("Over time")
    assert "together all of them are wrong with a chance of at most 5%" in text


def test_every_plot_people_want_is_there(page):
    html = page.html()
    titles = re.findall(r"<figcaption>([^<]*)", html)
    for title in ("Acceptance length", "TPOT", "Split", "TTFT", "Failures",
                  "Acceptance by position", "carryover: TPOT against baseline",
                  "carryover: acceptance length against baseline"):  # fmt: skip
        assert title in titles, titles
    assert html.count("<svg") == len(titles)


def test_changes_are_marks_in_the_plots_and_rows_in_the_log(page, statistics):
    html = page.html()
    text = text_of(html)
    assert "baseline 90%, carryover 10%" in text
    assert "<begin>" in text and "error rate 34%" in text and "anna@ops" in text
    assert "30 Nov 2026" not in text and "15 Jan 2027, 08:00 UTC" in text
    plain = build(answer_of(statistics)).html()
    for number in (1, 2):
        marks = [len(re.findall(f">{number}</text>", split_of(text))) for text in (html, plain)]
        assert marks[0] == marks[1] + 1


def split_of(html):
    return next(svg for svg in html.split("<svg")[1:] if 'id="split-title"' in svg)


def test_tables_hold_arms_labels_and_losses(page, statistics):
    text = text_of(page.html())
    row = statistics.arms["carryover"].summary()
    assert f"{row['requests']:,} {row['failures']:,}" in text
    assert "code <1>" in text and "chat" in text
    assert "Missing from these numbers: 7 observations were dropped while the controller" in text


def test_figures_can_be_saved(page, tmp_path):
    page.write(tmp_path / "traffic.html", figures=tmp_path / "figures")
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert {"split.png", "tpot.png", "acceptance-by-position.png"} <= names


def test_a_page_of_nothing_says_so():
    text = text_of(render(answer_of(Statistics(ARMS))))
    assert "nothing to compare on acceptance length" in text
    assert "No request has finished yet." in text and "No change so far." in text


def test_a_page_of_one_request_and_of_one_arm():
    statistics = Statistics(["baseline"])
    seen = Observation(T0, "baseline", "baseline", "weighted", "baseline=1", "ok", ttft_s=0.1)
    statistics.add([seen])
    text = text_of(render(answer_of(statistics, arms=["baseline"])))
    assert "There is one arm, so there is nothing to compare." in text
    assert "Acceptance by position" not in text, "nothing is drafted"


def test_a_beginning_is_no_verdict():
    statistics = Statistics(ARMS)
    for arm, source in zip(ARMS, arm_pair(30), strict=True):
        statistics.arms[arm] = source
    text = text_of(render(answer_of(statistics)))
    assert "carryover against baseline: too early to tell on" in text
    assert "too early to tell Too few" in text


def test_shadows_and_overrides_are_in_the_table_and_not_in_the_plots(statistics):
    other = Statistics.from_json(statistics.to_json())
    before = other.history.sums("carryover", "compared").sum()
    seen = Observation(T0 + 5, "carryover", "carryover", "header", EVEN, "ok", tpot_s=99.0)
    other.add([seen, replace(seen, shadow=True)])
    assert other.history.sums("carryover", "compared").sum() == before
    row = next(row for row in answer_of(other)["arms"] if row["arm"] == "carryover")
    assert (row["overrides"], row["shadows"]) == (1, 1)


def test_a_long_experiment_is_shown_in_days():
    statistics = Statistics(ARMS)
    for hour in range(24 * 7):
        arm = ARMS[hour % 2]
        statistics.add([Observation(T0 + 3600 * hour, arm, arm, "sticky", EVEN, "ok", ttft_s=0.1)])
    html = render(answer_of(statistics, time_s=T0 + 7 * 86400))
    assert "days since the first request" in html
    assert len(html) < 400_000
