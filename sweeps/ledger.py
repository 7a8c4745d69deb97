"""What a sweep's folder holds: the truth about what was measured, whatever becomes of processes.

`measurements.jsonl` has a line for each part of a setting that was measured, `trials.jsonl` one for
each trial that ended. Both are only ever appended to, and reach the disk before anything else
happens. Resuming, the searcher's state and early stopping are functions of them. In memory stay a
few numbers for each part, so that a sweep of 100,000 measurements fits the driver.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from carryover.durable import append_line, drop_cut_line, each_line, write_whole
from carryover.errors import ConfigError

# done: all measured. stopped: early. failed: for good. died: its process or node; tried again.
Outcome = Literal["done", "stopped", "failed", "died"]
ENDS = ("done", "stopped", "failed")


@dataclass(frozen=True)
class TrialEnd:
    """How a trial ended.

    Attributes:
        setting: its setting.
        outcome: see `Outcome`.
        reason: why it failed, died or was stopped.
        attempt: from 1.
        start_s: until its engine answered.
        wall_s: of the trial, as it counts itself; of the driver's clock if it died.
        at_s: when, since the epoch.
    """

    setting: str
    outcome: Outcome
    reason: str = ""
    attempt: int = 1
    start_s: float | None = None
    wall_s: float = 0.0
    at_s: float = 0.0


class Ledger:
    """Reads and appends what a sweep's folder holds.

    Args:
        folder: of the sweep; made if missing.
        identity: what must not change between the runs of a sweep. Lists and mappings of which
            both have a key are compared by it, so that arms may be added.
        kept: figures of each part that stay in memory.
        part: key of a row, or several, that tell the parts of a setting apart.

    Attributes:
        figures: by setting and part, the kept figures (NaN where a row has none).
        ends: the last end of each setting's trials.

    Raises:
        ConfigError: the folder belongs to a sweep with other settings.
    """

    def __init__(
        self, folder: Path, identity: Mapping[str, Any], *, kept: Sequence[str], part: Sequence[str]
    ) -> None:
        self.folder, self.kept, self._part = folder, tuple(kept), tuple(part)
        self.rows_file, self.trials_file = folder / "measurements.jsonl", folder / "trials.jsonl"
        self.figures: dict[str, dict[tuple, tuple[float, ...]]] = {}
        self.ends: dict[str, TrialEnd] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._require_same(folder / "identity.json", json.loads(json.dumps(identity)))
        for file in (self.rows_file, self.trials_file):
            drop_cut_line(file)
        for row in self.rows():
            self._keep(row)
        for end in self.trials():
            self.ends[end.setting] = end

    def _require_same(self, file: Path, now: dict[str, Any]) -> None:
        if not file.exists():
            write_whole(file, json.dumps(now, indent=2) + "\n")
            return
        before = json.loads(file.read_text())
        # arms come and go between runs; one of the same name must be the same
        for key in before.keys() & now.keys():
            if isinstance(before[key], dict) and key == "drafters":
                before[key], now[key] = (
                    {name: each[name] for name in before[key].keys() & now[key].keys()}
                    for each in (before[key], now[key])
                )
        if before != now:
            # brings torch, which nothing else here needs
            from carryover.training.config import changed_settings

            lines = changed_settings(before, now)
            raise ConfigError(
                f"{self.folder} holds a sweep with other settings:\n  "
                + "\n  ".join(lines)
                + "\ngive this one another `out`, undo the changes, or remove that folder"
            )

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every measurement, oldest first; of one that was repeated, all."""
        yield from each_line(self.rows_file)

    def trials(self) -> Iterator[TrialEnd]:
        """The end of every trial, oldest first."""
        for line in each_line(self.trials_file):
            yield TrialEnd(**line)

    def part_of(self, row: Mapping[str, Any]) -> tuple:
        """What tells a row from others of its setting."""
        return tuple(row[name] for name in self._part)

    def has(self, setting: str, part: tuple) -> bool:
        """Whether a part of a setting was measured."""
        return part in self.figures.get(setting, {})

    def add(self, row: Mapping[str, Any]) -> bool:
        """Keep a measurement; False if that part was there, and nothing is written."""
        if self.has(row["setting"], self.part_of(row)):
            return False
        append_line(self.rows_file, row)
        self._keep(row)
        return True

    def end(self, end: TrialEnd) -> None:
        """Keep how a trial ended."""
        append_line(self.trials_file, asdict(end))
        self.ends[end.setting] = end

    def is_over(self, setting: str, *, retry_failed: bool = False) -> bool:
        """Whether nothing more is to be done for a setting, though parts may be missing."""
        end = self.ends.get(setting)
        if end is None or end.outcome not in ("stopped", "failed"):
            return False
        return not (retry_failed and end.outcome == "failed")

    def _keep(self, row: Mapping[str, Any]) -> None:
        figures = row["figures"]
        values = tuple(float(figures.get(name, "nan")) for name in self.kept)
        self.figures.setdefault(row["setting"], {})[self.part_of(row)] = values
