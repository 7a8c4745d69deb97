"""Every configuration file is accepted by the command that it is for, and says what that does."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

REPOSITORY = Path(__file__).parents[2]
FILES = sorted(REPOSITORY.glob("*/configs/*.yaml"))


def command_for(path):
    package, name = path.parents[1].name, path.stem
    if package == "serve_apps":
        return ["serve"]
    if package == "sweeps":
        return ["sweep"]
    if name.startswith("data_"):
        return ["data", "regenerate"]
    if name.startswith("prompts_"):
        return ["data", "synthesize"]
    if name.startswith("results"):
        return ["results"]
    if name.endswith("_target"):
        return ["train", "target"]
    return ["demo"] if name == "demo" else ["train", "baseline"]


def resolve(path, *overrides):
    """The configuration that `--dry-run` prints."""
    words = command_for(path)
    from carryover.cli import app

    options = [part for override in overrides for part in ("--set", override)]
    result = CliRunner().invoke(app, [*words, "--config", str(path), "--dry-run", *options])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return yaml.safe_load(result.stdout)


def test_each_package_has_configurations():
    assert {path.parents[1].name for path in FILES} == {"jobs", "serve_apps", "sweeps"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parents[1].name}/{path.stem}")
def test_it_is_accepted_and_explains_itself(path, inside_guard):
    text = path.read_text()
    assert text.startswith("#"), "a first line says what it is for"
    written, resolved = yaml.safe_load(text), resolve(path)
    assert_within(written, resolved)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parents[1].name}/{path.stem}")
def test_a_misspelt_key_is_refused(path, inside_guard):
    with pytest.raises(Exception, match="unknown key"):
        resolve(path, "no_such_key_anywhere=1")


def assert_within(written, resolved, place=""):
    """Everything that the file sets arrives, whatever is added."""
    if isinstance(written, dict):
        for key, value in written.items():
            assert key in resolved, f"{place}{key}"
            assert_within(value, resolved[key], f"{place}{key}.")
    elif isinstance(written, list):
        assert len(written) == len(resolved), place
        for index, (a, b) in enumerate(zip(written, resolved, strict=True)):
            assert_within(a, b, f"{place}{index}.")
    else:
        assert resolved == written or str(resolved) == str(written), place
