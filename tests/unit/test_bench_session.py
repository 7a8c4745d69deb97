"""A bench from start to end: figures, ends of every kind, resuming, and what makes it invalid."""

import json

import pyarrow.parquet as pq
import pytest
from bench_backends import ARMS, RuleBackend, run_rule_bench

from carryover.bench.records import Condition
from carryover.bench.session import default_block_size
from carryover.bench.workload import in_turns
from carryover.errors import ConfigError, ServingError


@pytest.fixture(autouse=True)
def without_drawing(monkeypatch):
    """Pages are tested elsewhere, and take most of the time."""
    monkeypatch.setattr("carryover.bench.html.write_report", lambda result, path: None)


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the bench may catch it."""


def stop_before(number, error):
    """Raises before the unit of that number, from 0."""
    seen = []

    def check(unit):
        if len(seen) == number:
            raise error
        seen.append(unit)

    return check


def findings(result, severity):
    return [finding.text for finding in result.findings if finding.severity == severity]


def test_three_arms_give_speed_ups_over_the_target_and_gains_over_the_baseline(tmp_path):
    result = run_rule_bench(tmp_path)
    assert result.valid and result.partial is None and result.counters_agree
    assert (result.reference, result.baseline) == ("autoregressive", "baseline")
    assert result.summaries["carryover"].acceptance_length.value == 4.0
    assert result.summaries["baseline"].acceptance_length.value == 3.0
    assert result.comparisons["carryover"].speedup.value == pytest.approx(2.4)
    cell = result.cells[0]
    assert set(cell.gains) == {"carryover"}
    assert cell.gains["carryover"].acceptance_ratio.value == pytest.approx(4 / 3)
    metrics = cell.metrics("carryover")
    assert metrics["gain.speedup"] == pytest.approx(1.2)
    assert metrics["set.chat.gain.acceptance_ratio"] == pytest.approx(4 / 3)
    assert result.counters["carryover"]["num_drafts"] == 96


def test_arms_that_are_equal_are_told_in_every_condition(tmp_path):
    def told(arms):
        conditions = [Condition("offline"), Condition("offline", 1.0)]
        result = run_rule_bench(tmp_path, arms=arms, conditions=conditions)
        return [text for text in findings(result, "note") if "the same arm twice" in text]

    assert told(ARMS) == []
    twice = told({**ARMS, "carryover": ARMS["baseline"]})
    assert [text.split(":")[0] for text in twice] == ["T=0", "T=1"]
    assert all("baseline and carryover" in text and "+20.0%" in text for text in twice)


@pytest.mark.parametrize("units_before", [0, 1, 2, 3, 5, 8])
def test_a_killed_bench_goes_on_where_it_was(tmp_path, units_before):
    with pytest.raises(Killed):
        run_rule_bench(tmp_path, RuleBackend(stop_at=stop_before(units_before, Killed())))
    (folder,) = tmp_path.iterdir()
    # the kill came while a line was being written
    with (folder / "units.jsonl").open("a") as file:
        file.write('{"key": "T=0 c=1 blo')
    backend = RuleBackend()
    resumed = run_rule_bench(tmp_path, backend, resume=folder)
    whole = run_rule_bench(tmp_path)
    assert len(backend.sent) == 9 - units_before
    assert resumed.folder == folder and resumed.partial is None
    assert resumed.cells[0].metrics("carryover") == whole.cells[0].metrics("carryover")
    assert pq.read_metadata(folder / "requests.parquet").num_rows == 36


def test_a_bench_is_resumed_only_on_what_it_measured(tmp_path):
    result = run_rule_bench(tmp_path)
    with pytest.raises(ConfigError, match="arms changed"):
        run_rule_bench(tmp_path, resume=result.folder, arms={**ARMS, "more": ARMS["baseline"]})
    with pytest.raises(ConfigError, match="prompts_sha256 changed"):
        run_rule_bench(tmp_path, resume=result.folder, count=11)
    with pytest.raises(ConfigError, match="holds no bench"):
        run_rule_bench(tmp_path, resume=tmp_path)


def test_ctrl_c_leaves_what_is_finished_marked_partial(tmp_path):
    partial = []
    with pytest.raises(KeyboardInterrupt):
        run_rule_bench(
            tmp_path, RuleBackend(stop_at=stop_before(4, KeyboardInterrupt())),
            on_partial=partial.append,
        )  # fmt: skip
    (result,) = partial
    assert result.partial == "interrupted" and not result.cells[0].ties
    # one block of four prompts was finished on all three arms; the fourth unit is of no use
    assert len(result.requests) == 12
    assert pq.read_metadata(result.folder / "requests.parquet").num_rows == 12


def test_ctrl_c_before_anything_is_finished_leaves_no_figures(tmp_path):
    partial = []
    with pytest.raises(KeyboardInterrupt):
        run_rule_bench(
            tmp_path, RuleBackend(stop_at=stop_before(1, KeyboardInterrupt())),
            on_partial=partial.append,
        )  # fmt: skip
    # one unit is kept for resuming, and one arm of three gives no comparison
    (result,) = partial
    assert result.cells == [] and not (result.folder / "report.html").exists()
    resumed = run_rule_bench(tmp_path, resume=result.folder)
    assert len(resumed.requests) == 36


def test_an_arm_that_dies_ends_the_bench_with_a_clear_error(tmp_path):
    backend, partial = RuleBackend(), []

    def die(unit):
        if len(backend.sent) == 5:
            backend.dead.add(unit.arm)

    backend.stop_at = die
    with pytest.raises(ServingError, match=r"stopped answering: nobody there\n(.|\n)*--resume"):
        run_rule_bench(tmp_path, backend, on_partial=partial.append)
    assert "stopped answering" in partial[0].partial
    resumed = run_rule_bench(tmp_path, resume=partial[0].folder)
    assert resumed.partial is None and len(resumed.requests) == 36


def test_failures_are_counted_and_too_many_end_the_run_at_once(tmp_path):
    backend = RuleBackend(fail=lambda arm, prompt: arm == "baseline" and prompt.id == 3)
    said = r"1 of the 12 requests .* failed already(.|\n)*--resume"
    with pytest.raises(ServingError, match=said):
        run_rule_bench(tmp_path, backend)
    last = backend.sent[-1]
    assert last.arm == "baseline" and 3 in [prompt.id for prompt in last.prompts]
    assert len(backend.sent) < 9
    allowed = RuleBackend(fail=backend.fail)
    result = run_rule_bench(tmp_path, allowed, max_failure_share=0.5)
    assert len(allowed.sent) >= 9
    assert result.summaries["baseline"].failed == 1
    assert result.comparisons["baseline"].prompts == 11
    assert any("1 of 12 requests failed" in text for text in findings(result, "note"))


def test_failures_of_a_bench_that_went_on_still_fail_it_at_its_end(tmp_path):
    """Resuming with fewer failures allowed finds nothing left to measure."""
    backend = RuleBackend(fail=lambda arm, prompt: arm == "baseline" and prompt.id == 3)
    finished = run_rule_bench(tmp_path, backend, max_failure_share=0.5)
    with pytest.raises(ServingError, match="1 of 12 requests failed, more than the 2% allowed"):
        run_rule_bench(tmp_path, resume=finished.folder)


def test_counters_that_disagree_make_the_run_invalid(tmp_path):
    result = run_rule_bench(tmp_path, RuleBackend(miscount=1.0))
    assert result.counters_agree is False and not result.valid
    assert any("counters and the responses disagree" in t for t in findings(result, "invalid"))


@pytest.mark.parametrize(("gap", "near"), [(0.001, 2), (0.5, 0)])
def test_texts_that_differ_are_counted_and_explained(tmp_path, gap, near):
    texts = {("carryover", 1): "other", ("carryover", 2): "other", ("baseline", 2): "third"}
    result = run_rule_bench(tmp_path, RuleBackend(texts=texts, gap=gap))
    cell = result.cells[0]
    assert cell.comparisons["carryover"].differing == 2
    assert cell.ties["carryover"].near == near and cell.ties["carryover"].wide == 2 - near
    assert cell.ties["baseline"].near + cell.ties["baseline"].wide == 1
    assert cell.metrics("carryover")["near_ties"] == near
    assert any("2 of 12 texts differ" in text for text in findings(result, "note"))


def test_sampled_texts_are_not_compared(tmp_path):
    texts = {("carryover", 1): "other"}
    warm = [Condition("offline", temperature=1.0)]
    result = run_rule_bench(tmp_path, RuleBackend(texts=texts), conditions=warm)
    assert result.comparisons["carryover"].differing is None and not result.cells[0].ties


def test_conditions_are_measured_on_the_same_prompts_and_kept_apart(tmp_path):
    both = [Condition("offline"), Condition("offline", temperature=1.0)]
    result = run_rule_bench(tmp_path, conditions=both)
    assert [cell.condition for cell in result.cells] == both
    assert all(cell.summaries["carryover"].requests == 12 for cell in result.cells)
    with pytest.raises(ValueError, match="2 conditions"):
        assert result.summaries


class Slow(RuleBackend):
    """Takes two seconds a prompt by a clock of its own."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.now = 0.0
        monkeypatch.setattr("carryover.bench.measure.time.monotonic", lambda: self.now)
        monkeypatch.setattr("carryover.bench.session.monotonic", lambda: self.now)

    def send(self, unit, advance):
        answers = super().send(unit, advance)
        self.now += 2.0 * len(unit.prompts)
        return answers.__class__(answers.responses, 2.0 * len(unit.prompts), answers.counted)


