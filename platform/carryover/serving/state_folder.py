"""The folder in which the controller keeps its state, so that nothing is lost when it restarts.

`traffic.json` holds the state and the audit entry that led to it, replaced as a whole; then the
entry is appended to `audit.jsonl`. If a crash comes between the two, the next start appends it.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from carryover.config import Config
from carryover.durable import write_whole
from carryover.errors import ServingError
from carryover.serving.audit import AuditEntry, AuditLog
from carryover.serving.changes import State


class Saved(Config):
    """The content of `traffic.json`.

    Attributes:
        state: in force.
        entry: of the audit log, that led to it.
        configured: what the application's arguments last asked for; a change of it is taken over,
            the same again is not, so that it cannot undo what people set since.
        user_config: what Serve's `user_config` changed since; empty without one.
        run_id: of the experiment in MLflow; None before its first record.
    """

    state: State
    entry: AuditEntry
    configured: dict[str, Any]
    user_config: dict[str, Any] = {}
    run_id: str | None = None


class StateFolder:
    """Files of one application's split; one process at a time may write them.

    Args:
        path: the folder; made when absent.
        lock_timeout_s: how long an earlier controller may take to go away.

    Attributes:
        saved: what `traffic.json` holds; None while there is none.
        is_owner: whether this process may write; another one has the folder otherwise.

    Raises:
        ServingError: the folder cannot be used.
    """

    def __init__(self, path: Path, *, lock_timeout_s: float = 0.0) -> None:
        self.path = path
        self.saved: Saved | None = None
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / "controller.lock", os.O_RDWR | os.O_CREAT, 0o644)
            self.is_owner = _lock(self._lock, lock_timeout_s)
            self.audit = AuditLog(path / "audit.jsonl", read_only=not self.is_owner)
        except OSError as error:
            raise ServingError(
                f"cannot use the state folder {path}: {error.strerror or error}; make it writable, "
                "or set traffic.state to another"
            ) from None

    def load(self) -> Saved | None:
        """Read the state, and complete the audit log if the last crash came between the two.

        Raises:
            ServingError: the file is damaged.
        """
        values = self._read("traffic.json")
        if values is None:
            return None
        try:
            saved = Saved.model_validate(values)
        except ValidationError as error:
            problem = error.errors()[0]
            raise ServingError(
                f"{self.path / 'traffic.json'} is not a state of the split "
                f"({'.'.join(map(str, problem['loc']))}: {problem['msg']}); move it away to begin "
                "with the configuration's weights"
            ) from None
        if self.is_owner and saved.entry not in self.audit.read()[0]:
            self.audit.append(saved.entry)
        self.saved = saved
        return saved

    def save(self, saved: Saved) -> None:
        """Write the state, then its audit entry if it is new; returns once the disk has both.

        Raises:
            OSError: the disk is full or gone; the earlier state still holds.
            ServingError: another process has the folder.
        """
        if not self.is_owner:
            raise ServingError(
                f"another application still has the state folder {self.path}: change the split "
                "there, or wait until it is gone; if it is to stay, set traffic.state to another"
            )
        self._write("traffic.json", saved.model_dump(mode="json"))
        try:
            if self.saved is None or saved.entry != self.saved.entry:
                self.audit.append(saved.entry)
        except OSError:
            # Without its line in the log, no change may come back with the next start.
            if self.saved is None:
                (self.path / "traffic.json").unlink()
            else:
                self._write("traffic.json", self.saved.model_dump(mode="json"))
            raise
        self.saved = saved

    def load_results(self) -> dict[str, Any] | None:
        """Read what `save_results` wrote; None if there is nothing."""
        return self._read("results.json")

    def save_results(self, results: dict[str, Any]) -> None:
        """Write the statistics.

        Raises:
            OSError: the disk is full or gone.
        """
        self._write("results.json", results)

    def put_results_aside(self, now: float) -> Path:
        """Rename statistics that cannot be read; returns their new path."""
        kept = self.path / f"results-unreadable-{now:.0f}.json"
        os.replace(self.path / "results.json", kept)
        return kept

    def archive_results(self, results: dict[str, Any]) -> None:
        """Put the statistics of an experiment that is over aside, as `results-NAME-BEGAN.json`."""
        name = f"results-{results['experiment']}-{results['began_s']:.0f}.json"
        self._write(name, results)

    @property
    def is_open(self) -> bool:
        """Whether this process has the folder."""
        return self._lock >= 0

    def close(self) -> None:
        """Give the folder back."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _read(self, name: str) -> dict[str, Any] | None:
        path = self.path / name
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ServingError(
                f"cannot read {path}: {error}; move it away to begin without it"
            ) from None

    def _write(self, name: str, values: dict[str, Any]) -> None:
        """Replace a file as a whole: a reader, or a crash, sees the old one or the new one."""
        write_whole(self.path / name, json.dumps(values, ensure_ascii=False, allow_nan=False))


def _lock(descriptor: int, timeout_s: float) -> bool:
    """Whether the lock could be had."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.2)
