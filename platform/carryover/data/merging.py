"""Several files of responses as one, to train on all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from carryover.data.responses import RESPONSES, read_responses, responses_metadata
from carryover.data.store import RowStore, is_store
from carryover.errors import DataError
from carryover.provenance import package_versions
from carryover.targets import identity_differences

_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class MergeSummary:
    """What a merge did.

    Attributes:
        path: folder with the responses.
        rows: in it.
        taken: of them, by source.
        repeated: left out, because an earlier row has the same prompt and the same response.
    """

    path: str
    rows: int
    taken: dict[str, int]
    repeated: int


def merge(sources: Sequence[str | Path], out: str | Path) -> MergeSummary:
    """Write the responses of all sources into one new folder, with ids counted anew.

    Args:
        sources: whatever `read_responses` takes; all of one target.
        out: folder to make.

    Raises:
        DataError: a source cannot be read, no source or not every one was made by one target, or
            the folder holds rows already.
    """
    tables = {str(source): read_responses(source) for source in sources}
    if len(tables) < 2:
        raise DataError("give at least two files or folders of responses to put together")
    if is_store(Path(out)):
        raise DataError(f"{out} holds rows already; name another folder, or remove it")
    target = _common_target(tables)
    seen: set[bytes] = set()
    taken: dict[str, int] = {}
    settings = {"merged": [responses_metadata(table).get("settings") for table in tables.values()]}
    store = RowStore(
        out, schema=RESPONSES, target=target, settings=settings,
        details={"versions": package_versions()},
    )  # fmt: skip
    with store:
        for source, table in tables.items():
            before = len(seen)
            for batch in table.to_batches(max_chunksize=_ROWS_AT_ONCE):
                fresh = []
                for row in batch.to_pylist():
                    digest = _digest(row)
                    if digest not in seen:
                        fresh.append({**row, "id": len(seen)})
                        seen.add(digest)
                store.append(fresh)
            taken[source] = len(seen) - before
    rows = sum(taken.values())
    return MergeSummary(
        str(out), rows, taken, sum(table.num_rows for table in tables.values()) - rows
    )


def _common_target(tables: Mapping[str, pa.Table]) -> dict[str, Any]:
    recorded = {
        source: found
        for source, table in tables.items()
        if (found := responses_metadata(table).get("target")) is not None
    }
    if len(recorded) < len(tables):
        unknown = next(source for source in tables if source not in recorded)
        raise DataError(
            f"{unknown} does not say which target made it; only responses that "
            "`platform data regenerate` wrote can be put together"
        )
    first, *others = recorded
    for source in others:
        differences = identity_differences(recorded[first], recorded[source])
        if differences:
            raise DataError(
                f"{first} and {source} were made by different targets:\n  "
                + "\n  ".join(differences)
            )
    return recorded[first]


def _digest(row: Mapping[str, Any]) -> bytes:
    """Of a row's prompt and response."""
    ids = [len(row["prompt_ids"]), *row["prompt_ids"], *row["response_ids"]]
    return hashlib.blake2b(np.array(ids, np.int64).tobytes(), digest_size=16).digest()
