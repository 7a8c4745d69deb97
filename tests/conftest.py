"""What all tests share: no network, no leftovers, tiny targets, one Ray cluster a module."""

import ctypes
import os
import signal
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

if "PYTEST_XDIST_WORKER" in os.environ:
    # Two files of tests run side by side: engines that spread over all cores would wait for each
    # other, spinning, at every operator of a tiny model.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

REPOSITORY = Path(__file__).parent.parent
_PR_SET_CHILD_SUBREAPER = 36


# tests of these marks must run wherever the whole suite does
REAL = ("vllm", "ray")


def pytest_addoption(parser):
    parser.addoption(
        "--require-real",
        action="store_true",
        help="fail unless tests that start vLLM and Ray ran, none of them skipped or deselected",
    )
    parser.addoption(
        "--slow", action="store_true", help="run tests marked slow too: minutes each"
    )


def pytest_configure(config):
    # A shell's background job ignores Ctrl-C, and so would every command that a test interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    config.pluginmanager.register(Suite(config))


def pytest_collection_modifyitems(config, items):
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow and not config.getoption("--slow"):
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


class Suite:
    """Which real tests ran, and what they left running, over all processes that run tests."""

    def __init__(self, config):
        self.config = config
        self.ended = {mark: 0 for mark in REAL}
        self.missing = {mark: [] for mark in REAL}
        self.left = []

    def pytest_deselected(self, items):
        for item in items:
            for mark in _real_marks({mark.name for mark in item.iter_markers()}):
                self.missing[mark].append(item.nodeid)

    def pytest_runtest_logreport(self, report):
        for mark in _real_marks(report.keywords):
            if report.skipped:
                self.missing[mark].append(report.nodeid)
            elif report.when == "call":
                self.ended[mark] += 1

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        """Take what one process of several saw; it sent its reports as they came."""
        for mark, names in getattr(node, "workeroutput", {}).get("deselected", {}).items():
            self.missing[mark] += set(names) - set(self.missing[mark])
        self.left += getattr(node, "workeroutput", {}).get("left", [])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        """Nothing that a test started may outlive the tests; orphans become children of this."""
        if "ray" in sys.modules:
            sys.modules["ray"].shutdown()
        left = [child for child in psutil.Process().children() if _is_worth_naming(child)]
        self.left += [f"{child.pid} {child.name()}" for child in left]
        end_processes(left)
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput.update(deselected=self.missing, left=self.left)
        elif self.config.getoption("--require-real") and self.problems():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def problems(self):
        """What --require-real objects to, one line for each mark."""
        lines = []
        for mark in REAL:
            if missing := self.missing[mark]:
                lines.append(f"{len(missing)} tests marked {mark} did not run: {missing[:5]}")
            elif not self.ended[mark]:
                lines.append(f"no test marked {mark} ran")
        return lines

    def pytest_terminal_summary(self, terminalreporter):
        if self.left:
            names = ", ".join(self.left)
            terminalreporter.write_line(f"processes left by tests, now ended: {names}", red=True)
        if self.config.getoption("--require-real"):
            for problem in self.problems():
                terminalreporter.write_line(f"--require-real: {problem}", red=True)


def _real_marks(names):
    # tests for a GPU may be skipped where there is none; what is slow has faster ones beside it
    if "gpu" in names or "slow" in names:
        return []
    return [mark for mark in REAL if mark in names]


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
