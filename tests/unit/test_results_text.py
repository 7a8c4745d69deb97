"""Words of the results page: figures, tables, and no paths of the machine that measured."""

from math import inf, nan

from carryover.bench.statistics import Interval
from carryover.results.cost import Payback
from carryover.results.markdown import narrow, percent, slug, table
from carryover.results.records import paper_table, payback_table, without_folders


def test_gains_are_percents_with_a_sign():
    assert percent(Interval(1.0654, 0.99, 1.2)) == "+6.5% [-1.0, +20.0]"
    assert percent(Interval(0.9)) == "-10.0%" and percent(None) == percent(Interval(nan)) == "–"
    assert narrow("2.40 [2.30, 2.50]") == "2.40<br>[2.30, 2.50]"


def test_tables_keep_their_columns():
    text = table(["a", "b"], [["x|y", "1\n2"]])
    assert text.splitlines() == ["| a | b |", "| --- | ---: |", "| x\\|y | 1 2 |"]
    assert slug("Laboratory target (7M)") == "laboratory-target-7m" and slug("!") == "section"


def test_paths_lose_their_folders():
    assert without_folders("see /srv/a/b/requests.parquet, and ~/x/y.json") == (
        "see requests.parquet, and y.json"
    )
    kept = "T=0: 3/12 texts; 8 requests/s; https://arxiv.org/abs/2609.14717; runs/bench/x"
    assert without_folders(kept) == kept


def test_the_papers_numbers_are_all_there():
    text = paper_table()
    for said in ("4.33", "4.85", "9,402", "+28.8%", "not published", "Qwen/Qwen3-4B, dflash"):
        assert said in text, said


def test_what_never_pays_says_so():
    row = Payback("dflash", 1, 4.0, None, 0.5, Interval(1.02, 0.99, 1.05), Interval(4e8, 2e8, inf))
    text = payback_table([row])
    assert "400.0 million" in text and "200.0 million to never" in text
