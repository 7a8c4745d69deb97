"""Which store a command uses."""

import subprocess
import sys

import pytest

from carryover.errors import ConfigError
from carryover.stores import artifact_folder, database_file, store_uri, without_password


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def test_the_default_is_an_absolute_file_in_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    uri = store_uri()
    assert uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert database_file(uri) == tmp_path / "mlflow.db"
    assert artifact_folder(uri) == tmp_path / "mlartifacts"


def test_an_argument_wins_over_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    assert store_uri() == "http://tracking:5000"
    assert store_uri("sqlite:///runs/x.db", folder=tmp_path) == f"sqlite:///{tmp_path}/runs/x.db"
    assert store_uri("sqlite:////data/x.db", folder=tmp_path) == "sqlite:////data/x.db"


def test_names_survive_quoting(tmp_path):
    folder = tmp_path / "50% #1?"
    uri = store_uri(folder=folder)
    assert database_file(uri) == folder / "mlflow.db"
    assert store_uri(uri) == uri


@pytest.mark.parametrize(
    "uri", ["mlruns", "./mlruns", "file:///data/mlruns", "sqlite://", "sqlite:///:memory:"]
)
def test_stores_that_keep_nothing_are_refused_with_the_fix(uri):
    with pytest.raises(ConfigError, match=r"sqlite:///mlflow\.db"):
        store_uri(uri)


def test_passwords_are_not_shown():
    shown = without_password("postgresql://me:secret@db:5432/mlflow")
    assert shown == "postgresql://me:***@db:5432/mlflow"
    assert without_password("http://127.0.0.1:5000") == "http://127.0.0.1:5000"


def test_importing_tracking_does_not_import_mlflow():
    code = "import sys, carryover.tracking; print({'mlflow', 'sqlalchemy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
