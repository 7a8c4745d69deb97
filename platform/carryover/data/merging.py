"""Several files of responses as one, to train on all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
            fresh = [row for row, digest in enumerate(_digests(table)) if _add(digest, seen)]
            taken[source] = len(fresh)
            for rows in np.array_split(fresh, -(-len(fresh) // _ROWS_AT_ONCE) or 1):
                part = table.take(pa.array(rows, pa.int64())).to_pylist()
                first = len(store.ids)
                store.append([{**row, "id": first + place} for place, row in enumerate(part)])
    rows = sum(taken.values())
    return MergeSummary(
        str(out), rows, taken, sum(table.num_rows for table in tables.values()) - rows
    )


def _common_target(tables: dict[str, pa.Table]) -> dict:
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


def _digests(table: pa.Table) -> list[bytes]:
    """A digest of each row's prompt and response."""
    digests = []
    columns = [table.column(name).combine_chunks() for name in ("prompt_ids", "response_ids")]
    values = [column.flatten().to_numpy(zero_copy_only=False) for column in columns]
    ends = [np.cumsum([0, *column.value_lengths().to_numpy()]) for column in columns]
    for row in range(table.num_rows):
        digest = hashlib.blake2b(digest_size=16)
        for tokens, at in zip(values, ends, strict=True):
            ids = tokens[at[row] : at[row + 1]]
            digest.update(len(ids).to_bytes(8, "little"))
            digest.update(ids.tobytes())
        digests.append(digest.digest())
    return digests


def _add(digest: bytes, seen: set[bytes]) -> bool:
    if digest in seen:
        return False
    seen.add(digest)
    return True
