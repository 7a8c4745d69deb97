"""What a sweep's folder keeps, however the sweep ended."""

import pytest

from carryover.errors import ConfigError
from sweeps.decoding import Results, run
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
