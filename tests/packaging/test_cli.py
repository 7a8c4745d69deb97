"""The command line: instant help with examples, no heavy imports, exit codes."""

import os
import subprocess
import sys

import pytest
import typer

HEAVY = {
    "torch", "transformers", "vllm", "ray", "mlflow", "speculators", "numpy", "pandas", "pyarrow",
    "datasets", "scipy", "sqlalchemy", "pydantic", "yaml", "psutil", "httpx", "aiohttp",
}  # fmt: skip

# runs the command line, and then says what it imported of the above
RUN = (
    "import sys, carryover.cli as cli\n"
    "try: cli.main()\n"
    "finally: print(sorted({heavy!r} & set(sys.modules)), file=sys.stderr)\n"
)


def commands():
    """Words of every command and group."""
    from carryover.cli import app

    def walk(command, words):
        yield words
        for name, child in sorted(getattr(command, "commands", {}).items()):
            yield from walk(child, [*words, name])

    return list(walk(typer.main.get_command(app), []))


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "carryover", *arguments], capture_output=True, text=True, timeout=60,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1", **environment},
    )  # fmt: skip


@pytest.mark.parametrize("words", commands(), ids=lambda words: " ".join(words) or "platform")
def test_help_imports_nothing_heavy_and_shows_examples(words):
    code = RUN.format(heavy=HEAVY - {"pydantic"})  # Typer itself imports that one
    done = subprocess.run(
        [sys.executable, "-c", code, *words, "--help"], capture_output=True, text=True, timeout=60,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == "[]\n", "imported before the command runs"
    assert "Usage: " in done.stdout
    is_command = words not in ([], *(other[:-1] for other in commands() if other))
    if is_command:
        assert f"$ platform {' '.join(words)}" in done.stdout, "an example"


def test_the_issue_of_commands_is_complete():
    names = {" ".join(words) for words in commands()}
    assert names >= {
        "doctor", "demo", "data synthesize", "data regenerate", "data inspect", "train baseline",
        "serve", "bench online", "checkpoint show", "checkpoint verify", "ui",
        "traffic show", "traffic set", "traffic ramp", "traffic pause", "traffic resume",
        "traffic rollback", "traffic revoke", "traffic log", "traffic report", "traffic stop",
    }  # fmt: skip


def test_version_and_completion():
    from carryover import __version__

    assert run("--version").stdout == f"carryover {__version__}\n"
    assert "--install-completion" in run("--help").stdout
    script = run(_PLATFORM_COMPLETE="source_bash")
    assert "complete -o default -F _platform_completion platform" in script.stdout
    offered = run(
        _PLATFORM_COMPLETE="complete_bash", COMP_WORDS="platform checkpoint v", COMP_CWORD="2"
    )
    assert offered.stdout.split() == ["verify"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tarin"], "No such command"),
        (["doctor", "--jsno"], "No such option"),
        (["train", "baseline", "--config", "absent.yaml"], "no configuration file at absent.yaml"),
    ],
)
def test_a_users_mistake_is_2_without_a_traceback(arguments, said):
    done = run(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_mistake_of_ours_is_1_with_a_traceback():
    code = (
        "import sys, carryover.cli as cli, carryover.config as config\n"
        "config.read_yaml = lambda path: 1 / 0\n"
        "sys.argv = ['platform', 'serve', '--config', 'x.yaml', '--dry-run']\n"
        "cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
