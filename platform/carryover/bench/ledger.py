"""The folder of a bench while it runs: what is finished survives a kill.

folder/
  bench.yaml       the settings
  bench.json       what was found at the start: arms, prompts, who records it
  units.jsonl      one line for each finished unit, synced to disk before the next begins
  sessions.jsonl   one line for each process that worked on it and came to an end
  requests.parquet, requests.csv, report.html, ...   written at the end
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from carryover.bench.records import Request
from carryover.bench.workload import Unit
from carryover.config import Config
from carryover.durable import append_line, read_lines
from carryover.errors import ConfigError

SETTINGS, START = "bench.yaml", "bench.json"
UNITS, SESSIONS = "units.jsonl", "sessions.jsonl"


@dataclass(frozen=True)
class Measured:
    """A finished unit.

    Attributes:
        key: of the unit.
        wall_s: how long it took.
        requests: of it, failed ones included.
        counted: vLLM's counters over it by name, where they were read around it.
    """

    key: str
    wall_s: float
    requests: list[Request]
    counted: dict[str, float] | None = None


@dataclass
class Ledger:
    """The folder of one bench; made by `create` or `resume`."""

    folder: Path
    start: dict[str, Any]
    done: dict[str, Measured] = field(default_factory=dict)
    sessions: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def create(cls, config: Any, mode: str, start: dict[str, Any]) -> Ledger:
        """Make a folder for a new bench.

        Args:
            config: its settings; `out` says where.
            mode: `online` or `offline`.
            start: JSON-able record of what was found.
        """
        folder = config.out / datetime.now().strftime(f"%Y%m%d-%H%M%S-%f-{mode}")
        folder.mkdir(parents=True)
        (folder / SETTINGS).write_text(config.to_yaml())
        ledger = cls(folder, {"mode": mode, **start})
        ledger.write_start()
        return ledger

    @classmethod
    def resume(cls, folder: Path) -> Ledger:
        """Open the folder of a bench that was cut short.

        Raises:
            ConfigError: it holds no bench.
        """
        try:
            start = json.loads((folder / START).read_text())
        except (OSError, ValueError):
            raise ConfigError(
                f"{folder} holds no bench to resume (no readable {START}); give the folder that "
                "the interrupted command named"
            ) from None
        ledger = cls(folder, start)
        for row in read_lines(folder / UNITS):
            requests = [Request.from_row(values) for values in row.pop("requests")]
            ledger.done[row["key"]] = Measured(**row, requests=requests)
        ledger.sessions = read_lines(folder / SESSIONS)
        return ledger

    def check(self, mode: str, **found: Any) -> None:
        """Refuse to go on with a bench of another kind, or where what is measured has changed.

        Raises:
            ConfigError: tells what differs.
        """
        if self.start["mode"] != mode:
            raise ConfigError(
                f"{self.folder} is an {self.start['mode']} bench; resume it with "
                f"`platform bench {self.start['mode']} --resume`"
            )
        known = json.loads(json.dumps(found, default=str))
        for name, value in known.items():
            if self.start[name] != value:
                raise ConfigError(
                    f"{name} changed since the bench in {self.folder} began: "
                    f"{_short(self.start[name])} then, {_short(value)} now; begin a new bench"
                )

    def write_start(self) -> None:
        """Write what was found at the start."""
        text = json.dumps(self.start, indent=2, default=str)
        (self.folder / START).write_text(text + "\n")

    def keep(
        self,
        unit: Unit,
        requests: Sequence[Request],
        *,
        wall_s: float,
        counted: dict[str, float] | None,
    ) -> None:
        """Take in a finished unit, on disk before anything else happens."""
        measured = Measured(unit.key, wall_s, list(requests), counted)
        rows = [request.to_row() for request in requests]
        line = {"key": unit.key, "wall_s": wall_s, "counted": counted, "requests": rows}
        append_line(self.folder / UNITS, line)
        self.done[unit.key] = measured

    def end_session(self, session: dict[str, Any]) -> None:
        """Take in what this process saw beside the requests, such as counters."""
        append_line(self.folder / SESSIONS, session)
        self.sessions.append(session)

    @property
    def requests(self) -> list[Request]:
        """Of all finished units."""
        return [request for measured in self.done.values() for request in measured.requests]


def load_settings(folder: Path, kind: type[Config]) -> Any:
    """The settings of the bench in a folder.

    Raises:
        ConfigError: there are none, or not of this kind.
    """
    if not (folder / SETTINGS).is_file():
        raise ConfigError(
            f"{folder} holds no bench to resume (no {SETTINGS}); give the folder that the "
            "interrupted command named"
        )
    return kind.load(folder / SETTINGS)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 200 else text[:200] + "..."
