"""What of an experiment goes to MLflow."""

import asyncio

import pytest
from traffic_scenes import Clock, Replica, controller, requests

from carryover.serving import experiment_record
from carryover.serving.experiment_record import ExperimentRecorder, has_results, numbers, verdicts
from carryover.serving.views import without_nan


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Reports before any request, after some of one arm, and after ten minutes of both arms'."""
    clock = Clock()

    async def scene():
        owner = controller(
            tmp_path_factory.mktemp("state"), clock, weights={"baseline": 50, "carryover": 50}
        )
        replica, found = Replica(owner), []
        await replica.call()
        weights = replica.traffic.weights
        for arms, times in ((), 1), (("baseline",), 1), (("baseline", "carryover"), 60):
            for _ in range(times):
                for arm in arms:
                    await replica.call(requests(clock, arm, 10, weights=weights))
                clock.pass_(10)
            found.append(await owner.admin("report", {}, "k"))
        owner.close()
        return found

    return asyncio.run(scene())


def test_there_is_something_to_record_once_two_arms_had_requests(reports):
    assert [has_results(report) for report in reports] == [False, False, True]


def test_numbers_are_finite_and_named_by_arm(reports):
    for report in reports:
        found = numbers(report)
        assert all(isinstance(value, int | float) for value in found.values())
        assert without_nan(found) == found
    assert found["carryover.requests"] == 600
    assert found["carryover.acceptance_length"] > 1
    assert "carryover.error_rate.estimate" in found
    assert "carryover.acceptance_length.relative_low" in found
    assert not [name for name in found if name.startswith("carryover.error_rate.relative")]


def test_every_metric_has_a_verdict(reports):
    assert set(verdicts(reports[-1])) == {
        f"verdict.carryover.{metric}"
        for metric in ("acceptance_length", "tpot_s", "ttft_s", "e2e_s", "error_rate")
    }


class Run:
    """Stands for MLflow's run; the real one is in the integration test."""

    id = "run-1"

    def __init__(self):
        self.files, self.params = {}, None

    def log_params(self, params):
        self.params = params

    def log_metrics(self, metrics, step):
        self.step = step

    def set_tags(self, tags):
        self.tags = tags

    def log_dict(self, value, name):
        self.files[name] = value

    def log_text(self, text, name):
        self.files[name] = text


class Store:
    """Stands for the tracker: counts runs that are begun and ended."""

    def __init__(self):
        self.run_ids, self.made, self.ended = [], Run(), 0

    def run(self, *, experiment, name, run_id):
        self.run_ids.append(run_id)
        return self

    def __enter__(self):
        return self.made

    def __exit__(self, *_):
        self.ended += 1


def test_one_run_from_the_first_comparison_to_the_end(reports, tmp_path, monkeypatch):
    monkeypatch.setattr(experiment_record, "_page", lambda report: f"of {report['experiment']}")
    recorder, store = ExperimentRecorder(f"sqlite:///{tmp_path}/x.db"), Store()
    recorder._tracker = store
    assert recorder.record(reports[0], None, False) is None
    assert store.run_ids == []
    assert recorder.record(reports[2], None, False) == "run-1"
    assert recorder.record(reports[2], "run-1", False) == "run-1"
    assert (store.run_ids, store.ended) == ([None], 0)
    assert store.made.params["arms"] == ["baseline", "carryover"]
    assert store.made.step == 620
    assert "report.html" not in store.made.files
    # another process goes on with the same run, and ends it
    other = ExperimentRecorder(f"sqlite:///{tmp_path}/x.db")
    other._tracker = store
    store.made.params = None
    assert other.record(reports[2], "run-1", True) == "run-1"
    assert (store.run_ids, store.ended) == ([None, "run-1"], 1)
    # settings were recorded at the beginning
    assert store.made.params is None
    assert store.made.files["report.html"] == "of may"
    recorder.close()
    assert store.ended == 2


def test_a_page_that_cannot_be_drawn_leaves_no_open_run(reports, tmp_path, monkeypatch):
    def broken(report):
        raise RuntimeError("no fonts")

    monkeypatch.setattr(experiment_record, "_page", broken)
    recorder, store = ExperimentRecorder(f"sqlite:///{tmp_path}/x.db"), Store()
    recorder._tracker = store
    with pytest.raises(RuntimeError, match="no fonts"):
        recorder.record(reports[2], None, True)
    assert store.ended == 1
    assert "comparisons.json" in store.made.files
