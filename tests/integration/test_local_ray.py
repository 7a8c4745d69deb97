"""Ray starts on a machine that is too busy for Ray's own limit, or says so."""

import time
from types import SimpleNamespace

import psutil
import pytest
import ray
from ray._private import node, services

from carryover import local_ray
from carryover.errors import EnvironmentProblem
from carryover.local_ray import start_local_ray

pytestmark = pytest.mark.ray
SETTINGS = {"num_cpus": 1, "include_dashboard": False, "log_to_driver": False}


@pytest.fixture
def busy(monkeypatch):
    """Makes the first attempts run into the limit, without the 30 s that it takes."""
    real, state = services.get_node, SimpleNamespace(slow=0, asked=0)

    def get_node(*words):
        if state.asked < state.slow:
            state.asked += 1
            raise RuntimeError("not there yet")
        return real(*words)

    clock = SimpleNamespace(
        sleep=time.sleep, monotonic=lambda: time.monotonic() + 31 * state.asked, time=time.time
    )
    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(node, "time", clock)
    yield state
    ray.shutdown()


def test_a_slow_start_is_tried_again_and_leaves_nothing(busy):
    busy.slow = 1
    before = set(psutil.Process().children(recursive=True))
    start_local_ray(**SETTINGS)
    assert busy.asked == 1
    assert ray.get(ray.remote(lambda: 7).remote()) == 7
    started = set(psutil.Process().children(recursive=True)) - before
    gcs = [process for process in started if "gcs_server" in process.name()]
    assert len(gcs) == 1, "the first attempt's processes are gone"


def test_a_machine_that_stays_busy_is_a_clear_error(busy, monkeypatch):
    monkeypatch.setattr(local_ray, "ATTEMPTS", 1)
    busy.slow = 10
    with pytest.raises(EnvironmentProblem, match="too busy"):
        start_local_ray(**SETTINGS)
    assert not ray.is_initialized()


def test_other_errors_are_not_hidden(busy):
    with pytest.raises(ValueError, match="object store memory"):
        start_local_ray(**SETTINGS, object_store_memory=1)
