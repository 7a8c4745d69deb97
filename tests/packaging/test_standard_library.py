"""The folder `platform/` and the command `platform` leave the standard library's module alone."""

import os
import platform
import subprocess
import sys

import pytest

PROBE = "import platform; print(platform.python_version(), platform.__file__)"


def is_standard(output):
    version, file = output.split()
    return version == ".".join(map(str, sys.version_info[:3])) and file == platform.__file__


def test_under_this_very_pytest(repository):
    assert os.path.dirname(platform.__file__) == os.path.dirname(os.__file__)


@pytest.mark.parametrize("arguments", [["-c", PROBE], ["-m", "probe_platform"]], ids=["-c", "-m"])
def test_from_the_repository_root(repository, tmp_path, arguments):
    (tmp_path / "probe_platform.py").write_text(PROBE)
    environment = {**os.environ, "PYTHONPATH": f"{repository}{os.pathsep}{tmp_path}"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=repository, env=environment,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert is_standard(done.stdout)


def test_under_python_m_pytest_from_the_repository_root(repository, tmp_path):
    test = tmp_path / "test_probe.py"
    on_path = f"import sys\nassert {str(repository)!r} in sys.path\n"
    test.write_text(f"{on_path}def test(): pass\n{PROBE}")
    options = ["-q", "-s", "-p", "no:cacheprovider", "-c", os.devnull]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, test],
        cwd=repository, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert is_standard(done.stdout.splitlines()[0])


@pytest.fixture
def cluster_on_the_repository(repository):
    import ray

    excludes = [".git", ".venv", "runs", "tests", "*.db", "mlartifacts"]
    ray.init(
        num_cpus=1, include_dashboard=False, logging_level="ERROR",
        runtime_env={"working_dir": str(repository), "excludes": excludes},
    )  # fmt: skip
    yield ray
    ray.shutdown()


@pytest.mark.ray
def test_inside_a_ray_worker_whose_working_folder_is_the_repository(cluster_on_the_repository):
    @cluster_on_the_repository.remote
    def probe():
        import os
        import platform
        import sys

        on_path = [entry or "." for entry in sys.path if os.path.isdir(entry or ".")]
        seen = os.path.isdir("platform") and any(os.path.samefile(p, ".") for p in on_path)
        return f"{platform.python_version()} {platform.__file__}", seen

    output, seen = cluster_on_the_repository.get(probe.remote(), timeout=300)
    assert seen, "the worker has the repository's platform folder on its path"
    assert is_standard(output)
