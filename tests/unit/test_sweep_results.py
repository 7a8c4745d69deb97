"""What a sweep's folder keeps, however the sweep ended."""

import pickle
from dataclasses import asdict

import pytest

from carryover.errors import ConfigError
from carryover.tracking import Tracker
from sweeps import decoding
from sweeps.decoding import Recorder, Results, run
from sweeps.settings import Measurement, SweepConfig, settings_of


@pytest.fixture
def config(tmp_path):
    return SweepConfig.parse(
        {
            "serve": {"arms": [{"name": "plain"}], "resources": {"device": "cpu"}},
            "concurrencies": [1, 2],
            "prompts": "owner/dataset",
            "out": str(tmp_path / "sweep"),
        }
    )


def measurement(concurrency, rate=5.0):
    return Measurement("plain", 0.0, concurrency, {"output_tokens_per_s": rate})


def test_measurements_survive_and_a_line_that_a_kill_cut_is_measured_again(config):
    results = Results(config)
    results.add(measurement(1))
    results.add(measurement(2))
    text = results.file.read_text()
    results.file.write_text(text[:-9])
    again = Results(config)
    assert again.measured == [measurement(1)]
    again.add(measurement(2))
    assert Results(config).measured == [measurement(1), measurement(2)]


def test_a_load_that_was_measured_twice_counts_once(config):
    results = Results(config)
    for rate in (1.0, 2.0):
        results.add(measurement(1, rate))
    assert results.measured == [measurement(1, 2.0)]
    assert Results(config).measured == [measurement(1, 2.0)]


def test_another_sweep_does_not_mix_in(config):
    Results(config)
    with pytest.raises(ConfigError, match="other settings"):
        Results(config.model_copy(update={"max_tokens": 7}))


def test_a_finished_sweep_starts_nothing(config):
    results = Results(config.absolute())
    for concurrency in (1, 2):
        results.add(measurement(concurrency))
    assert run(config) == [measurement(1), measurement(2)]


def test_why_an_engine_failed_is_kept(config):
    results = Results(config)
    results.fail(settings_of(config)[0].name, "out of memory")
    assert "out of memory" in results.failures.read_text()


class Trial:
    """What Tune hands to callbacks, as far as they look at it."""

    def __init__(self, setting):
        self.config = {"setting": asdict(setting)}


def test_reports_become_records_lines_of_progress_and_runs(config, tmp_path):
    told = []
    tracker = Tracker(folder=tmp_path)
    trial = Trial(settings_of(config)[0])
    with tracker.run(experiment="sweeps", name="sweep") as parent:
        recorder = Recorder(
            Results(config), config, parent, lambda *news: told.append((*news[:2], news[3]))
        )
        recorder.on_trial_result(0, [], trial, {"measurement": asdict(measurement(1))})
        recorder.on_trial_result(0, [], trial, {"failure": "no memory left"})
        recorder.on_trial_error(0, [], trial)
    assert told == [(1, 2, None), (1, 2, "no memory left")]
    assert Results(config).measured == [measurement(1)]
    client = tracker.client()
    experiment = client.get_experiment_by_name("sweeps").experiment_id
    under = f"tags.`mlflow.parentRunId` = '{parent.id}'"
    children = {
        run.info.run_name: run for run in client.search_runs([experiment], filter_string=under)
    }
    assert {name: run.info.status for name, run in children.items()} == {
        "plain T=0 c=1": "FINISHED",
        "plain": "FAILED",
    }
    assert children["plain T=0 c=1"].data.metrics == {"output_tokens_per_s": 5.0}
    assert children["plain T=0 c=1"].data.params["concurrency"] == "1"


def test_a_trial_whose_process_died_is_recorded_too(config):
    recorder = Recorder(Results(config), config, None, None)
    recorder.on_trial_error(0, [], Trial(settings_of(config)[0]))
    assert "process died" in Results(config).failures.read_text()


def test_tune_can_pickle_the_recorder(config):
    recorder = Recorder(Results(config), config, None, lambda *news: None)
    assert pickle.loads(pickle.dumps(recorder)) is not recorder


def test_a_setting_that_cannot_be_served_tells_why_before_anything_starts(config, monkeypatch):
    reports = []
    monkeypatch.setattr(decoding.tune, "report", reports.append)
    trial = {
        "config": config.model_dump(mode="json"),
        "setting": {"arm": "dflash", "drafter": "absent/drafter", "num_speculative_tokens": 3},
    }
    with pytest.raises(ConfigError):
        decoding.measure(trial)
    (report,) = reports
    assert "absent/drafter" in report["failure"]
    assert "Traceback" not in report["failure"]
