"""Runs kept as files beside the page, so that it can be made again where MLflow has lost them.

`FOLDER/ID.json` is a run's record, and `ID.parquet` the rows of a bench. Paths of the machine that
measured, its name and its user stay out.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from carryover.bench.records import read_requests
from carryover.durable import write_whole
from carryover.errors import ConfigError
from carryover.results.records import without_folders
from carryover.results.runs import BenchRun, RunRecord

# What the page reads of a run's tags.
_TAGS = ("carryover.", "mlflow.source.git.")
_LEFT_OUT = ("carryover.host", "carryover.process", "carryover.run_folder", "carryover.threads.")


class KeptRuns:
    """Reads and writes a folder of kept runs.

    Args:
        folder: need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._names: dict[str, list[tuple[str, str]]] | None = None

    def find(self, name: str, experiments: Sequence[str]) -> str | None:
        """The id of a kept run.

        Args:
            name: its id, or its name if one run of these experiments has it.
            experiments: that it may belong to.

        Raises:
            ConfigError: several are called so.
        """
        if (self.folder / f"{name}.json").is_file():
            return name
        if self._names is None:
            self._names = {}
            for path in sorted(self.folder.glob("*.json")):
                record = self._read(path.stem)["record"]
                found = self._names.setdefault(record["name"], [])
                found.append((record["id"], record["experiment"]))
        ids = [run for run, experiment in self._names.get(name, []) if experiment in experiments]
        if len(ids) > 1:
            raise ConfigError(
                f"{len(ids)} runs in {self.folder} are called {name!r}; give the id of one: "
                f"{', '.join(ids)}"
            )
        return ids[0] if ids else None

    def record(self, run_id: str) -> RunRecord:
        """A run's record.

        Raises:
            ConfigError: its file is damaged.
        """
        return RunRecord(**self._read(run_id)["record"])

    def bench(self, run_id: str) -> BenchRun:
        """A bench and its requests.

        Raises:
            ConfigError: it is no bench, or its files are damaged.
        """
        values = self._read(run_id)
        rows = self.folder / f"{run_id}.parquet"
        if values["bench"] is None or not rows.is_file():
            raise ConfigError(f"{self.folder / run_id}.json is no bench with rows")
        described = {**values["bench"]}
        described["findings"] = [tuple(each) for each in described["findings"]]
        return BenchRun(
            record=RunRecord(**values["record"]), requests=read_requests(rows), **described
        )

    def keep(
        self, record: RunRecord, bench: BenchRun | None = None, rows: Path | None = None
    ) -> None:
        """Write a run, or write it again.

        Args:
            record: what MLflow holds of it.
            bench: itself, if it is one.
            rows: the file of its requests.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        described = None
        if bench is not None:
            described = {
                "mode": bench.mode, "digest": bench.digest, "findings": [
                    (severity, without_folders(text)) for severity, text in bench.findings
                ],
                "cores": bench.cores,
            }  # fmt: skip
            shutil.copyfile(rows, self.folder / f"{record.id}.parquet")
        values = {"record": _portable(asdict(record)), "bench": described}
        text = json.dumps(values, indent=1, sort_keys=True) + "\n"
        write_whole(self.folder / f"{record.id}.json", text)

    def _read(self, run_id: str) -> dict[str, Any]:
        path = self.folder / f"{run_id}.json"
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}; restore it") from None


def _portable(record: dict[str, Any]) -> dict[str, Any]:
    tags = {
        key: without_folders(str(value))
        for key, value in record["tags"].items()
        if key.startswith(_TAGS) and not key.startswith(_LEFT_OUT)
    }
    params = {key: without_folders(str(value)) for key, value in record["params"].items()}
    return {**record, "tags": tags, "params": params}
