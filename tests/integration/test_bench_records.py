"""A bench in a real MLflow store, and the comparison rebuilt from it alone."""

import io
import shutil

import pytest
from bench_backends import RuleBackend, run_rule_bench
from rich.console import Console

from carryover.bench.compare import (
    comparison_remarks,
    comparison_tables,
    markdown_figures,
    read_runs,
)
from carryover.bench.records import Condition
from carryover.errors import ConfigError
from carryover.tracking import Tracker

CONDITIONS = [Condition("offline", 0.0), Condition("offline", 1.0)]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store with a bench and another whose counters contradict it, cut short, then resumed."""
    folder = tmp_path_factory.mktemp("records")
    tracker = Tracker(folder=folder)
    first = run_rule_bench(folder / "a", conditions=CONDITIONS, tracker=tracker)
    calls = []

    def interrupt(unit):
        calls.append(unit)
        if len(calls) == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_rule_bench(
            folder / "b", RuleBackend(stop_at=interrupt), conditions=CONDITIONS, tracker=tracker,
            max_tokens=64,
        )  # fmt: skip
    (cut,) = (folder / "b").iterdir()
    return tracker, first, cut


def children(tracker, run_id):
    experiment = tracker.client().get_experiment_by_name("bench").experiment_id
    return tracker.client().search_runs(
        [experiment], filter_string=f"tags.mlflow.parentRunId = '{run_id}'"
    )


def test_parent_and_children_hold_figures_workload_and_provenance(store):
    tracker, first, _ = store
    parent = tracker.client().get_run(first.run_id)
    assert parent.info.status == "FINISHED"
    assert parent.data.tags["carryover.baseline"] == "baseline"
    assert parent.data.tags["carryover.valid"] == "true"
    assert parent.data.tags["mlflow.source.git.commit"]
    (data,) = parent.inputs.dataset_inputs
    assert data.dataset.name == "some.jsonl" and '"chat": 6' in data.dataset.profile
    names = {f.path for f in tracker.client().list_artifacts(first.run_id)}
    assert {"report.html", "requests.parquet", "requests.csv", "findings.json"} <= names
    assert any(name.endswith(".png") for name in names)
    found = children(tracker, first.run_id)
    assert len(found) == 3 * len(CONDITIONS)
    # texts are compared at temperature 0 alone
    greedy_only = {"differing_texts", "gain.differing_texts"}
    keys = [
        set(child.data.metrics) - greedy_only for child in found
        if child.data.params["arm"] == "carryover"
    ]  # fmt: skip
    assert keys[0] == keys[1]
    assert all(child.inputs.dataset_inputs for child in found)


def test_a_comparison_needs_nothing_but_the_store(store, tmp_path):
    tracker, first, cut = store
    kept = first.folder.rename(tmp_path / "moved")
    try:
        recorded = read_runs(tracker, [first.run_id, str(cut)])
    finally:
        kept.rename(first.folder)
    console = Console(file=io.StringIO(), width=200)
    for table in comparison_tables(recorded):
        console.print(table)
    text = console.file.getvalue()
    for expected in ("2.40x [2.40, 2.40]", "4.00 [4.00, 4.00]", "20.0% [20.0, 20.0]", "macro"):
        assert expected in text, expected
    again = next(r for r in recorded if r.arm == "carryover" and r.condition == CONDITIONS[1])
    cell = first.cells[1]
    assert dict(again.metrics) == pytest.approx(cell.metrics("carryover"))
    said = " ".join(comparison_remarks(recorded))
    assert "differ in max_tokens: 128 in 1; 64 in 2" in said
    assert "run 2 is PARTIAL: interrupted" in said


def test_a_resumed_bench_goes_on_in_the_same_run_with_new_figures(store):
    tracker, _, cut = store
    resumed = run_rule_bench(
        cut.parent, conditions=CONDITIONS, tracker=tracker, max_tokens=64, resume=cut
    )
    parent = tracker.client().get_run(resumed.run_id)
    assert parent.info.status == "FINISHED" and parent.data.tags["carryover.partial"] == ""
    recorded = read_runs(tracker, [resumed.run_id])
    # the children of the interrupted process hold fewer requests
    assert len(recorded) == 6 and all(r.metrics["requests"] == 12 for r in recorded)


def test_what_is_no_bench_is_refused(store):
    tracker, _, _ = store
    with pytest.raises(ConfigError, match="no run 'ffff' in"):
        read_runs(tracker, ["ffff"])
    with tracker.run(experiment="other", name="training") as run:
        pass
    with pytest.raises(ConfigError, match="is no bench, but 'training'"):
        read_runs(tracker, [run.id])
    folder = run_rule_bench(tracker_folder(tracker), conditions=CONDITIONS[:1]).folder
    with pytest.raises(ConfigError, match="was not recorded in MLflow"):
        read_runs(tracker, [str(folder)])
    shutil.rmtree(folder)


def tracker_folder(tracker):
    from carryover.stores import database_file

    return database_file(tracker.uri).parent / "unrecorded"


def test_figures_for_a_model_card_are_plain_markdown(store):
    tracker, first, _ = store
    text = markdown_figures(read_runs(tracker, [first.run_id]))
    rows = [line for line in text.splitlines() if line.startswith("| offline")]
    assert len(rows) == 3 * len(CONDITIONS)
    assert all(line.count("|") == 6 for line in rows)
    for mark in ("[dim]", "[/]", "\\["):
        assert mark not in text
    assert any("x [" in line for line in rows), "speed-ups have intervals"
