"""Forecasts from measured parts, and what `platform sweep plan` prints."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from carryover.durable import append_line
from carryover.errors import ConfigError
from sweeps.durations import parse_duration, show_duration
from sweeps.ledger import TrialEnd
from sweeps.loading import open_ledger
from sweeps.plan import Parts, forecast, makespan, measured_parts
from sweeps.plan_display import missing_of
from sweeps.settings import Load, Measurement, SweepConfig, settings_of


def make(folder, **changes):
    values = {
        "serve": {
            "arms": [{"name": "plain"}, {"name": "dflash", "drafter": "d/a"}],
            "resources": {"device": "cpu"},
        },
        "proposal_lengths": [2, 4],
        "concurrencies": [1, 16],
        "prompts": "owner/dataset",
        "num_prompts": 10,
        "max_tokens": 100,
        "out": str(folder / "sweep"),
    }
    return SweepConfig.parse({**values, **changes})


def measure(config, *, settings=2, start_s=30.0):
    """A ledger in which the first settings are measured: 2 s a request alone, 0.5 s among 16."""
    config = config.absolute()
    ledger = open_ledger(config)
    (config.out / "sweep.yaml").write_text(config.to_yaml())
    for setting in settings_of(config)[:settings]:
        wall_s = start_s + 1.0
        for load in config.loads():
            measured_s = 10 * (2.0 if load.concurrency == 1 else 0.5)
            figures = {"requests": 10, "measured_s": measured_s, "output_tokens_per_s": 50.0}
            row = Measurement(setting.name, load, figures, measured_s + 3.0, 5000)
            ledger.add(row.row())
            wall_s += row.wall_s
        ledger.end(TrialEnd(setting.name, "done", "", 1, start_s, wall_s, 0.0))
    append_line(ledger.folder / "runs.jsonl", {"trials": settings, "overhead_s": 4.0})
    return ledger


def test_parts_are_medians_of_what_was_measured(tmp_path):
    config = make(tmp_path)
    parts = measured_parts(config, measure(config))
    assert parts.request_s == {1: 2.0, 16: 0.5}
    assert (parts.start_s, parts.load_s, parts.overhead_s) == (30.0, 3.0, 4.0)
    assert parts.end_s == pytest.approx(1.0)
    assert parts.request_bytes == 500
    assert (parts.num_trials, parts.num_loads) == (2, 4)
    assert measured_parts(config, open_ledger(make(tmp_path / "other"))) is None


def test_a_load_takes_its_requests_and_its_warm_up():
    parts = Parts(30, 1, {1: 2.0, 16: 0.5}, 3.0, 4.0, 500, 300, None, 100, 2, 4)
    assert parts.load_seconds(1, requests=10, max_tokens=100) == 23.0
    assert parts.load_seconds(4, requests=10, max_tokens=100) == 3 + 10 * 1.25
    assert parts.load_seconds(64, requests=10, max_tokens=200) == 3 + 10 * 2 * 0.5
    assert parts.unmeasured([1, 4, 64, 32]) == [32, 64]


def test_trials_are_spread_over_slots_in_order():
    assert makespan([3, 1, 1, 1], 2) == 3
    assert makespan([1, 1, 1, 3], 2) == 4
    assert makespan([], 3) == 0
    assert makespan([1.0] * 10_000, 64) == 157


def test_a_forecast_adds_up(tmp_path):
    config = make(tmp_path)
    parts = measured_parts(config, measure(config))
    missing = [(setting, config.loads()) for setting in settings_of(config)]
    found = forecast(config, missing, parts, slots=1, num_prompts=10)
    assert found.trial_s == pytest.approx(30 + (3 + 20) + (3 + 5) + 1)
    assert found.wall_s == pytest.approx(3 * (62 + 4))
    assert found.busy_s == pytest.approx(3 * 62)
    assert found.stored_bytes["requests"] == 6 * 10 * 500
    assert forecast(config, missing, parts, slots=3, num_prompts=10).wall_s == pytest.approx(66)


def test_only_what_is_missing_is_planned(tmp_path):
    config = make(tmp_path, concurrencies=[1, 16])
    ledger = measure(config, settings=1)
    ledger.end(TrialEnd("dflash-2", "failed", "no memory"))
    more = make(tmp_path, concurrencies=[1, 16, 4])
    found = {setting.name: loads for setting, loads in missing_of(more, ledger)}
    assert found == {"plain": [Load(0.0, 4)], "dflash-4": more.loads()}


def platform(*arguments):
    from carryover.cli import app

    result = CliRunner().invoke(app, ["sweep", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_the_command_says_how_long_and_how_much(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    measure(make(tmp_path), settings=3)
    big = make(tmp_path / "big", engine={"max_num_seqs": list(range(8, 108))})
    (tmp_path / "big.yaml").write_text(big.to_yaml())
    said = platform("plan", "-c", "big.yaml")
    assert "300 engines, 600 measurements" in said and "nothing like it was measured" in said
    said = platform(
        "plan", "-c", "big.yaml", "--measured", tmp_path / "sweep", "--gpus", 10, "--gpu-hour", 2
    )
    assert "time: 33 min on 10 GPUs or machines" in said
    assert "cost: 11 at 2 an hour" in said
    assert "engine start" in said and "storage: 3." in said
    assert not (tmp_path / "big").exists(), "looking at a plan begins no sweep"


def test_a_plan_cannot_be_made_from_nothing(tmp_path):
    config = make(tmp_path).absolute()
    open_ledger(config)
    (config.out / "sweep.yaml").write_text(config.to_yaml())
    (tmp_path / "s.yaml").write_text(make(tmp_path / "b").to_yaml())
    with pytest.raises(ConfigError, match="has measured no engine"):
        platform("plan", "-c", tmp_path / "s.yaml", "--measured", config.out)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--config"),
        (["plan"], "--config"),
        (["--resume", "nothing"], "runs/sweeps holds none"),
        (["-c", "s.yaml", "--resume", "x"], "or an earlier sweep"),
        (["-c", "s.yaml", "--budget", "soon", "--dry-run"], "30m"),
    ],
)
def test_mistakes_say_what_to_give(tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(make(tmp_path).to_yaml())
    with pytest.raises(ConfigError, match=said):
        platform(*arguments)


def test_a_sweep_can_be_moved_and_reported_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = make(tmp_path)
    measure(config, settings=3)
    moved = tmp_path / "runs/sweeps/moved"
    moved.parent.mkdir(parents=True)
    config.out.rename(moved)
    said = platform("report", "moved")
    assert f"page: {moved / 'report.html'}" in said and "over all loads" in said
    assert (moved / "serve.yaml").exists() and not config.out.exists()
    resolved = yaml.safe_load(platform("--resume", "moved", "--dry-run"))
    assert resolved["out"] == "runs/sweeps/moved"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("1h30m", 5400), ("1.5h", 5400), ("1d", 86400)],
)
def test_durations_are_read(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "m", "1h 30", "-5m", "0s", "10 minutes"])
def test_other_durations_are_refused(text):
    with pytest.raises(ConfigError, match="1h30m"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(45, "45 s"), (720, "12 min"), (12_000, "3 h 20 min"), (187_200, "2 d 4 h")],
)
def test_durations_are_shown(seconds, text):
    assert show_duration(seconds) == text


def test_the_plan_of_a_training_sweep_lists_it(repository):
    said = platform("plan", "-c", repository / "sweeps/configs/training_embedded.yaml")
    assert "12 of 12 trainings" in said and "carried.mark projector" in said
