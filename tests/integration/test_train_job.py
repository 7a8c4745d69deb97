"""`platform train` as users run it: through Ray Train, stopped, killed, continued, recorded."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
import yaml
from training_runs import SETTINGS, make_run, merged, train

from carryover.drafters import checkpoint
from carryover.errors import ConfigError, DataError, EnvironmentProblem
from carryover.targets import resolve
from carryover.testing import tiny_target
from carryover.tracking import Tracker
from carryover.training.config import TrainConfig
from jobs.train import train as run_job

pytestmark = pytest.mark.ray

STEPS = 60
CHANGES = {
    "max_steps": STEPS,
    "evaluation": {"every_steps": 20},
    "checkpoints": {"every_steps": 5},
    "verify_first": False,
    "resources": {"max_restarts": 0},
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory, tiny_llama):
    """The same run without Ray and without interruption: run folder and losses."""
    assignment = make_run(tmp_path_factory.mktemp("reference") / "whole", tiny_llama, **CHANGES)
    _, reporter = train(assignment)
    return assignment, reporter


def write_config(folder, reference, **changes):
    assignment, _ = reference
    settings = {"name": "run", "target": assignment.target.path, "data": str(assignment.data)}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(merged(merged(SETTINGS, CHANGES), settings | changes)))
    return path


def command(folder, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "carryover", "train", "baseline", "-c", "config.yaml", *arguments],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def wait_for_step(folder, step, process):
    """Wait until a checkpoint of this step, or a later one, is there."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        found = sorted((folder / "runs/train/run/checkpoints").glob("step-*"))
        if found and int(found[-1].name[-8:]) >= step:
            return
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.05)
    raise AssertionError("no checkpoint within 300 s")


def newest(folder):
    return max(int(p.name[-8:]) for p in (folder / "runs/train/run/checkpoints").glob("step-*"))


def test_a_run_survives_ctrl_c_and_kill_and_continues_as_one_mlflow_run(
    tmp_path, monkeypatch, reference
):
    _, expected = reference
    write_config(tmp_path, reference)

    first = command(tmp_path)
    wait_for_step(tmp_path, 5, first)
    first.send_signal(signal.SIGINT)
    said = first.communicate(timeout=360)[0]
    assert first.returncode == 130, said
    assert "with a checkpoint" in said and "Traceback" not in said
    stopped_at = newest(tmp_path)
    assert 5 <= stopped_at < STEPS
    assert f"is the drafter after step {stopped_at}. The same command continues" in said, said

    second = command(tmp_path)
    wait_for_step(tmp_path, stopped_at + 10, second)
    second.kill()
    said = second.communicate(timeout=360)[0]
    assert f"from step {stopped_at} of {STEPS}" in said
    killed_at = newest(tmp_path)
    assert killed_at < STEPS

    third = command(tmp_path)
    said = third.communicate(timeout=900)[0]
    assert third.returncode == 0, said
    assert f"from step {killed_at} of {STEPS}" in said
    assert "best checkpoint" in said and "platform checkpoint verify" in said

    runs = Tracker(folder=tmp_path)._connect().search_runs(["1"])
    assert len(runs) == 1 and runs[0].info.status == "FINISHED"
    client = Tracker(folder=tmp_path)._connect()
    history = client.get_metric_history(runs[0].info.run_id, "train/loss")
    losses = {metric.step: metric.value for metric in history}
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert [losses[step] for step in sorted(losses)] == pytest.approx(expected.losses(), rel=1e-5)
    logged = runs[0].data.metrics
    assert {
        "train/lr", "train/tokens_per_s", "train/loss/position_1", "time/states_s",
        "time/backward_s", "eval/acceptance_length", "eval/accepted/position_1",
        "summary/best/acceptance_length",
    } <= logged.keys()  # fmt: skip
    assert runs[0].data.params["optimizer.lr"] == "0.003"

    kept = TrainConfig.load(tmp_path / "runs/train/run/config.yaml")
    assert (kept.max_steps, kept.optimizer.lr) == (STEPS, 3e-3)

    monkeypatch.chdir(tmp_path)
    config = TrainConfig.load("config.yaml")
    view = Lines()
    assert run_job(config, view=view).reused
    assert any("is finished" in line and "reusing it" in line for line in view.lines)
    changed = TrainConfig.load("config.yaml", overrides=["optimizer.lr=0.004", "epochs=99"])
    with pytest.raises(ConfigError) as refused:
        run_job(changed, view=Lines())
    assert "settings.optimizer.lr: 0.003 before, 0.004 now" in str(refused.value)
    assert "settings.epochs: 100.0 before, 99.0 now" in str(refused.value)
    assert "--restart" in str(refused.value)


