"""The start scripts start what they say, and leave nothing when they are ended."""

import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import psutil
import pytest


class Script:
    def __init__(self, command, folder, **environment):
        self.mark = str(folder)
        environment["SCRIPT_TEST"] = self.mark
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "CARRYOVER_VENV": sys.prefix, **environment},
            )  # fmt: skip

    def wait_until(self, ready, within_s=120):
        deadline = time.monotonic() + within_s
        while not ready():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.2)

    def alive(self):
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("SCRIPT_TEST") == self.mark:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def end(self):
        for process in self.alive():
            process.kill()


@pytest.fixture
def start(tmp_path):
    scripts = []

    def begin(command, **environment):
        scripts.append(Script(command, tmp_path, **environment))
        return scripts[-1]

    yield begin
    for script in scripts:
        script.end()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_an_mlflow_server(start, repository, tmp_path):
    port = free_port()
    server = start([repository / "infra" / "start_mlflow.sh"], MLFLOW_PORT=str(port))

    def answers():
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).is_success
        except httpx.HTTPError:
            return False

    server.wait_until(answers)
    assert (tmp_path / "mlflow.db").exists()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) in (0, 143)
    assert server.alive() == []


@pytest.mark.ray
def test_a_ray_head_that_only_token_holders_join(start, repository, tmp_path_factory):
    port = free_port()
    # a short folder: Ray's sockets lie in it, and a socket's path is at most 107 bytes
    short = tmp_path_factory.getbasetemp().parent / "r"
    arguments = ["--temp-dir", str(short), "--num-cpus", "1", "--include-dashboard", "false"]
    head = start([repository / "infra" / "start_ray.sh", "head", *arguments], RAY_PORT=str(port))
    head.wait_until(lambda: "Ray runtime started" in head.log.read_text())
    line = next(each for each in head.log.read_text().splitlines() if "export" in each)
    variables = dict(each.split("=") for each in line.split("export")[1].split())
    assert variables["RAY_AUTH_MODE"] == "token"
    code = (
        "import os, ray; ray.init(logging_level='ERROR')\n"
        "print(ray.get(ray.remote(lambda: os.environ['RAY_USAGE_STATS_ENABLED']).remote()))"
    )
    joined = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=360,
        env={**os.environ, **variables},
    )  # fmt: skip
    assert joined.stdout.splitlines()[-1:] == ["0"], joined.stderr
    head.process.send_signal(signal.SIGTERM)
    head.process.wait(60)
    assert head.alive() == []
