"""Records of runs in MLflow: parameters, metrics, files, provenance, and always an end.

The only file that imports MLflow, and it does so when a store is first opened. The default store
is `mlflow.db` (SQLite) with artifacts in `mlartifacts/`, both in the working folder; an MLflow
tracking server or another database is used by URI. Write from one process, the driver, to which
workers report.

What cannot be delivered while a run goes on (a server that restarts) is kept and tried again, so
that an outage never ends a training; what is still undelivered at the end is logged as an error.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from carryover import provenance
from carryover.errors import ConfigError, EnvironmentProblem
from carryover.guardian import identity, is_running
from carryover.stores import (
    artifact_folder,
    check_database,
    database_file,
    is_server,
    store_uri,
    without_password,
)

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

MAX_METRICS_PER_REQUEST = 1000
MAX_PARAMS_PER_REQUEST = 100
RETRY_AFTER_S = 20.0
CLOSING_ATTEMPTS = 3
PROCESS_TAG = "carryover.process"
HOST_TAG = "carryover.host"
ERROR_TAG = "carryover.error"
# MLflow's own defaults retry an unreachable server for minutes, print URLs and bars between a
# command's results, and report usage. What the user has set is kept.
_MLFLOW_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}

logger = logging.getLogger(__name__)


class Tracker:
    """Opens a store once and starts runs in it.

    Args:
        uri: see `stores.store_uri`.
        folder: working folder of the default store; default: the current one.

    Raises:
        ConfigError: MLflow cannot write to such a URI.
    """

    def __init__(self, uri: str | None = None, *, folder: Path | None = None) -> None:
        self.uri = store_uri(uri, folder=folder)
        self.display_uri = without_password(self.uri)
        self._lock = threading.RLock()
        self._client: MlflowClient | None = None
        self._experiments: dict[str, str] = {}

    def open(self, *experiments: str) -> None:
        """Create the schema and the named experiments now; a store that is down fails here.

        Raises:
            EnvironmentProblem: the store cannot be reached, read or written.
            ConfigError: an experiment of that name was deleted.
        """
        with self._lock, self._exclusive():
            self.client()
            for name in experiments:
                if name not in self._experiments:
                    self._experiments[name] = self._find_or_create(name)

    @contextmanager
    def run(
        self,
        *,
        experiment: str,
        name: str,
        tags: Mapping[str, Any] | None = None,
        parent: Run | str | None = None,
        run_id: str | None = None,
    ) -> Iterator[Run]:
        """Record what happens inside the `with` block as one run.

        The run ends FINISHED, FAILED (an exception) or KILLED (Ctrl-C or SIGTERM). One whose
        process was killed outright is closed as KILLED when this machine next opens the store.

        Args:
            experiment: created when absent.
            name: shown by MLflow; need not be unique.
            tags: added to the provenance tags.
            parent: the run, or its id, under which MLflow nests this one.
            run_id: continue this run instead of starting one.

        Raises:
            EnvironmentProblem: the store cannot be reached, read or written.
            ConfigError: no run `run_id`, or the experiment was deleted.
        """
        self.open(experiment)
        all_tags = {**self._provenance_tags, **_process_tags(), **(tags or {})}
        if parent is not None:
            all_tags["mlflow.parentRunId"] = parent if isinstance(parent, str) else parent.id
        if run_id is None:
            run = self._start(experiment, name, all_tags)
        else:
            run = self._continue(experiment, run_id, all_tags)
        status = "FINISHED"
        try:
            yield run
        except BaseException as error:
            status = _status_after(error)
            if status != "FINISHED":
                run.set_tags({ERROR_TAG: f"{type(error).__name__}: {error}"[:1000]})
            raise
        finally:
            try:
                run.close(status)
            except KeyboardInterrupt:
                run.close("KILLED")
                raise

    def client(self) -> MlflowClient:
        """The connected MLflow client; connects at the first call.

        Raises:
            EnvironmentProblem: the store cannot be reached, read or written.
        """
        with self._lock:
            if self._client is None:
                try:
                    self._client = self._connect()
                except Exception as error:
                    self._fail(error)
            return self._client

    def _connect(self) -> MlflowClient:
        for name, value in _MLFLOW_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from mlflow.tracking import MlflowClient

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        if not is_server(self.uri):
            check_database(self.uri)
        client = MlflowClient(tracking_uri=self.uri)
        experiments = [found.experiment_id for found in client.search_experiments()]
        if experiments:
            _close_orphans(client, experiments)
        return client

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Let one process at a time create the schema of an SQLite file."""
        file = database_file(self.uri)
        if file is None or self._client is not None:
            yield
            return
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(f"{file}.lock", os.O_WRONLY | os.O_CREAT, 0o666)
        except OSError as error:
            self._fail(error)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _find_or_create(self, name: str) -> str:
        client = self.client()
        location = None if is_server(self.uri) else artifact_folder(self.uri).as_uri()
        try:
            found = client.get_experiment_by_name(name)
            if found is None:
                try:
                    return client.create_experiment(name, artifact_location=location)
                except Exception as error:
                    if getattr(error, "error_code", "") != "RESOURCE_ALREADY_EXISTS":
                        raise
                found = client.get_experiment_by_name(name)
        except Exception as error:
            self._fail(error)
        if found.lifecycle_stage == "deleted":
            raise ConfigError(
                f"the experiment {name!r} was deleted in {self.display_uri}; restore it with "
                f"`mlflow experiments restore -x {found.experiment_id}`, or choose another name"
            )
        return found.experiment_id

    def _start(self, experiment: str, name: str, tags: Mapping[str, Any]) -> Run:
        try:
            started = self.client().create_run(
                self._experiments[experiment], run_name=name, tags=_texts(tags)
            )
        except Exception as error:
            self._fail(error)
        return Run(self, started.info.run_id, self._experiments[experiment], experiment)

    def _continue(self, experiment: str, run_id: str, tags: Mapping[str, Any]) -> Run:
        client = self.client()
        try:
            known = client.get_run(run_id)
            run = Run(self, run_id, known.info.experiment_id, experiment)
            run.known_params.update(known.data.params)
            run.set_tags(tags)
            client.update_run(run_id, status="RUNNING")
        except Exception as error:
            if getattr(error, "error_code", "") == "RESOURCE_DOES_NOT_EXIST":
                raise ConfigError(f"no run {run_id!r} in {self.display_uri} to continue") from None
            self._fail(error)
        return run

    @cached_property
    def _provenance_tags(self) -> dict[str, Any]:
        found = provenance.collect()
        hardware, threads = found["hardware"], found["hardware"]["threads"]
        tags = {
            "mlflow.user": found["user"],
            "mlflow.source.type": "LOCAL",
            "mlflow.source.name": " ".join(found["argv"]),
            "carryover.python": found["python"],
            "carryover.cpu": hardware["cpu"],
            "carryover.cores": hardware["cores"],
            "carryover.memory_bytes": hardware["memory_bytes"],
            "carryover.gpus": ", ".join(hardware.get("gpus", [])),
        }
        tags |= {f"carryover.threads.{name}": value for name, value in threads.items()}
        tags |= {f"carryover.version.{name}": value for name, value in found["packages"].items()}
        if found["git"]:
            tags["mlflow.source.git.commit"] = found["git"]["commit"]
            tags["mlflow.source.git.dirty"] = found["git"]["dirty"]
        return {name: value for name, value in tags.items() if value != ""}

    def _fail(self, error: Exception) -> NoReturn:
        if isinstance(error, ConfigError | EnvironmentProblem):
            raise error
        reason = _first_line(error)
        if "Max retries exceeded" in reason:
            reason = "nothing answers there"
        if "out-of-date database schema" in reason:
            fix = f"back it up and run `mlflow db upgrade {self.display_uri}`, or use another store"
        elif database_file(self.uri):
            fix = "check that the folder is writable and the file is MLflow's, or move it away"
        else:
            fix = "start it, or correct or leave out --tracking-uri and MLFLOW_TRACKING_URI"
        raise EnvironmentProblem(
            f"cannot use the MLflow store {self.display_uri}: {reason}; {fix}"
        ) from error


