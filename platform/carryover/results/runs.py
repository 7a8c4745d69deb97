"""Reads benches and training runs from MLflow; no file of a run's own folder is read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from carryover.bench.compare import find_run_id
from carryover.bench.outputs import ROWS
from carryover.bench.recording import EXPERIMENT as BENCH
from carryover.bench.records import Condition, Request, read_requests
from carryover.diagnostics.recording import EXPERIMENT as DIAGNOSTICS
from carryover.diagnostics.recording import KIND_TAG
from carryover.errors import ConfigError
from carryover.tracking import Tracker

if TYPE_CHECKING:
    from carryover.results.kept import KeptRuns

TRAIN, TARGETS = "train", "targets"
_LISTED = 20


@dataclass(frozen=True)
class RunRecord:
    """What MLflow holds of a run.

    Attributes:
        id: MLflow's.
        name: its name, which need not be unique.
        experiment: it belongs to.
        status: `FINISHED`, or how else it ended.
        started: UTC, to the minute.
        params: by name, as JSON text unless text itself.
        metrics: by name, the latest.
        tags: by name.
    """

    id: str
    name: str
    experiment: str
    status: str
    started: str
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    tags: Mapping[str, str]

    @property
    def finished(self) -> bool:
        """Whether it came to its end."""
        return self.status == "FINISHED"

    def param(self, name: str) -> Any:
        """A parameter's value; None if it was not recorded."""
        return _value(self.params.get(name))


@dataclass(frozen=True)
class BenchRun:
    """A bench and every request of it.

    Attributes:
        record: of the parent run.
        mode: `online` or `offline`.
        digest: of the prompts.
        findings: severity and text of what makes it invalid or must be known.
        cores: of the machine that measured; None if it was not recorded.
        requests: all, failed ones included.
    """

    record: RunRecord
    mode: str
    digest: str
    findings: Sequence[tuple[str, str]]
    cores: int | None
    requests: Sequence[Request]

    @property
    def valid(self) -> bool:
        """Whether its figures may be believed."""
        return _value(self.record.tags.get("carryover.valid", "true")) is not False

    @property
    def partial(self) -> str:
        """Why it ended early; empty if it did not."""
        said = self.record.tags.get("carryover.partial", "")
        return said or ("" if self.record.finished else f"the run is {self.record.status}")

    @property
    def settings(self) -> dict[str, Any]:
        """What must be equal for requests of two runs to be about the same thing."""
        names = ("max_tokens", "ignore_eos")
        return {"prompts": self.digest, **{name: self.record.param(name) for name in names}}

    @cached_property
    def by_arm(self) -> dict[tuple[Condition, str], list[Request]]:
        """Requests of each arm under each condition, by prompt."""
        found: dict[tuple[Condition, str], list[Request]] = {}
        for request in sorted(self.requests, key=lambda each: each.prompt_id):
            found.setdefault((request.condition, request.arm), []).append(request)
        return found

    @property
    def conditions(self) -> list[Condition]:
        """Those that were measured, closed loops alone."""
        found = {condition for condition, _ in self.by_arm if condition.rate is None}
        return sorted(found, key=lambda each: (each.temperature, each.concurrency))

    @property
    def arms(self) -> list[str]:
        """Names of those that were measured."""
        return sorted({arm for _, arm in self.by_arm})


class MissingRun(ConfigError):
    """MLflow has no such run."""


