"""The tables show every figure, and remarks say what must be known beside them."""

import io

from bench_backends import ACCEPTED, ARMS, SPEED, RuleBackend, run_rule_bench
from rich.console import Console

from carryover.bench.records import Condition
from carryover.bench.report import remarks, result_tables, set_counts, settings_line


def shown(result, width=160):
    console = Console(file=io.StringIO(), width=width)
    for table in result_tables(result):
        console.print(table)
    return console.file.getvalue()


def test_tables_show_figures_with_intervals_by_arm_and_by_set(tmp_path):
    text = shown(run_rule_bench(tmp_path))
    for expected in (
        "2.40x [2.40, 2.40]", "1 (reference)", "1 (baseline)", "+20.0% [+20.0, +20.0]",
        "4.00 [4.00, 4.00]", "micro average", "macro average", "batch 1, temperature 0", "0/12",
    ):  # fmt: skip
        assert expected in text, expected
    assert "nan" not in text and "…" not in text and "INVALID" not in text


def test_one_column_of_an_arm_fits_a_narrow_terminal(tmp_path):
    text = shown(run_rule_bench(tmp_path), width=80)
    assert "…" not in text and "nan" not in text


def test_many_arms_stand_below_each_other(tmp_path, monkeypatch):
    names = [f"markov-carryover-{seed}" for seed in range(8)]
    for name in names:
        monkeypatch.setitem(SPEED, name, 1.1)
        monkeypatch.setitem(ACCEPTED, name, 2)
    arms = {"autoregressive": ARMS["autoregressive"]} | dict.fromkeys(names, ARMS["carryover"])
    result = run_rule_bench(tmp_path, arms=arms)
    assert len(result_tables(result)) == 3 + 3
    assert "…" not in shown(result, width=80)
    wide = shown(result)
    # a column among the arms; acceptance and speed-up among the sets
    assert all(wide.count(name) == 3 for name in names)


def test_failures_differing_texts_and_every_condition_are_shown(tmp_path):
    backend = RuleBackend(
        fail=lambda arm, prompt: arm == "baseline" and prompt.id == 3,
        texts={("carryover", 1): "other"},
    )
    conditions = [Condition("offline"), Condition("offline", temperature=1.0)]
    result = run_rule_bench(tmp_path, backend, conditions=conditions, max_failure_share=0.5)
    text = shown(result)
    assert "1/12" in text and "1/1" in text and "temperature 1" in text
    assert text.count("temperature") == 2


def test_remarks_put_the_gravest_first(tmp_path):
    result = run_rule_bench(
        tmp_path, RuleBackend(miscount=2.0, texts={("carryover", 1): "other"}), budget_s="10m"
    )
    said = remarks(result)
    assert said[0].startswith("INVALID: ") and "counters" in said[0]
    together = " ".join(said)
    assert "carryover: 1 of 12 texts differ from autoregressive's" in together
    assert "1 near-ties" in together
    assert "the budget of 600 s takes 12 of 12 prompts" in together
    assert "INVALID" in shown(result)


def test_what_the_arms_share_and_what_they_were_asked_is_printed(tmp_path):
    result = run_rule_bench(tmp_path)
    assert '"max_model_len": 256' in settings_line(result) and "3 arms" in settings_line(result)
    assert set_counts(result) == "some.jsonl: 12 prompts (chat 6, code 6)"


def test_the_page_holds_figures_tables_and_what_spoils_them(tmp_path):
    backend = RuleBackend(miscount=1.0, texts={("carryover", 1): "other"})
    conditions = [Condition("online", t, c) for t in (0.0, 1.0) for c in (1, 4)]
    result = run_rule_bench(
        tmp_path, backend, conditions=conditions, goodput={"ttft_ms": 500}, num_prompts=8
    )
    page = (result.folder / "report.html").read_text()
    titles = (
        "Acceptance length by set, T=1 c=1", "Gain over baseline by set, T=0 c=1",
        "Acceptance by position, T=0 c=1", "Throughput over concurrency, T=0",
        "Latency percentiles, T=1 c=1",
    )  # fmt: skip
    for title in (*titles, "invalid", "micro average", "macro average", "TTFT &lt;= 500 ms"):
        assert title in page, title
    assert "The paper&#39;s numbers are not shown beside these" in page
    assert page.count("<svg") == len(list(result.folder.glob("*.png"))) == 10
    assert "http://" not in page.replace("http://www.w3.org", "") and "<script" not in page


def test_a_bench_without_sets_or_speculation_has_a_page_too(tmp_path):
    plain = {"a": {"drafter": None}, "b": {"drafter": None}}
    SPEED.update(a=1.0, b=2.0)
    result = run_rule_bench(tmp_path, arms=plain, count=2, num_prompts=1)
    page = (result.folder / "report.html").read_text()
    assert "Latency percentiles" in page and "Acceptance by position" not in page
    assert result.baseline is None and result.reference == "a"