class Run:
    """One MLflow run in progress; made by `Tracker.run`.

    Attributes:
        id: MLflow's id of the run.
        experiment: name of its experiment.
        url: the run's page on a tracking server; None for a database, which `platform ui` shows.
    """

    def __init__(self, tracker: Tracker, run_id: str, experiment_id: str, experiment: str) -> None:
        self.id = run_id
        self.experiment = experiment
        self.url = None
        if tracker.uri.startswith("http"):
            page = f"/#/experiments/{experiment_id}/runs/{run_id}"
            self.url = tracker.display_uri.rstrip("/") + page
        self.known_params: dict[str, str] = {}
        self._tracker = tracker
        self._lock = threading.RLock()
        self._waiting: deque[Callable[[MlflowClient], Any]] = deque()
        self._retry_at = 0.0

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Record settings; nested mappings get dotted names, lists are written as JSON.

        MLflow's parameters never change: where a continued run differs from its first start, the
        new value becomes the tag `changed.NAME`.
        """
        from mlflow.entities import Param

        flat = _texts(_flatten(params))
        known = self.known_params
        changed = {k: v for k, v in flat.items() if k in known and known[k] != v}
        fresh = {k: v for k, v in flat.items() if k not in known}
        known.update(fresh)
        items = [Param(name, value) for name, value in fresh.items()]
        for batch in _batches(items, MAX_PARAMS_PER_REQUEST):
            self._write(lambda client, batch=batch: client.log_batch(self.id, params=batch))
        if changed:
            logger.warning("settings changed since the run began: %s", ", ".join(sorted(changed)))
            self.set_tags({f"changed.{name}": value for name, value in changed.items()})

    def log_metrics(self, metrics: Mapping[str, Any], step: int = 0) -> None:
        """Record numbers (anything that `float()` takes) at a step."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        items = [Metric(name, float(value), now_ms, int(step)) for name, value in metrics.items()]
        for batch in _batches(items, MAX_METRICS_PER_REQUEST):
            self._write(lambda client, batch=batch: client.log_batch(self.id, metrics=batch))

    def log_dict(self, value: Any, filename: str) -> None:
        """Store a JSON-able value, as it is now, as the artifact `filename`."""
        self.log_text(json.dumps(value, indent=2, default=str) + "\n", filename)

    def log_text(self, text: str, filename: str) -> None:
        """Store text as the artifact `filename`."""
        self._write(lambda client: client.log_text(self.id, text, filename))

    def log_file(self, path: str | Path, folder: str | None = None) -> None:
        """Store a copy of a file, in `folder` among the run's artifacts.

        Raises:
            FileNotFoundError: no such file.
        """
        path = Path(path).absolute()
        if not path.is_file():
            raise FileNotFoundError(path)
        self._write(lambda client: client.log_artifact(self.id, str(path), folder))

    def log_input(
        self, *, name: str, digest: str, source: str, profile: Mapping[str, Any]
    ) -> None:
        """Record what the run read, so that MLflow lists the runs that read the same.

        Args:
            name: of the data.
            digest: of its content; MLflow takes up to 36 characters.
            source: where it came from.
            profile: JSON-able facts about it, such as row counts.
        """
        from mlflow.entities import Dataset, DatasetInput

        entry = Dataset(
            name=name, digest=digest, source_type="carryover",
            source=json.dumps({"path": source}), profile=json.dumps(dict(profile)),
        )  # fmt: skip
        self._write(lambda client: client.log_inputs(self.id, datasets=[DatasetInput(entry)]))

    def set_tags(self, tags: Mapping[str, Any]) -> None:
        """Set or replace tags."""
        from mlflow.entities import RunTag

        items = [RunTag(name, value) for name, value in _texts(tags).items()]
        for batch in _batches(items, MAX_PARAMS_PER_REQUEST):
            self._write(lambda client, batch=batch: client.log_batch(self.id, tags=batch))

    @contextmanager
    def child(self, name: str, tags: Mapping[str, Any] | None = None) -> Iterator[Run]:
        """Record what happens inside the `with` block as a run nested under this one."""
        start = self._tracker.run
        with start(experiment=self.experiment, name=name, tags=tags, parent=self) as run:
            yield run

    def close(self, status: str) -> None:
        """Deliver what is waiting and set the terminal status; problems are logged, not raised."""
        with self._lock:
            self._retry_at = 0.0
            for _ in range(CLOSING_ATTEMPTS):
                self._deliver(at_end=True)
            lost, self._waiting = len(self._waiting), deque()
            self._waiting.append(lambda client: client.set_terminated(self.id, status))
            self._deliver(at_end=True)
            if lost or self._waiting:
                logger.error(
                    "MLflow store %s: %d records of run %s were lost%s",
                    self._tracker.display_uri, lost, self.id,
                    f", and its status {status}" if self._waiting else "",
                )  # fmt: skip

    def _write(self, write: Callable[[MlflowClient], Any]) -> None:
        with self._lock:
            self._waiting.append(write)
            self._deliver()

    def _deliver(self, *, at_end: bool = False) -> None:
        """Send what waits, in order, up to the first failure; then wait a while before the next."""
        if time.monotonic() < self._retry_at and not at_end:
            return
        while self._waiting:
            try:
                self._waiting[0](self._tracker.client())
            except Exception as error:
                if getattr(error, "error_code", "") == "INVALID_PARAMETER_VALUE":
                    self._waiting.popleft()
                    if not at_end:
                        raise
                    continue
                logger.warning(
                    "MLflow store %s does not take records now (%s); keeping %d to try again",
                    self._tracker.display_uri, _first_line(error), len(self._waiting),
                )  # fmt: skip
                self._retry_at = time.monotonic() + RETRY_AFTER_S
                # the next call starts with another record: one bad file must not hold up the rest
                self._waiting.rotate(-1)
                return
            self._waiting.popleft()


def _close_orphans(client: MlflowClient, experiments: list[str]) -> None:
    """Close runs whose process on this machine is gone, which SIGKILL leaves RUNNING."""
    wanted = f"attributes.status = 'RUNNING' AND tags.`{HOST_TAG}` = '{_machine()}'"
    for run in client.search_runs(experiments, filter_string=wanted, max_results=1000):
        if not is_running(run.data.tags.get(PROCESS_TAG, "")):
            client.set_tag(run.info.run_id, ERROR_TAG, "the process was killed")
            client.set_terminated(run.info.run_id, "KILLED")


def _machine() -> str:
    """This boot of this machine and its process numbers: elsewhere a process id means nothing."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        boot, space = "", 0
    return f"{socket.gethostname()}:{boot}:{space}"


def _process_tags() -> dict[str, str]:
    return {HOST_TAG: _machine(), PROCESS_TAG: identity(os.getpid())}


def _status_after(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
        return "KILLED"
    return "FINISHED" if isinstance(error, SystemExit) and not error.code else "FAILED"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: value if isinstance(value, str) else json.dumps(value, default=str)
        for name, value in values.items()
    }


def _batches(items: list, size: int) -> Iterator[list]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