class RunReader:
    """Finds and reads runs, each once.

    Args:
        tracker: of the store.
        kept: runs to read where the store has none of that name.
    """

    def __init__(self, tracker: Tracker, kept: KeptRuns | None = None) -> None:
        self._tracker = tracker
        self._kept = kept
        self._benches: dict[str, BenchRun] = {}
        self._records: dict[str, RunRecord] = {}

    def bench(self, name: str, mode: str) -> BenchRun:
        """Read a bench.

        Args:
            name: MLflow id, folder of results, or a name that one bench has.
            mode: `online` or `offline`, which it must be.

        Raises:
            ConfigError: no such bench, or several, or one of the other mode or without rows.
        """
        found = self._find_or_kept(find_run_id(name), BENCH)
        if isinstance(found, str):
            return _of_mode(self._kept.bench(found), mode, name)
        recorded = found.data.tags.get("carryover.bench")
        if recorded is None or "mlflow.parentRunId" in found.data.tags:
            raise ConfigError(f"run {name!r} ({found.info.run_name!r}) is no bench")
        run_id = found.info.run_id
        if run_id not in self._benches:
            self._benches[run_id] = self._read_bench(found)
        return _of_mode(self._benches[run_id], mode, name)

    def training(self, name: str) -> RunRecord:
        """Read a training run of a drafter or of a small target, by name or id.

        Raises:
            ConfigError: no such run, several, or one that is no training.
        """
        record = self._any(name, TRAIN, TARGETS)
        if "carryover.training" not in record.tags:
            raise ConfigError(f"run {name!r} ({record.name!r}) is no training run")
        return record

    def diagnosis(self, name: str) -> RunRecord:
        """Read a headroom or a replay, by name or id.

        Raises:
            ConfigError: no such run, several, or one that is neither.
        """
        record = self._any(name, DIAGNOSTICS)
        if KIND_TAG not in record.tags:
            raise ConfigError(f"run {name!r} ({record.name!r}) is no headroom and no replay")
        return record

    def replay(self, name: str) -> RunRecord:
        """Read a replay that recorded what its drafter carries, by name or id.

        Raises:
            ConfigError: no such run, several, or another one.
        """
        record = self.diagnosis(name)
        if "carried" not in record.params:
            raise ConfigError(
                f"run {name!r} ({record.name!r}) does not say what its drafter carries; repeat it "
                "with `platform checkpoint replay`"
            )
        return record

    def any(self, name: str) -> RunRecord:
        """Read the record of a bench, a training or a diagnosis, by name or id.

        Raises:
            ConfigError: no such run, or several.
        """
        return self._any(name, TRAIN, TARGETS, BENCH, DIAGNOSTICS)

    def keep(self, kept: KeptRuns) -> None:
        """Write all runs that were read from the store."""
        client = self._tracker.client()
        for run_id, run in self._benches.items():
            with TemporaryDirectory() as folder:
                rows = Path(client.download_artifacts(run_id, ROWS, folder))
                kept.keep(run.record, run, rows)
        for run_id, record in self._records.items():
            if run_id not in self._benches:
                kept.keep(record)

    def _any(self, name: str, *experiments: str) -> RunRecord:
        found = self._find_or_kept(name, *experiments)
        if isinstance(found, str):
            return self._kept.record(found)
        record = self._record(found)
        self._records[record.id] = record
        return record

    def _find_or_kept(self, name: str, *experiments: str) -> Any:
        """MLflow's run, or the id of a kept one."""
        try:
            return self._find(name, *experiments)
        except MissingRun:
            found = self._kept.find(name, experiments) if self._kept else None
            if found is None:
                raise
            return found

    def _find(self, name: str, *experiments: str) -> Any:
        client = self._tracker.client()
        if re.fullmatch(r"[0-9a-f]{32}", name):
            try:
                found = client.get_run(name)
            except Exception as error:
                if getattr(error, "error_code", "") != "RESOURCE_DOES_NOT_EXIST":
                    raise
            else:
                if found.info.lifecycle_stage == "active":
                    return found
            raise self._missing(name, experiments)
        named = [run for run in self._parents(experiments) if run.info.run_name == name]
        whole = [run for run in named if run.info.status == "FINISHED"]
        candidates = whole or named
        if not candidates:
            raise self._missing(name, experiments)
        if len(candidates) > 1:
            listed = ", ".join(f"{run.info.run_id} ({_started(run)})" for run in candidates)
            raise ConfigError(
                f"{len(candidates)} runs in {self._tracker.display_uri} are called {name!r}; "
                f"give the id of one: {listed}"
            )
        return candidates[0]

    def _parents(self, experiments: Sequence[str]) -> Iterator[Any]:
        """Runs of the experiments that are not nested, newest first."""
        client = self._tracker.client()
        known = [client.get_experiment_by_name(name) for name in experiments]
        ids = [experiment.experiment_id for experiment in known if experiment is not None]
        token: str | None = None
        while ids:
            page = client.search_runs(
                ids, order_by=["attributes.start_time DESC"], max_results=1000, page_token=token
            )
            yield from (run for run in page if "mlflow.parentRunId" not in run.data.tags)
            token = page.token
            if not token:
                return

    def _missing(self, name: str, experiments: Sequence[str]) -> MissingRun:
        found = [
            f"{run.info.run_name!r} ({run.info.run_id}, {_started(run)})"
            for run in self._parents(experiments)
        ]
        listed = ", ".join(found[:_LISTED]) or "none"
        more = f", and {len(found) - _LISTED} older ones" if len(found) > _LISTED else ""
        where = " or ".join(repr(each) for each in experiments)
        return MissingRun(
            f"no run {name!r} in the experiment {where} of {self._tracker.display_uri}; "
            f"it has: {listed}{more}"
        )

    def _read_bench(self, found: Any) -> BenchRun:
        client, run_id = self._tracker.client(), found.info.run_id
        kept = {file.path for file in client.list_artifacts(run_id)}
        if ROWS not in kept:
            raise ConfigError(
                f"bench {run_id!r} ({found.info.status}) recorded no rows; resume or repeat it"
            )
        with TemporaryDirectory() as folder:

            def read_json(name: str) -> Any:
                if name not in kept:
                    return {}
                return json.loads(Path(client.download_artifacts(run_id, name, folder)).read_text())

            requests = read_requests(Path(client.download_artifacts(run_id, ROWS, folder)))
            findings = [(each["severity"], each["text"]) for each in read_json("findings.json")]
            machine = read_json("start.json").get("machine", {})
        inputs = found.inputs.dataset_inputs
        return BenchRun(
            self._record(found), found.data.tags["carryover.bench"],
            inputs[0].dataset.digest if inputs else "", findings, machine.get("cores"), requests,
        )  # fmt: skip

    def _record(self, found: Any) -> RunRecord:
        info, data = found.info, found.data
        return RunRecord(
            info.run_id, info.run_name, self._tracker.client().get_experiment(
                info.experiment_id).name, info.status, _started(found), data.params, data.metrics,
            data.tags,
        )  # fmt: skip


def _of_mode(run: BenchRun, mode: str, name: str) -> BenchRun:
    if run.mode != mode:
        raise ConfigError(
            f"run {name!r} is an {run.mode} bench and is listed as {mode}; "
            "the two are never mixed, so move it to the other list"
        )
    return run


def _started(run: Any) -> str:
    return datetime.fromtimestamp(run.info.start_time / 1000, UTC).strftime("%Y-%m-%d %H:%M")


def _value(text: str | None) -> Any:
    """What was recorded as this text: JSON, or text itself."""
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        return text
