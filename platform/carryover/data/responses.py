"""Responses that a target gave to prompts: one row each, with the engine's own token ids.

Columns: id (int64, unique), source, category (string), temperature (float32), prompt_ids,
response_ids (list of int32; the response ends with the stop token if it stopped), finish
("stop", or "length" when it was cut).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from carryover.data.lines import read_json_lines
from carryover.data.store import RowStore, conform, is_store, read_store, table_metadata
from carryover.errors import DataError
from carryover.targets import identity_differences

FINISH_REASONS = ("stop", "length")
RESPONSES = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("category", pa.string(), nullable=False),
        pa.field("temperature", pa.float32(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("response_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("finish", pa.string(), nullable=False),
    ]
)


def open_responses(
    folder: str | Path,
    *,
    target: Mapping[str, Any],
    sampling: Mapping[str, Any],
    details: Mapping[str, Any] | None = None,
) -> RowStore:
    """Open a folder of responses for appending; ids that it holds are in `.ids`.

    Args:
        folder: made if missing.
        target: `Target.identity()` of the target that responds.
        sampling: settings that decide what a response is (temperatures, length limit, ...).
        details: further metadata, such as engine and versions.

    Raises:
        DataError: it holds responses of another target or with other settings.
    """
    return RowStore(folder, schema=RESPONSES, target=target, settings=sampling, details=details)


def read_responses(path: str | Path) -> pa.Table:
    """Read responses from a folder of Parquet parts, one Parquet file, or JSON lines.

    Returns:
        A table with the columns of `RESPONSES`; Parquet made by this product keeps its metadata
        (see `responses_metadata`).

    Raises:
        DataError: missing, empty, malformed (with the line number for JSON lines), an id that
            appears twice, or an unknown finish reason.
    """
    path = Path(path)
    if path.is_dir():
        if not is_store(path):
            raise DataError(
                f"{path} holds no part-*.parquet; give the folder that `platform data regenerate` "
                "wrote, a Parquet file or a JSON lines file"
            )
        table = read_store(path, RESPONSES)
    elif not path.exists():
        raise DataError(f"no responses at {path}; make some with: platform data regenerate")
    elif path.suffix == ".parquet":
        table = _read_parquet(path)
    else:
        table = _read_jsonl(path)
    _check(table, path)
    return table


def responses_metadata(table: pa.Table) -> dict[str, Any]:
    """Metadata of a table from `read_responses`: target, settings, engine, versions; or empty."""
    return table_metadata(table.schema)


def require_target(table: pa.Table, identity: Mapping[str, Any], *, source: str | Path) -> None:
    """Check that responses were made by this target.

    Data without a recorded target (JSON lines) is only checked for token ids out of range.

    Raises:
        DataError: they were made by another one.
    """
    recorded = responses_metadata(table).get("target")
    if recorded is not None:
        differences = identity_differences(dict(identity), recorded)
        if differences:
            raise DataError(
                f"{source} was made by another target ({recorded.get('name')!r}):\n  "
                + "\n  ".join(differences)
                + "\nuse that target, or regenerate the responses with this one"
            )
    for column in ("prompt_ids", "response_ids"):
        highest = pc.max(pc.list_flatten(table.column(column))).as_py()
        if highest is not None and highest >= identity["vocab_size"]:
            raise DataError(
                f"{source}: {column} holds token {highest}, but the target's vocabulary has "
                f"{identity['vocab_size']}; these responses were made by another target"
            )


def _read_parquet(path: Path) -> pa.Table:
    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} is damaged or not Parquet: {error}") from None
    metadata = {key: value for key, value in (table.schema.metadata or {}).items()}
    return conform(table, RESPONSES.with_metadata(metadata), source=str(path))


def _read_jsonl(path: Path) -> pa.Table:
    rows = []
    for number, row in read_json_lines(path):
        missing = [name for name in RESPONSES.names if name not in row]
        if missing:
            raise DataError(
                f"{path}, line {number}: no field {', '.join(missing)}; a response has "
                f"{', '.join(RESPONSES.names)}"
            )
        try:
            pa.RecordBatch.from_pylist([row], schema=RESPONSES)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise DataError(f"{path}, line {number}: {error}; in {json.dumps(row)[:120]}") from None
        rows.append(row)
    return pa.Table.from_pylist(rows, schema=RESPONSES)


def _check(table: pa.Table, path: Path) -> None:
    if table.num_rows == 0:
        raise DataError(f"{path} holds no responses")
    for name in RESPONSES.names:
        if table.column(name).null_count:
            raise DataError(f"{path}: the column {name} has empty values")
    unique = pc.count_distinct(table.column("id")).as_py()
    if unique != table.num_rows:
        raise DataError(f"{path}: {table.num_rows - unique} ids appear more than once")
    unknown = set(pc.unique(table.column("finish")).to_pylist()) - set(FINISH_REASONS)
    if unknown:
        raise DataError(
            f"{path}: finish must be one of {', '.join(FINISH_REASONS)}; got {sorted(unknown)}"
        )
