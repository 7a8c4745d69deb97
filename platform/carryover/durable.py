"""Files that survive a kill and a power cut: written whole or not at all, and lines that stay."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Ends the name under which a file is written before it gets its own.
PARTIAL = ".partial"
_READ_BACK_BYTES = 65536


def sync(path: Path) -> None:
    """Return once the disk holds a file, or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give another name to write under, then make the file durable and rename it.

    Readers see the file before or after the block, never in between; it is not replaced if the
    block raises. Several processes may do so at once: the last one's file stays.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    try:
        yield partial
        sync(partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file by this content (text as UTF-8) in one step."""
    with replacing(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


def append_line(path: Path, values: Mapping[str, Any]) -> None:
    """Add one line of JSON, and return once the disk has it."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")
        file.flush()
        os.fsync(file.fileno())


def drop_cut_line(path: Path) -> None:
    """Remove a last line that a kill cut off, so that the next one does not continue it."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        while size:
            start = max(0, size - _READ_BACK_BYTES)
            file.seek(start)
            found = file.read(size - start).rfind(b"\n")
            if found >= 0:
                file.truncate(start + found + 1)
                return
            size = start
        file.truncate(0)


def each_line(path: Path) -> Iterator[dict[str, Any]]:
    """Every line of JSON, oldest first; none where there is no file.

    Raises:
        ValueError: a line is not JSON.
    """
    if path.exists():
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every line of JSON that was written to its end, for the one process that also appends.

    Raises:
        ValueError: a line before the last is not JSON.
    """
    drop_cut_line(path)
    return list(each_line(path))
