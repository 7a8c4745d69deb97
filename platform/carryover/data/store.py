"""A folder of Parquet parts that grows row by row and survives kill -9.

    folder/
      part-000000.parquet ...   whole parts: written under another name, synced, then renamed
      journal.jsonl             a header line, then the rows that are in no part yet
      .lock                     held by the one process that writes

Rows are in the journal as soon as `append` returns, one line for one call, so a killed process
loses none of the rows it was given. The next writer, and every reader, takes the journal's whole
lines and ignores a torn last one; a row that is both in a part and in the journal counts once.
"""

from __future__ import annotations

import errno
import fcntl
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from carryover.durable import PARTIAL, replacing
from carryover.errors import DataError, EnvironmentProblem
from carryover.targets import identity_differences

METADATA_PREFIX = "carryover."
_JOURNAL = "journal.jsonl"
_LOCK = ".lock"


class RowStore:
    """Append-only rows with a unique int64 `id`; one writer at a time.

    Args:
        folder: made if missing.
        schema: of the rows; has a column `id`.
        target: identity of the target that made the rows (`Target.identity()`).
        settings: how the rows were made; JSON-able. Rows made otherwise are refused.
        details: further metadata (engine, versions), recorded with each part, never compared.
        rows_per_part: size of the parts, in rows.

    Raises:
        DataError: the folder holds rows of another target or other settings, or is not such a
            store, or another process is writing to it.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        schema: pa.Schema,
        target: Mapping[str, Any],
        settings: Mapping[str, Any],
        details: Mapping[str, Any] | None = None,
        rows_per_part: int = 4096,
    ) -> None:
        self.folder = Path(folder)
        self.schema = schema
        self.rows_per_part = rows_per_part
        self.metadata = {
            "target": dict(target), "settings": _plain(settings), **_plain(details or {}),
        }  # fmt: skip
        if self.folder.exists() and not self.folder.is_dir():
            raise DataError(f"{self.folder} is a file; rows are kept in a folder: name another")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.folder)
        try:
            self._open()
        except BaseException:
            self._lock.close()
            raise

    def _open(self) -> None:
        for leftover in self.folder.glob(f"*{PARTIAL}"):
            leftover.unlink()
        parts = part_files(self.folder)
        _, rows = _read_journal(self.folder / _JOURNAL)
        if parts or rows:
            _require_same(
                self.folder, expected=self.metadata, found=read_metadata(self.folder) or {}
            )
        self._next_part = 1 + max((int(part.stem.split("-")[1]) for part in parts), default=-1)
        self.ids: set[int] = set()
        for part in parts:
            self.ids.update(_read_part(part, columns=["id"]).column("id").to_pylist())
        self._pending = [row for row in _once(rows) if row["id"] not in self.ids]
        self.ids.update(row["id"] for row in self._pending)
        self._journal: IO[str] | None = None
        self._write_part()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep rows that belong together: after a kill either all of them are there or none.

        They survive the death of this process once this returns.

        Raises:
            ValueError: an id is there already.
            EnvironmentProblem: the disk is full.
        """
        ids = [row["id"] for row in rows]
        repeated = sorted(self.ids.intersection(ids)) or (ids if len({*ids}) < len(ids) else [])
        if repeated:
            raise ValueError(f"{self.folder} already holds rows with the ids {repeated}")
        if self._journal is None:
            raise ValueError(f"{self.folder} is closed")
        kept = [{name: row[name] for name in self.schema.names} for row in rows]
        with _disk_errors(self.folder):
            self._journal.write(json.dumps(kept) + "\n")
            self._journal.flush()
        self._pending += kept
        self.ids.update(ids)
        if len(self._pending) >= self.rows_per_part:
            self._write_part()

    def close(self) -> None:
        """Turn the journal into a last part and give the folder free."""
        if self._journal is None:
            return
        try:
            self._write_part()
            self._journal.close()
            self._journal = None
            (self.folder / _JOURNAL).unlink()
        finally:
            self._lock.close()

    def _write_part(self) -> None:
        """Write the pending rows as one part, then begin an empty journal."""
        with _disk_errors(self.folder):
            if self._pending:
                metadata = {
                    METADATA_PREFIX + key: json.dumps(value) for key, value in self.metadata.items()
                }
                table = pa.Table.from_pylist(
                    self._pending, schema=self.schema.with_metadata(metadata)
                )
                path = self.folder / f"part-{self._next_part:06d}.parquet"
                with replacing(path) as partial:
                    pq.write_table(table, partial, compression="zstd")
                self._next_part += 1
                self._pending = []
            with replacing(self.folder / _JOURNAL) as partial:
                partial.write_text(json.dumps({"metadata": self.metadata}) + "\n")
            if self._journal is not None:
                self._journal.close()
            self._journal = (self.folder / _JOURNAL).open("a", encoding="utf-8")


def part_files(folder: Path) -> list[Path]:
    """The finished parts of a store, in order."""
    return sorted(folder.glob("part-[0-9]*.parquet"))