class Lines:
    """A view that keeps its lines; see `jobs.train_view.View`."""

    def __new__(cls):
        from jobs.train_view import View

        class Kept(View):
            def __init__(self):
                super().__init__()
                self.lines = []

            def line(self, text):
                self.lines.append(text)

        return Kept()


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("ray_cluster")
class TestInOneCluster:
    """Jobs in this process, which share one Ray cluster of two cores."""

    def test_two_workers_and_a_lost_one(self, here, reference):
        """A worker that is killed is started again, and the curve is the one without a loss."""
        _, expected = reference
        changes = {"num_workers": 2, "max_restarts": 1}
        config = TrainConfig.load(write_config(here, reference, resources=changes))
        view = Lines()
        killed = []
        plain = view.step

        def kill_once(event):
            plain(event)
            if event["step"] >= 12 and not killed:
                killed.append(kill_a_training_worker())

        view.step = kill_once
        outcome = run_job(config, view=view)
        assert killed and outcome.progress.finished
        assert any("a worker was lost; continuing from step" in line for line in view.lines)
        record = json.loads((outcome.run_folder / "run.json").read_text())
        client = Tracker()._connect()
        history = client.get_metric_history(record["mlflow_run_id"], "train/loss")
        losses = {metric.step: metric.value for metric in history}
        assert [losses[step] for step in sorted(losses)] == pytest.approx(
            expected.losses(), rel=1e-3
        )
        assert checkpoint.load(outcome.best).proposal_length == 4

    def test_carryover_and_control_begin_at_the_baseline(self, here, reference):
        assignment, _ = reference
        start = assignment.run_folder / "best"
        outcomes, states_s = {}, {}
        hidden = {"cache": "disk", "cache_folder": "hs", "cache_prefix": True}
        for kind in ("carryover", "control"):
            path = write_config(here, reference, name=kind, max_steps=4, hidden_states=hidden)
            outcome = run_job(TrainConfig.load(path), kind=kind, start_from=start, view=Lines())
            outcomes[kind] = checkpoint.describe(outcome.last)
            assert outcomes[kind]["provenance"]["training"] == kind
            run_id = json.loads((outcome.run_folder / "run.json").read_text())["mlflow_run_id"]
            metrics = Tracker()._connect().get_run(run_id).data.metrics
            states_s[kind] = metrics["summary/states_s"]
        # the control reads what the other wrote
        assert states_s["carryover"] > 0 == states_s["control"]
        path = write_config(here, reference, name="markov", regime="markov", max_steps=1)
        longer = run_job(TrainConfig.load(path), start_from=start, view=Lines())
        assert checkpoint.describe(longer.last)["regime"] == "markov"
        wider = TrainConfig.load(
            write_config(here, reference, name="wider", drafter={"draft_vocab_size": 99})
        )
        assert checkpoint.describe(start)["draft_vocab_size"] != 99
        longer = run_job(wider, start_from=start, view=Lines())
        assert checkpoint.describe(longer.last)["draft_vocab_size"] == 99
        assert outcomes["carryover"]["carryover"]["carried"] == "hidden_states"
        assert outcomes["control"]["carryover"] is None
        with pytest.raises(ConfigError, match="begin at a baseline checkpoint"):
            run_job(
                TrainConfig.load(write_config(here, reference, name="wrong")),
                kind="control", start_from=here / "runs/train/carryover/last", view=Lines(),
            )  # fmt: skip

    def test_what_the_cluster_lacks_is_said_at_once(self, here, reference):
        wanted = {"num_workers": 2, "cpus_per_worker": 64}
        path = write_config(here, reference, name="a", resources=wanted)
        with pytest.raises(EnvironmentProblem, match="need 128 CPU, and the Ray cluster has 2"):
            run_job(TrainConfig.load(path), view=Lines())
        path = write_config(here, reference, name="b", resources={"gpus_per_worker": 1})
        with pytest.raises(EnvironmentProblem, match="need 1 GPU, and the Ray cluster has 0"):
            run_job(TrainConfig.load(path), view=Lines())

    def test_a_workers_complaint_reaches_the_user(self, here, reference):
        """States beyond float16 are found by a worker; the user sees its words, no traceback."""
        folder = tiny_target(here / "loud")
        model = resolve(str(folder)).load_model()
        with torch.no_grad():
            model.get_decoder().embed_tokens.weight.mul_(1e7)
        model.save_pretrained(folder)
        path = write_config(
            here, reference, target=str(folder), name="loud",
            hidden_states={"cache": "disk", "cache_folder": "hs"},
        )  # fmt: skip
        with pytest.raises(DataError, match="cache_dtype=bfloat16"):
            run_job(TrainConfig.load(path), view=Lines())
        runs = Tracker()._connect().search_runs(["1"])
        assert {run.info.status for run in runs} == {"FAILED"}


def kill_a_training_worker():
    """SIGKILL to a worker of Ray Train; returns its pid."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "RayTrainWorker" in " ".join([process.name(), *process.cmdline()]):
                process.kill()
                return process.pid
    raise AssertionError("no training worker found")


def test_errors_before_anything_starts(tmp_path, monkeypatch, reference):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no responses to train on; give --data"):
        run_job(TrainConfig())
    with pytest.raises(ConfigError, match="training begin at a checkpoint"):
        run_job(TrainConfig(data="x"), kind="carryover")
    path = write_config(tmp_path, reference, data="nowhere.parquet")
    with pytest.raises(DataError, match="no responses at"):
        run_job(TrainConfig.load(path))
