"""The audit log: one JSON line for every change of the split, on disk before it takes effect.

A line that a crash cut short is left as it is, skipped when read, and never glued to the next.
"""

from __future__ import annotations

import json
import os
from collections import deque
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from carryover.config import Config


class AuditEntry(Config):
    """Who changed what, and why.

    Attributes:
        time_s: seconds since the epoch.
        who: `user@host`, `guard`, `ramp`, `configuration`, or an ingress replica.
        action: one word, such as `set` or `rollback`.
        experiment: its name.
        version: of the split after the change.
        before: the earlier state, as far as people care.
        after: the next one.
        why: in the person's own words, or the guard's reason.
    """

    time_s: float
    who: str
    action: str
    experiment: str
    version: int
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    why: str = ""


class AuditLog:
    """An append-only file of entries.

    Args:
        path: made when absent, with its folder.
        read_only: another process writes it.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        if read_only:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        # Also proves at the start that the log can be written.
        with open(path, "ab") as file:
            torn = file.tell() > 0 and not _ends_with_newline(path)
            if torn:
                _write(file, b"\n")

    def append(self, entry: AuditEntry) -> None:
        """Write an entry, and return once the disk has it.

        Raises:
            OSError: the disk is full or gone; nothing may take effect then.
        """
        line = json.dumps(entry.model_dump(mode="json"), ensure_ascii=False, allow_nan=False)
        with open(self.path, "ab") as file:
            start = file.tell()
            try:
                _write(file, line.encode() + b"\n")
            except OSError:
                # Half a line would be glued to the next one.
                os.truncate(self.path, start)
                raise

    def read(self, last: int | None = None) -> tuple[list[AuditEntry], int]:
        """Read entries, oldest first.

        Args:
            last: only so many; None reads all.

        Returns:
            The entries, and how many lines of the whole file could not be read.
        """
        if not self.path.exists():
            return [], 0
        entries: deque[AuditEntry] = deque(maxlen=last)
        unreadable = 0
        with open(self.path, encoding="utf-8", errors="replace") as file:
            for line in file:
                if not line.strip():
                    continue
                try:
                    entries.append(AuditEntry.model_validate_json(line))
                except ValidationError:
                    unreadable += 1
        return list(entries), unreadable


def _write(file: Any, data: bytes) -> None:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
