"""`platform ui` on a real store, over HTTP."""

import os
import signal
import socket
import subprocess
import sys

import httpx
import psutil

from carryover.tracking import Tracker


def platform(*arguments, cwd):
    return subprocess.Popen(
        [sys.executable, "-m", "carryover", *arguments],
        cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "UI_TEST": str(cwd)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def test_the_runs_are_served_until_ctrl_c_and_nothing_is_left(tmp_path):
    with Tracker(folder=tmp_path).run(experiment="shown", name="first") as run:
        run.log_text("a note", "note.txt")
    command = platform("ui", "--port", "0", cwd=tmp_path)
    try:
        ready = command.stdout.readline()
        url = ready.split(" at ")[1].split()[0]
        found = httpx.post(
            f"{url}/api/2.0/mlflow/experiments/search", json={"max_results": 10}, timeout=30
        ).json()
        assert "shown" in [experiment["name"] for experiment in found["experiments"]]
        query = {"run_uuid": run.id, "path": "note.txt"}
        assert httpx.get(f"{url}/get-artifact", params=query, timeout=30).text == "a note"
        command.send_signal(signal.SIGINT)
        output, _ = command.communicate(timeout=180)
        assert (command.returncode, output) == (0, "stopped\n")
    finally:
        command.kill()
        command.communicate()
    left = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("UI_TEST") == str(tmp_path):
                left.append(process)
        except (psutil.Error, OSError):
            continue
    assert left == []


def test_mistakes_are_explained_without_a_traceback(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        cases = {
            ("ui",): "no MLflow store at",
            ("ui", "--tracking-uri", "./mlruns"): "no longer writes to folders of files",
        }
        for arguments, said in cases.items():
            _, errors = (command := platform(*arguments, cwd=tmp_path)).communicate(timeout=180)
            assert command.returncode == 2
            assert said in errors and "Traceback" not in errors
        (tmp_path / "mlflow.db").touch()
        command = platform("ui", "--port", port, cwd=tmp_path)
        _, errors = command.communicate(timeout=180)
        assert command.returncode == 2
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in errors


def test_a_server_needs_no_interface(tmp_path):
    command = platform("ui", "--tracking-uri", "http://me:secret@tracking:5000", cwd=tmp_path)
    output, _ = command.communicate(timeout=180)
    assert command.returncode == 0
    assert "http://me:***@tracking:5000" in output
