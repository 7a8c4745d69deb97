"""Which MLflow store a command uses, and whether a database behind it answers; without MLflow."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from carryover.errors import ConfigError


def store_uri(uri: str | None = None, *, folder: Path | None = None) -> str:
    """The store in use: `uri`, else MLFLOW_TRACKING_URI, else `mlflow.db` in the working folder.

    Args:
        uri: a tracking server (`http://`, `https://`, `databricks`) or a database URI; the file of
            an SQLite one may be relative to `folder`.
        folder: working folder; default: the current one.

    Raises:
        ConfigError: the URI names a kind of store that MLflow no longer writes.
    """
    folder = (folder or Path.cwd()).absolute()
    uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
    if uri.startswith("sqlite:"):
        name = uri.removeprefix("sqlite:///")
        if name in ("", ":memory:") or name == uri or "?" in name:
            raise ConfigError(
                f"an SQLite store needs a plain file, got {uri!r}; "
                "use sqlite:///mlflow.db or sqlite:////absolute/path/mlflow.db"
            )
        return f"sqlite:///{_quoted(os.path.normpath(folder / unquote(name)))}"
    if not is_server(uri) and urlsplit(uri).scheme in ("", "file"):
        raise ConfigError(
            f"MLflow no longer writes to folders of files, got {uri!r}; use a database file, "
            "sqlite:///mlflow.db, or a tracking server, http://127.0.0.1:5000"
        )
    return uri


def is_server(uri: str) -> bool:
    """Whether a URI is a tracking server's, which then decides where artifacts lie."""
    return uri.startswith(("http://", "https://", "databricks"))


def database_file(uri: str) -> Path | None:
    """The file behind a `store_uri()`, or None for a server or another database."""
    name = unquote(uri.removeprefix("sqlite:///"))
    return Path(name) if uri.startswith("sqlite:///") else None


def artifact_folder(uri: str) -> Path:
    """Where a database store keeps its files: `mlartifacts` beside an SQLite file."""
    file = database_file(uri)
    return (file.parent if file else Path.cwd()) / "mlartifacts"


def without_password(uri: str) -> str:
    """The URI as it may be shown."""
    return re.sub(r"(://[^/@:]*):[^/@]*@", r"\1:***@", uri)


def check_database(uri: str) -> None:
    """Read the catalogue once: MLflow itself retries a refused database for minutes.

    Raises:
        OSError: the database does not answer, or the file is none.
    """
    import sqlalchemy

    engine = sqlalchemy.create_engine(uri, poolclass=sqlalchemy.pool.NullPool)
    try:
        sqlalchemy.inspect(engine).get_table_names()
    except sqlalchemy.exc.SQLAlchemyError as error:
        raise OSError(str(getattr(error, "orig", None) or error)) from error


def _quoted(path: str) -> str:
    """Only what would change the URI's meaning: MLflow makes folders by the quoted name."""
    return path.replace("%", "%25").replace("?", "%3F").replace("#", "%23")
