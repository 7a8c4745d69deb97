"""`platform doctor` on this machine, and with the fault that breaks most installations."""

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.vllm
@pytest.mark.ray
def test_this_machine_is_ready(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "carryover", "doctor", "--json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    report = json.loads(done.stdout)
    red = [finding for finding in report["findings"] if finding["status"] == "red"]
    assert (red, done.returncode, report["ready"]) == ([], 0, True)
    names = {finding["name"] for finding in report["findings"]}
    assert names >= {"packages", "target classes", "vLLM", "vLLM plugin", "Ray", "MLflow", "memory"}
    assert list(tmp_path.iterdir()) == []


def test_a_broken_torchvision_is_found_with_its_fix(tmp_path):
    """A torchvision of another build than torch's, as PyPI's is beside a CPU wheel."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')\n"
    )
    information = tmp_path / "torchvision-0.28.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-m", "carryover.doctor", "targets"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    (finding,) = json.loads(done.stdout.splitlines()[-1])
    assert finding["status"] == "red"
    assert "torchvision::nms" in finding["found"]
    assert "pip uninstall -y torchvision" in finding["fix"]


def test_a_red_row_makes_the_exit_status_1_and_keeps_the_table(tmp_path):
    code = (
        "import carryover.doctor as doctor\n"
        "doctor.PROBES = {}\n"
        "row = doctor.Finding('memory', 'red', '1 GiB [free]', 'free some')\n"
        "doctor.QUICK_CHECKS = (lambda: [row],)\n"
        "from carryover.cli import main\n"
        "main()\n"
    )
    environment = {**os.environ, "CARRYOVER_GUARDED_BY": f"{os.getpid()}:test"}
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 1
    assert "1 GiB [free]" in done.stdout and "free some" in done.stdout
    assert "not ready: 1 red" in done.stdout