def test_a_budget_takes_a_balanced_subset_and_says_so(tmp_path, monkeypatch):
    backend = Slow(monkeypatch)
    # the trial takes 12 s; three arms take 6 s a prompt
    result = run_rule_bench(tmp_path, backend, budget_s=60, block_size=2)
    assert result.budget["prompts"] == 8 and result.budget["of_prompts"] == 12
    taken = [r for r in result.requests if r.arm == "carryover"]
    assert sorted(r.category for r in taken) == ["chat"] * 4 + ["code"] * 4
    assert backend.now <= 60 + 12


def test_a_budget_that_was_guessed_too_large_stops_between_blocks(tmp_path, monkeypatch):
    backend = Slow(monkeypatch)

    def slower(unit):
        backend.now += 10.0 if unit.block >= 0 else 0.0

    backend.stop_at = slower
    result = run_rule_bench(tmp_path, backend, budget_s=60, block_size=2)
    assert "time budget ended before block 3 of 4" in result.partial
    assert {r.arm for r in result.requests} == set(ARMS)
    assert len(result.requests) == 12


def test_a_budget_never_ends_while_a_block_is_finished_on_some_arms_alone(tmp_path, monkeypatch):
    class Turns(Slow):
        def order(self, plan):
            return in_turns(plan, turns=1)

    backend = Turns(monkeypatch)

    def slower(unit):
        backend.now += 30.0 if unit.block >= 0 else 0.0

    backend.stop_at = slower
    result = run_rule_bench(tmp_path, backend, budget_s=60, block_size=2)
    assert result.partial is None and len(result.requests) == 3 * 8


def test_blocks_are_long_enough_for_their_load():
    assert default_block_size([Condition()]) == 8
    assert default_block_size([Condition(concurrency=1), Condition(concurrency=32)]) == 128
    assert default_block_size([Condition(concurrency=None, rate=2.5)]) == 50


def test_a_budget_that_fits_nothing_is_refused_with_its_reason(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="does not fit one prompt of each of the 2 categories"):
        run_rule_bench(tmp_path, Slow(monkeypatch), budget_s=15)


def test_the_record_of_the_start_names_code_machine_and_workload(tmp_path):
    folder = run_rule_bench(tmp_path).folder
    start = json.loads((folder / "bench.json").read_text())
    assert start["provenance"]["packages"]["carryover"]
    assert start["prompts"] == {"chat": 6, "code": 6}
    assert len(start["config_sha256"]) == 64
    assert start["machine"]["cores"] >= 1 and "load_1_min" in start["machine"]