def is_store(path: Path) -> bool:
    """Whether a folder is (the beginning of) a store."""
    return path.is_dir() and bool(part_files(path) or (path / _JOURNAL).exists())


def read_store(folder: str | Path, schema: pa.Schema) -> pa.Table:
    """Every row of a store once, also while it is being written or after its writer was killed.

    Returns:
        A table with exactly the schema's columns, and the store's metadata.

    Raises:
        DataError: not a store, or a part is damaged or lacks a column.
    """
    folder = Path(folder)
    # The journal first: a row that moves into a part in between is then seen twice, not missed.
    _, rows = _read_journal(folder / _JOURNAL)
    if not is_store(folder):
        raise DataError(f"{folder} holds no part-*.parquet; name the folder that was written to")
    tables = [_read_part(part, columns=schema.names) for part in part_files(folder)]
    metadata = read_metadata(folder) or {}
    schema = schema.with_metadata(
        {METADATA_PREFIX + key: json.dumps(value) for key, value in metadata.items()}
    )
    tables = [conform(table, schema, source=str(folder)) for table in tables]
    known = (
        {number for table in tables for number in table.column("id").to_pylist()} if rows else set()
    )
    fresh = [row for row in _once(rows) if row["id"] not in known]
    return pa.concat_tables([*tables, pa.Table.from_pylist(fresh, schema=schema)])


def read_metadata(path: str | Path) -> dict[str, Any] | None:
    """Metadata of a store or of one Parquet file, without the prefix; None if there is none.

    Raises:
        DataError: a Parquet file is damaged.
    """
    path = Path(path)
    if path.is_dir():
        parts = part_files(path)
        return read_metadata(parts[-1]) if parts else _read_journal(path / _JOURNAL)[0]
    return table_metadata(_open_parquet(path).schema_arrow) or None


def table_metadata(schema: pa.Schema) -> dict[str, Any]:
    """The metadata that this product wrote into a schema, decoded, without the prefix."""
    return {
        key.decode().removeprefix(METADATA_PREFIX): json.loads(value)
        for key, value in (schema.metadata or {}).items()
        if key.decode().startswith(METADATA_PREFIX)
    }


def conform(table: pa.Table, schema: pa.Schema, *, source: str) -> pa.Table:
    """Select and cast a table's columns to the schema.

    Raises:
        DataError: a column is missing or cannot be cast without loss.
    """
    missing = [name for name in schema.names if name not in table.column_names]
    if missing:
        raise DataError(
            f"{source} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}; "
            f"it has {', '.join(table.column_names) or 'none'}"
        )
    try:
        return table.select(schema.names).cast(schema)
    except pa.ArrowInvalid as error:
        raise DataError(f"{source} does not fit the schema: {error}") from None


def _open_parquet(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except FileNotFoundError:
        raise DataError(f"no file at {path}") from None
    except pa.ArrowInvalid as error:
        raise DataError(f"{path} is damaged or not Parquet: {error}; remove it to go on") from None


def _read_part(path: Path, *, columns: Sequence[str]) -> pa.Table:
    file = _open_parquet(path)
    present = [name for name in columns if name in file.schema_arrow.names]
    try:
        return file.read(columns=present)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} is damaged: {error}; remove it to go on") from None


def _read_journal(path: Path) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """Header metadata and whole rows; a torn last line is left out."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return None, []
    try:
        entries = [json.loads(line) for line in lines]
        return entries[0]["metadata"], [row for rows in entries[1:] for row in rows]
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(f"{path} is damaged: {error}; remove it to go on with the parts") from None


def _once(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    seen: set[int] = set()
    for row in rows:
        if row["id"] not in seen:
            seen.add(row["id"])
            yield row


def _require_same(folder: Path, *, expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    differences = identity_differences(expected["target"], found.get("target", {}))
    if differences:
        raise DataError(
            f"{folder} was made with another target ({found.get('target', {}).get('name')!r}):\n  "
            + "\n  ".join(differences)
            + "\nname another output folder, or the target that made this one"
        )
    old, new = found.get("settings", {}), expected["settings"]
    differences = [
        f"{key}: it has {old.get(key)!r}, asked for {new.get(key)!r}"
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key)
    ]
    if differences:
        raise DataError(
            f"{folder} was made with other settings:\n  " + "\n  ".join(differences)
            + "\nname another output folder, or give the settings it was made with"
        )  # fmt: skip


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as they come back from JSON, so that they compare equal after a round trip."""
    return json.loads(json.dumps(dict(values)))


def _lock(folder: Path) -> IO[str]:
    file = (folder / _LOCK).open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise DataError(
            f"another process is writing to {folder}; wait for it, or name another folder"
        ) from None
    return file


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise EnvironmentProblem(
                f"no space left at {folder}; rows written so far are safe: "
                "free some space and run the same command again"
            ) from None
        raise
