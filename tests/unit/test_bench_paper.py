"""The paper's numbers stand beside ours only where everything matches."""

from contextlib import nullcontext
from unittest import mock

import pytest
from bench_backends import ACCEPTED, SPEED, RuleBackend, make_prompts

from carryover.bench import paper, sets, statistics
from carryover.bench.records import Condition
from carryover.bench.session import Bench, run_bench
from carryover.bench.settings import BenchConfig

QWEN = {"target": "Qwen/Qwen3-4B", "num_speculative_tokens": 15, "method": "dspark"}
ARMS = {
    "autoregressive": {"target": "Qwen/Qwen3-4B", "drafter": None},
    "baseline": {**QWEN, "drafter": "b"},
    "carryover": {**QWEN, "drafter": "c"},
}


def measured(folder, monkeypatch, *, arms=ARMS, prompts="paper-844", **settings):
    # the whole mix by its names, with fewer prompts in each set
    counts = {name: 2 for name in sets.PAPER_COUNTS}
    monkeypatch.setattr(paper, "PAPER_COUNTS", counts)
    config = BenchConfig.parse({"prompts": prompts, "out": folder, **settings})
    conditions = [Condition("offline", 0.0), Condition("offline", 1.0)]
    bench = Bench(
        config, "offline", arms, make_prompts(16, tuple(counts)), conditions,
        lambda _: nullcontext(RuleBackend()),
    )  # fmt: skip
    with mock.patch.object(statistics, "RESAMPLES", 200):
        return run_bench(bench, tracker=None)


def test_matching_settings_show_both(tmp_path, monkeypatch):
    found = paper.beside_paper(measured(tmp_path, monkeypatch))
    assert [(b.published.what, b.published.carryover) for b in found] == [
        ("average acceptance length", 4.85), ("speed-up, translation", 2.5),
    ]  # fmt: skip
    first, second = found
    assert first.baseline.value == 1 + ACCEPTED["baseline"]
    assert first.carryover.value == 1 + ACCEPTED["carryover"]
    assert second.carryover.value == pytest.approx(SPEED["autoregressive"] / SPEED["carryover"])
    assert second.gain.value == pytest.approx(SPEED["baseline"] / SPEED["carryover"])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"prompts": "mine.jsonl"}, "not paper-844"),
        ({"num_prompts": 8}, "only a part"),
        ({"arms": {**ARMS, "carryover": {**ARMS["carryover"], "num_speculative_tokens": 7}}},
         "proposes 15"),
        ({"arms": {n: {**a, "target": "embedded"} for n, a in ARMS.items()}}, "Qwen3-4B"),
        ({"arms": {**ARMS, "baseline": {**ARMS["baseline"], "method": None}}}, "kind of drafter"),
    ],
)  # fmt: skip
def test_anything_else_shows_none_and_says_why(tmp_path, monkeypatch, change, why):
    result = measured(tmp_path, monkeypatch, **change)
    assert paper.beside_paper(result) == [] and why in paper.why_not(result)
    assert why in (result.folder / "report.html").read_text().replace("&#39;", "'")


def test_the_published_figures_are_those_of_the_method_page():
    by_name = {(p.what, p.regime): p for p in paper.PUBLISHED}
    average = by_name["average acceptance length", "markov"]
    assert (average.baseline, average.carryover) == (4.33, 4.85)
    assert sum(sets.PAPER_COUNTS.values()) == 844 and len(sets.PAPER_COUNTS) == 8
