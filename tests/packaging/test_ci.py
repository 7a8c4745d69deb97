"""What CI relies on: real tests cannot be left out unnoticed, and the last line is pytest's."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

@pytest.mark.vllm
def test_engine(): pass

@pytest.mark.ray
def test_cluster(): {body}

@pytest.mark.ray
@pytest.mark.gpu
def test_cluster_of_gpus(): pytest.skip("no GPU here")

@pytest.mark.vllm
@pytest.mark.slow
def test_slow(): raise AssertionError("slow")

def test_plain(): pass
"""


def run(folder, repository, *arguments, body="pass"):
    shutil.copy(repository / "tests" / "conftest.py", folder)
    markers = "".join(f"    {name}: x\n" for name in ("vllm", "ray", "gpu", "slow"))
    (folder / "pytest.ini").write_text(f"[pytest]\nmarkers =\n{markers}")
    (folder / "test_real.py").write_text(TESTS.format(body=body))
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=folder, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


# in this process alone, and in two processes side by side, as `make test` runs them
STREAMS = pytest.mark.parametrize("streams", [["-n0"], ["-n2", "--dist=loadfile"]], ids=["1", "2"])


@STREAMS
def test_all_real_tests_ran(tmp_path, repository, streams):
    done = run(tmp_path, repository, "--require-real", *streams)
    assert done.returncode == 0, done.stdout
    assert "--require-real" not in done.stdout


def test_slow_tests_run_when_asked_for(tmp_path, repository):
    assert run(tmp_path, repository).returncode == 0
    done = run(tmp_path, repository, "--slow")
    assert done.returncode == 1 and "AssertionError: slow" in done.stdout


@STREAMS
@pytest.mark.parametrize(
    ("arguments", "body", "said"),
    [
        (["-m", "not ray"], "pass", "2 tests marked ray did not run"),
        ([], "pytest.skip('no Ray here')", "1 tests marked ray did not run"),
        (["test_real.py::test_plain"], "pass", "no test marked vllm ran"),
    ],
)
def test_left_out_real_tests_fail_the_run(tmp_path, repository, arguments, body, said, streams):
    if arguments[:1] == ["-m"]:
        said = "1 tests marked ray did not run"  # the one for GPUs may be left out
    done = run(tmp_path, repository, "--require-real", *arguments, *streams, body=body)
    assert done.returncode == 1
    assert said in done.stdout
    assert run(tmp_path, repository, *arguments, *streams, body=body).returncode == 0
    closing = done.stdout.rstrip().splitlines()[-1]
    assert closing.startswith("=") and "passed" in closing


@STREAMS
def test_processes_that_a_test_leaves_are_ended_and_named(tmp_path, repository, streams):
    body = "__import__('subprocess').Popen(['sleep', '300'])"
    done = run(tmp_path, repository, *streams, body=body)
    assert "processes left by tests, now ended" in done.stdout
    assert "sleep" in done.stdout


@pytest.mark.parametrize(
    ("output", "status", "last", "expected"),
    [
        ("== 3 passed in 1.00s ==", 0, "== 3 passed in 1.00s ==", 0),
        (
            "== 1 failed, 2 passed in 1s ==\nmake: *** Error 1",
            2,
            "== 1 failed, 2 passed in 1s ==",
            2,
        ),
        ("error: needs Python", 2, "error: pytest did not run to its end", 2),
        ("", 0, "error: pytest did not run to its end", 1),
    ],
)
def test_the_script_ends_with_pytests_closing_line(
    tmp_path, repository, output, status, last, expected
):
    (tmp_path / ".ci").mkdir()
    script = shutil.copy(repository / ".ci" / "run", tmp_path / ".ci" / "run")
    (tmp_path / "make").write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\nexit {status}\n")
    (tmp_path / "make").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == expected
    assert done.stdout.rstrip().splitlines()[-1] == last


def test_make_test_runs_the_suite_guarded(repository):
    done = subprocess.run(
        ["make", "--dry-run", "test", "PYTEST_ARGS=--require-real"],
        cwd=repository, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "infra/setup.sh cpu" in done.stdout
    assert "-m carryover.guardian" in done.stdout
    command = " ".join(done.stdout.replace("\\\n", " ").split())
    assert command.endswith(
        "-m pytest -n 2 --dist loadfile --no-loadscope-reorder --require-real"
    )
    assert os.access(Path(repository, ".ci", "run"), os.X_OK)
