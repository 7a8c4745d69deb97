"""The controller on real Ray Serve: several replicas, a killed process, MLflow, metrics."""

import json
import os
import re
import signal
import socket
import time

import httpx
import psutil
import pytest

from carryover.serving.admin import AdminClient
from carryover.serving.experiment_record import EXPERIMENT
from carryover.tracking import Tracker

pytestmark = pytest.mark.ray

ARMS = ("baseline", "carryover")
REPLICAS = 2


class Application:
    """What tests ask of the running application."""

    def __init__(self, port, folder):
        self.folder = folder
        self.client = AdminClient(f"http://127.0.0.1:{port}", key="none")

    def ask(self, action, **arguments):
        return self.client.ask(action, arguments)

    def wait_for(self, what, timeout_s=120):
        """The first overview for which `what` is true."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                shown = self.ask("show")
                if what(shown):
                    return shown
            except Exception:
                # the controller is starting again
                if time.monotonic() > deadline:
                    raise
            else:
                assert time.monotonic() < deadline, shown
            time.sleep(0.1)

    def taken_over(self, version):
        lines = (self.folder / "taken_over.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["version"] == version]

    def log(self):
        return [(e["action"], e["who"]) for e in self.ask("log", last=1000)["entries"]]


@pytest.fixture(scope="module")
def application(tmp_path_factory):
    import ray
    import stub_ingress
    from ray import serve

    from carryover.serving import controller_deployment
    from carryover.serving.traffic import TrafficConfig

    folder = tmp_path_factory.mktemp("traffic")
    config = TrafficConfig.parse(
        {
            "experiment": "trial", "state": str(folder / "state"),
            "evaluation_period_s": 0.5, "record_period_s": 2,
            "tracking_uri": f"sqlite:///{folder}/mlflow.db", "guard": {"min_requests": 20},
        }
    ).resolve(arms=ARMS, application="trial")  # fmt: skip
    # Serve's processes do not have the tests on their path
    ray.cloudpickle.register_pickle_by_value(stub_ingress)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False,
        _system_config={"metrics_report_interval_ms": 500},
    )  # fmt: skip
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        front = serve.deployment(
            stub_ingress.StubIngress, num_replicas=REPLICAS, ray_actor_options={"num_cpus": 0.1}
        )
        owner = controller_deployment.deployment(config, arms=ARMS)
        serve.run(front.bind(owner, str(folder)), name="trial")
        yield Application(port, folder)
    finally:
        ray.shutdown()
    assert not (folder / "state/.results.json.partial").exists()


def controller_process():
    """The controller's process."""
    found = [
        process
        for process in psutil.process_iter(["cmdline"])
        # A process that ended in between has no command.
        for word in process.info["cmdline"] or []
        if "ServeReplica:trial:TrafficController" in word
    ]
    assert len(found) == 1, found
    return found[0]


def test_all_replicas_change_over_at_one_instant(application):
    application.wait_for(lambda shown: len(shown["replicas"]) == REPLICAS)
    changed = application.ask("set", weights={"baseline": 80, "carryover": 20}, why="start")
    assert changed["late"] == []
    assert {replica["version"] for replica in changed["replicas"]} == {changed["version"]}
    version = changed["version"]
    deadline = time.monotonic() + 20
    while len(application.taken_over(version)) < REPLICAS:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    taken = application.taken_over(version)
    assert len({line["replica"] for line in taken}) == REPLICAS
    assert len({line["effective_at"] for line in taken}) == 1
    # nobody was early, but for a timer's grain; how late a busy machine is says nothing
    assert all(line["at"] > line["effective_at"] - 0.1 for line in taken)


def test_a_killed_controller_comes_back_with_everything(application):
    before = application.wait_for(lambda shown: shown["arms"][1]["requests"] > 50)
    application.ask("ramp", steps=[30, 40], hold_s=3600, why="evening")
    application.ask("revoke", key="team-a")
    before = application.ask("show")
    log = application.log()
    # statistics of this moment are on disk after the next evaluation but one
    later = before["evaluation"]["count"] + 1
    application.wait_for(lambda shown: shown["evaluation"]["count"] > later)
    process = controller_process()
    os.kill(process.pid, signal.SIGKILL)
    after = application.wait_for(lambda shown: controller_process().pid != process.pid)
    for key in ("experiment", "version", "weights", "ramp", "revoked", "began_s", "since_s"):
        assert after[key] == before[key], key
    assert after["arms"][1]["requests"] >= before["arms"][1]["requests"]
    assert application.log() == log
    # replicas went on meanwhile, and their requests are counted now
    application.wait_for(
        lambda shown: len(shown["replicas"]) == REPLICAS
        and shown["arms"][1]["requests"] > after["arms"][1]["requests"]
        and shown["dropped"] == shown["unknown"] == 0
    )
    changed = application.ask("set", weights={"baseline": 50, "carryover": 50})
    assert changed["late"] == [] and changed["version"] == before["version"] + 1


def test_the_guard_rolls_back_and_says_why(application):
    application.wait_for(lambda shown: shown["weights"]["carryover"] == 0.5)
    (application.folder / "fail").write_text("carryover")
    shown = application.wait_for(lambda shown: shown["weights"]["carryover"] == 0.0)
    (application.folder / "fail").unlink()
    assert shown["status"] == "running"
    entry = application.ask("log", last=1)["entries"][0]
    assert (entry["action"], entry["who"]) == ("rollback", "guard")
    assert "carryover: error rate" in entry["why"]


def test_a_ramp_steps_by_itself(application):
    application.ask("ramp", steps=[10, 50], why="repaired")
    application.wait_for(lambda shown: shown["ramp"] is None)
    assert application.log()[-3:] == [
        ("ramp", "key test"), ("ramp step", "ramp"), ("ramp done", "ramp"),
    ]  # fmt: skip


def test_metrics_carry_arm_and_experiment(application):
    import ray

    node = ray.nodes()[0]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    deadline = time.monotonic() + 30
    wanted = {
        r'carryover_split_compared_requests\{[^}]*arm="carryover"[^}]*experiment="trial"',
        r'carryover_split_verdict\{[^}]*metric="tpot_s"',
        r"carryover_split_version\{",
    }
    while missing := {each for each in wanted if not re.search(each, httpx.get(url).text)}:
        assert time.monotonic() < deadline, missing
        time.sleep(0.5)


def test_stop_records_the_experiment_in_one_run(application):
    answer = application.ask("stop", why="decided")
    assert (answer["status"], answer["unrecorded"]) == ("ended", "")
    client = Tracker(f"sqlite:///{application.folder}/mlflow.db").client()
    experiment = client.get_experiment_by_name(EXPERIMENT)
    runs = client.search_runs([experiment.experiment_id])
    # one run, although a controller was killed and records were made every other second
    assert [run.info.run_id for run in runs] == [answer["run_id"]]
    run = runs[0]
    assert (run.info.status, run.info.run_name) == ("FINISHED", "trial")
    assert run.data.tags["carryover.status"] == "ended"
    assert run.data.tags["verdict.carryover.tpot_s"] in ("better", "worse", "inconclusive")
    # requests that were under way when it ended are counted still
    assert 0 < run.data.metrics["carryover.requests"] <= answer["arms"][1]["requests"]
    assert run.data.params["control"] == "baseline"
    files = {found.path for found in client.list_artifacts(run.info.run_id)}
    assert files >= {"arms.json", "comparisons.json", "log.json", "statistics.json",
                     "report.html"}  # fmt: skip
    history = client.get_metric_history(run.info.run_id, "carryover.requests")
    assert len(history) > 1
