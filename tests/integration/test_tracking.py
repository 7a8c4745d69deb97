"""Runs in real MLflow stores: the SQLite default and a tracking server."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from carryover import tracking
from carryover.errors import ConfigError, EnvironmentProblem
from carryover.tracking import Tracker


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory):
    """A store with schema and nothing in it; copied, since creating one takes seconds."""
    folder = tmp_path_factory.mktemp("store")
    Tracker(folder=folder).open()
    return folder / "mlflow.db"


@pytest.fixture
def store(empty_store, tmp_path, monkeypatch):
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def only_run(tracker, experiment="tests"):
    client = tracker.client()
    found = client.get_experiment_by_name(experiment)
    runs = client.search_runs([found.experiment_id])
    assert len(runs) == 1
    return runs[0]


def test_a_run_holds_what_was_logged(store):
    tracker = Tracker()
    (store / "report.html").write_text("<p>fine</p>")
    with tracker.run(experiment="tests", name="first", tags={"arm": "baseline"}) as run:
        run.log_params(
            {"optimizer": {"lr": 1e-3, "betas": [0.9, 0.99]}, "cache": True, "limit": None}
        )
        run.log_metrics({"loss": 2.5}, step=1)
        run.log_metrics({"loss": 1.5, "gap": float("nan")}, step=2)
        run.log_dict({"rows": [1, 2]}, "tables/rows.json")
        run.log_text("a\nb\n", "notes.txt")
        run.log_file("report.html", "reports")

    client = tracker.client()
    recorded = only_run(tracker)
    assert recorded.info.run_id == run.id
    assert recorded.info.run_name == "first"
    assert recorded.info.status == "FINISHED"
    assert recorded.info.end_time >= recorded.info.start_time
    assert recorded.data.params == {
        "optimizer.lr": "0.001",
        "optimizer.betas": "[0.9, 0.99]",
        "cache": "true",
        "limit": "null",
    }
    assert [(m.step, m.value) for m in client.get_metric_history(run.id, "loss")] == [
        (1, 2.5),
        (2, 1.5),
    ]
    assert recorded.data.tags["arm"] == "baseline"
    assert recorded.data.tags["carryover.version.mlflow"]
    assert recorded.data.tags["mlflow.source.git.commit"]
    artifacts = store / "mlartifacts" / run.id / "artifacts"
    assert json.loads((artifacts / "tables/rows.json").read_text()) == {"rows": [1, 2]}
    assert (artifacts / "reports/report.html").read_text() == "<p>fine</p>"
    assert run.url is None


def test_more_than_one_request_of_metrics_and_params(store):
    tracker = Tracker()
    with tracker.run(experiment="tests", name="many") as run:
        run.log_params({f"p{index}": index for index in range(205)})
        run.log_metrics({f"m{index}": index for index in range(2010)}, step=7)
    recorded = only_run(tracker)
    assert len(recorded.data.params) == 205
    assert len(recorded.data.metrics) == 2010
    assert recorded.data.metrics["m2009"] == 2009


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("no such row"), "FAILED"),
        (KeyboardInterrupt(), "KILLED"),
        (asyncio.CancelledError(), "KILLED"),
        (SystemExit(1), "FAILED"),
        (SystemExit(0), "FINISHED"),
    ],
)
def test_every_exception_ends_the_run(store, error, status):
    tracker = Tracker()
    with (
        pytest.raises(type(error)),
        tracker.run(experiment="tests", name="ends"),
    ):
        raise error
    recorded = only_run(tracker)
    assert recorded.info.status == status
    note = recorded.data.tags.get(tracking.ERROR_TAG, "")
    assert note.startswith(type(error).__name__) == (status != "FINISHED")


def test_children_nest_and_end_on_their_own(store):
    tracker = Tracker()
    with tracker.run(experiment="tests", name="sweep") as parent:
        with pytest.raises(RuntimeError), parent.child("trial 0"):
            raise RuntimeError("out of memory")
        with parent.child("trial 1", tags={"length": 7}) as child:
            child.log_metrics({"tokens_per_s": 10.0})
    client = tracker.client()
    experiment = client.get_experiment_by_name("tests")
    under_parent = f"tags.`mlflow.parentRunId` = '{parent.id}'"
    children = client.search_runs([experiment.experiment_id], filter_string=under_parent)
    assert {run.info.run_name: run.info.status for run in children} == {
        "trial 0": "FAILED",
        "trial 1": "FINISHED",
    }
    assert client.get_run(parent.id).info.status == "FINISHED"


def test_a_run_is_continued_by_its_id(store):
    tracker = Tracker()
    with pytest.raises(KeyboardInterrupt), tracker.run(experiment="tests", name="train") as run:
        run.log_params({"lr": 0.1, "steps": 10})
        run.log_metrics({"loss": 2.0}, step=1)
        raise KeyboardInterrupt
    again = Tracker()
    with again.run(experiment="tests", name="train", run_id=run.id) as continued:
        assert again.client().get_run(run.id).info.status == "RUNNING"
        continued.log_params({"lr": 0.1, "steps": 20, "new": 1})
        continued.log_metrics({"loss": 1.0}, step=2)
    recorded = only_run(again)
    assert recorded.info.status == "FINISHED"
    assert recorded.data.params == {"lr": "0.1", "steps": "10", "new": "1"}
    assert recorded.data.tags["changed.steps"] == "20"
    assert recorded.data.metrics["loss"] == 1.0
    with (
        pytest.raises(ConfigError, match="no run 'feed'"),
        again.run(experiment="tests", name="train", run_id="feed"),
    ):
        pass


def test_a_stray_mlruns_folder_changes_nothing(store):
    (store / "mlruns" / "0").mkdir(parents=True)
    (store / "mlruns" / "0" / "meta.yaml").write_text("experiment_id: '0'\n")
    tracker = Tracker()
    with tracker.run(experiment="tests", name="first"):
        pass
    assert tracker.uri == f"sqlite:///{store}/mlflow.db"
    assert only_run(tracker).info.status == "FINISHED"


def test_folders_with_unusual_names(empty_store, tmp_path):
    folder = tmp_path / "a b%20#c?d"
    folder.mkdir()
    shutil.copy(empty_store, folder / "mlflow.db")
    tracker = Tracker(folder=folder)
    with tracker.run(experiment="tests", name="first") as run:
        run.log_text("here", "note.txt")
    assert (folder / "mlartifacts" / run.id / "artifacts" / "note.txt").read_text() == "here"


def test_a_broken_record_is_refused_and_does_not_hold_up_the_rest(store):
    tracker = Tracker()
    with tracker.run(experiment="tests", name="broken") as run:
        with pytest.raises(Exception, match="Invalid"):
            run.log_metrics({"acc@1;drop": 1.0})
        run.log_metrics({"accepted": 2.0})
    recorded = only_run(tracker)
    assert recorded.info.status == "FINISHED"
    assert recorded.data.metrics == {"accepted": 2.0}


def test_a_deleted_experiment_is_named_with_its_fix(store):
    tracker = Tracker()
    tracker.open("tests")
    client = tracker.client()
    client.delete_experiment(client.get_experiment_by_name("tests").experiment_id)
    with pytest.raises(ConfigError, match="mlflow experiments restore"):
        Tracker().open("tests")


KILLED_RUN = """
import os, signal, sys
from carryover.tracking import Tracker
with Tracker().run(experiment="tests", name="killed") as run:
    run.log_metrics({"loss": 1.0})
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    import time; time.sleep(30)
"""


@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_a_killed_process_leaves_no_run_open(store, name):
    command = [sys.executable, "-c", KILLED_RUN, name]
    done = subprocess.run(command, capture_output=True, timeout=180)
    assert done.returncode != 0
    recorded = only_run(Tracker())
    assert recorded.info.status == "KILLED"
    assert recorded.data.metrics == {"loss": 1.0}


def test_a_live_run_of_another_process_is_left_open(store):
    tracker = Tracker()
    with tracker.run(experiment="tests", name="alive"):
        listing = "from carryover.tracking import Tracker; Tracker().open()"
        subprocess.run([sys.executable, "-c", listing], check=True, timeout=180)
        assert only_run(tracker).info.status == "RUNNING"


def test_processes_that_start_together_share_one_new_store(tmp_path):
    code = (
        "from carryover.tracking import Tracker\n"
        "with Tracker().run(experiment='shared', name='one') as run: run.log_metrics({'m': 1})"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    for process in started:
        _, errors = process.communicate(timeout=360)
        assert process.returncode == 0, errors
    client = Tracker(folder=tmp_path).client()
    found = client.get_experiment_by_name("shared")
    assert [run.info.status for run in client.search_runs([found.experiment_id])] == [
        "FINISHED"
    ] * 3


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("http://127.0.0.1:9", "nothing answers there"),
        ("sqlite:////proc/no/mlflow.db", "folder is writable"),
        ("sqlite:///not-a-database", "file is not a database"),
    ],
)
def test_a_store_that_is_down_fails_fast_and_clearly(tmp_path, monkeypatch, uri, said):
    monkeypatch.chdir(tmp_path)
    Path("not-a-database").write_text(
        "plain text, and long enough to be no SQLite header at all\n" * 9
    )
    began = time.monotonic()
    with pytest.raises(EnvironmentProblem, match=said), Tracker(uri).run(experiment="x", name="y"):
        pass
    assert time.monotonic() - began < 20


class Server:
    """A real `mlflow server` on loopback that can be stopped and started again."""

    def __init__(self, folder):
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"

    def start(self):
        command = [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--host",
            "127.0.0.1",
            "--workers",
            "1",
        ]
        command += ["--port", str(self.port), "--backend-store-uri", "sqlite:///mlflow.db"]
        command += ["--artifacts-destination", str(self.folder / "kept")]
        environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert self.process.poll() is None, (self.folder / "log").read_text()
            time.sleep(0.1)
        raise TimeoutError("mlflow server did not start")

    def stop(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)


@pytest.fixture(scope="module")
def server(empty_store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    shutil.copy(empty_store, folder / "mlflow.db")
    server = Server(folder)
    server.start()
    yield server
    server.stop()


def test_a_server_is_used_by_environment_and_keeps_the_artifacts(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    tracker = Tracker()
    with tracker.run(experiment="served", name="parent") as run:
        run.log_params({"lr": 1})
        run.log_metrics({f"m{index}": index for index in range(1500)})
        run.log_text("kept by the server", "note.txt")
        with run.child("child"):
            pass
    recorded = tracker.client().get_run(run.id)
    assert recorded.info.status == "FINISHED"
    assert len(recorded.data.metrics) == 1500
    assert list((server.folder / "kept").rglob("note.txt"))
    assert run.url.startswith(f"{server.uri}/#/experiments/") and run.url.endswith(run.id)
    assert list(tmp_path.iterdir()) == []


def test_an_outage_delays_records_and_loses_none(server, monkeypatch):
    monkeypatch.setattr(tracking, "RETRY_AFTER_S", 0.0)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    tracker = Tracker(server.uri)
    with tracker.run(experiment="outage", name="train") as run:
        run.log_metrics({"loss": 3.0}, step=1)
        server.stop()
        run.log_metrics({"loss": 2.0}, step=2)
        run.log_params({"seen": "during the outage"})
        run.log_text("still here", "note.txt")
        server.start()
        run.log_metrics({"loss": 1.0}, step=3)
    client = tracker.client()
    recorded = client.get_run(run.id)
    assert recorded.info.status == "FINISHED"
    assert recorded.data.params == {"seen": "during the outage"}
    history = client.get_metric_history(run.id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 3.0), (2, 2.0), (3, 1.0)]
    assert [file.path for file in client.list_artifacts(run.id)] == ["note.txt"]


def test_a_server_lost_for_good_does_not_hide_the_result(server, caplog, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    tracker = Tracker(server.uri)
    with tracker.run(experiment="lost", name="train") as run:
        server.stop()
    assert f"records of run {run.id} were lost, and its status FINISHED" in caplog.text
