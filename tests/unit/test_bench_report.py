"""The table shows every figure, and remarks say what must be known beside it."""

import io
from pathlib import Path

from rich.console import Console
from test_bench_summary import request

from carryover.bench.online import BenchResult, OnlineConfig
from carryover.bench.report import remarks, result_table
from carryover.bench.summary import compare_arms, summarise_arm


def result(*, agree=True):
    plain = [request("plain", 0, finish="length"), request("plain", 1, finish="length")]
    fast = [
        request("fast", 0, wall=0.5, drafts=4, accepted=4, histogram=(1, 2, 1)),
        request("fast", 1, wall=0.5, drafts=4, accepted=4, histogram=(1, 2, 1), text="other"),
        request("fast", 2, error="boom"),
    ]
    return BenchResult(
        config=OnlineConfig(prompts="x"),
        engine={},
        summaries={
            "plain": summarise_arm("plain", plain, measured_s=2.0),
            "fast": summarise_arm("fast", fast, measured_s=1.0),
        },
        comparisons={"fast": compare_arms(fast, plain, same_text=True)},
        baseline="plain",
        requests=plain + fast,
        counters={},
        counters_agree=agree,
        folder=Path("runs/bench/x"),
    )


def test_the_table_shows_figures_with_intervals_and_failures():
    console = Console(file=io.StringIO(), width=80)
    console.print(result_table(result()))
    text = console.file.getvalue()
    assert "2.20x [2.20, 2.20]" in text
    assert "1 (reference)" in text
    assert "1/3" in text and "1/2" in text
    assert "nan" not in text and "…" not in text


def test_remarks_name_what_spoils_a_figure():
    said = " ".join(remarks(result(agree=False)))
    assert "fast: 1 of 2 texts differ from plain's" in said
    assert "counters disagree" in said
    assert "plain: every response was cut at 128 tokens" in said
