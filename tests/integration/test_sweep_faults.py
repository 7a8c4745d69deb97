"""Sweeps whose trials, driver and engine processes are killed; measuring is a stub's."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from carryover.serving.config import ServeConfig
from carryover.tracking import Tracker
from sweeps.measuring import _held

pytestmark = pytest.mark.ray

HERE = Path(__file__).parent
LENGTHS = [1, 2]
LOADS = [1, 8]


def config(**changes):
    return {
        "serve": {
            "arms": [{"name": "plain"}, {"name": "dflash", "drafter": "d"}],
            "resources": {"device": "cpu"},
        },
        "proposal_lengths": LENGTHS,
        "concurrencies": LOADS,
        "prompts": "prompts.jsonl",
        "measure": "sweep_stubs:slow",
        "search": {"kind": "optuna", "num_settings": len(LENGTHS)},
        "resources": {"cpus": 1, "max_concurrent": 1},
        "out": "runs/sweeps/faults",
        **changes,
    }


def start(folder, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "carryover", "sweep", *arguments],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": str(HERE), "COLUMNS": "150"},
    )  # fmt: skip


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_for(condition, what, process=None, timeout_s=480):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := condition():
            return found
        assert process is None or process.poll() is None, process.stdout.read()
        time.sleep(0.05)
    raise AssertionError(f"no {what} within {timeout_s} s")


def below(process):
    return psutil.Process(process.pid).children(recursive=True)


def test_a_killed_trial_and_a_killed_driver_lose_and_repeat_nothing(tmp_path):
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(config()))
    out = tmp_path / "runs/sweeps/faults"
    measured, ends = out / "measurements.jsonl", out / "trials.jsonl"

    first = start(tmp_path, "--config", "sweep.yaml")
    wait_for(lambda: lines(measured), "measurement", first)
    (trial,) = [int(file.name) for file in (out / "pids").iterdir()]
    os.kill(trial, signal.SIGKILL)
    wait_for(lambda: any(e["outcome"] == "done" for e in lines(ends)), "end of a trial", first)
    wait_for(lambda: len(lines(measured)) >= 3, "third measurement", first)
    processes = below(first)
    first.kill()
    first.communicate(timeout=180)
    assert not psutil.wait_procs(processes, timeout=60)[1]
    kept = lines(measured)
    assert 3 <= len(kept) < (len(LENGTHS) + 1) * len(LOADS), "killed in between"
    assert lines(ends)[0]["outcome"] == "died"

    second = start(tmp_path, "--resume", "faults")
    said = second.communicate(timeout=900)[0]
    assert second.returncode == 0, said
    found = lines(measured)
    assert found[: len(kept)] == kept
    parts = [(row["setting"], row["concurrency"]) for row in found]
    names = ["plain", *(f"dflash-{n}" for n in LENGTHS)]
    assert sorted(parts) == sorted((name, load) for name in names for load in LOADS)
    done = [end["setting"] for end in lines(ends) if end["outcome"] == "done"]
    assert sorted(done) == sorted(names)

    client = Tracker(folder=tmp_path).client()
    runs = client.search_runs([client.get_experiment_by_name("sweeps").experiment_id])
    parents = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert [run.info.status for run in parents] == ["FINISHED"]
    whole = [
        run.info.run_name for run in runs if run not in parents and run.info.status == "FINISHED"
    ]
    assert sorted(whole) == sorted(f"{name} T=0 c={load}" for name, load in parts)
    assert not list(out.glob(".tune*")), "Tune's own files are removed"


SERVED = """
import json, sys
from pathlib import Path
from carryover.serving.config import ServeConfig
from sweeps.measuring import served

folder = Path(sys.argv[1])
application = ServeConfig.parse(json.loads((folder / "application.json").read_text()))
with served(application, log=folder / "log", sweep=folder):
    raise SystemExit("it cannot have started yet")
"""


def test_an_engine_goes_with_the_trial_that_started_it_however_that_ends(tmp_path):
    application = ServeConfig.parse(
        {"arms": [{"name": "plain"}], "target": str(tmp_path), "resources": {"device": "cpu"}}
    )
    (tmp_path / "application.json").write_text(application.model_dump_json())
    trial = subprocess.Popen([sys.executable, "-c", SERVED, str(tmp_path)])

    def started():
        found = below(trial)
        return found if any(_runs_host(p) for p in found) else []

    processes = wait_for(started, "engine's process", timeout_s=120)
    trial.kill()
    trial.wait()
    assert not psutil.wait_procs(processes, timeout=60)[1]
    with _held(tmp_path, "cpu") as descriptor:
        assert descriptor


def _runs_host(process):
    try:
        command = process.cmdline()
    except psutil.Error:
        return False
    return "sweeps.host" in command and "carryover.guardian" not in command
