"""What all tests share: no network, no leftovers, tiny targets, one Ray cluster a module."""

import ctypes
import os
import sys
from pathlib import Path

import psutil
import pytest

from carryover.guardian import GUARD_VARIABLE, end_processes

# read when the libraries are imported, which nothing above does
for _name, _value in {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}.items():
    os.environ.setdefault(_name, _value)

REPOSITORY = Path(__file__).parent.parent
_PR_SET_CHILD_SUBREAPER = 36


def pytest_configure():
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def pytest_sessionfinish(session):
    """Nothing that a test started may outlive the tests; orphans become children of this one."""
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()
    left = [child for child in psutil.Process().children() if _is_worth_naming(child)]
    if left:
        names = ", ".join(f"{child.pid} {child.name()}" for child in left)
        print(f"\nprocesses left by tests, now ended: {names}", file=sys.stderr)
        end_processes(left)


def _is_worth_naming(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """A user's own settings must not decide a test."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(scope="session")
def repository():
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Makes tiny random targets, one folder for each architecture and setting."""
    from carryover.testing import tiny_target

    made = {}

    def make(architecture="llama", **settings):
        key = (architecture, *sorted(settings.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp(architecture)
            made[key] = tiny_target(folder, architecture=architecture, **settings)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_llama(tiny):
    """Folder of a tiny random Llama."""
    return tiny("llama")


@pytest.fixture(scope="session")
def tiny_qwen3(tiny):
    """Folder of a tiny random Qwen3."""
    return tiny("qwen3")


@pytest.fixture(scope="session")
def tiny_gemma3(tiny):
    """Folder of a tiny random Gemma 3, with sliding and full attention layers."""
    return tiny("gemma3")


@pytest.fixture(scope="module")
def ray_cluster():
    """A local Ray cluster of two CPUs for the module."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=True, logging_level="WARNING")
    yield ray
    ray.shutdown()


@pytest.fixture
def inside_guard(monkeypatch):
    """Lets a test call a command's body in this process, as if the guardian had started it."""
    monkeypatch.setenv(GUARD_VARIABLE, f"{os.getppid()}:test")
