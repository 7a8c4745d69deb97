"""However often a writer dies, a store loses no whole write, splits none, and repeats none."""

import json
import tempfile
from pathlib import Path

import pyarrow as pa
from hypothesis import example, given, settings
from hypothesis import strategies as st

from carryover.data.store import RowStore, read_store

SCHEMA = pa.schema([pa.field("id", pa.int64()), pa.field("words", pa.list_(pa.int32()))])


def open_store(folder, rows_per_part):
    return RowStore(folder, schema=SCHEMA, target={}, settings={}, rows_per_part=rows_per_part)


@settings(max_examples=40, deadline=None)
@given(
    groups=st.lists(st.integers(1, 4), min_size=1, max_size=12),
    lives=st.lists(
        st.tuples(st.integers(0, 8), st.none() | st.integers(0, 200)), min_size=1, max_size=6
    ),
    rows_per_part=st.integers(1, 12),
)
@example(groups=[1, 2, 1], lives=[(2, 0)], rows_per_part=12)
@example(groups=[1, 2, 1], lives=[(2, 5), (1, None)], rows_per_part=12)
@example(groups=[2, 2, 2], lives=[(2, 1), (1, 0)], rows_per_part=3)
def test_work_resumes_after_any_kills(groups, lives, rows_per_part):
    """Each life writes some groups, then ends well (None) or is killed with the last line of the
    journal torn so many bytes before its end; 0 leaves it whole."""
    wanted, start = [], 0
    for size in groups:
        wanted.append([{"id": start + i, "words": [start, i]} for i in range(size)])
        start += size
    expected: set[int] = set()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for count, torn in [*lives, (len(wanted), None)]:
            store = open_store(folder, rows_per_part)
            assert store.ids == expected, "a whole write was lost, or half of one was kept"
            todo = [group for group in wanted if group[0]["id"] not in store.ids]
            for group in todo[:count]:
                store.append(group)
                expected.update(row["id"] for row in group)
            if torn is None:
                store.close()
            else:
                store._lock.close()
                expected.difference_update(_tear(folder / "journal.jsonl", torn))
        found = read_store(folder, SCHEMA).to_pylist()
    assert sorted(found, key=lambda row: row["id"]) == [row for group in wanted for row in group]


def _tear(journal, torn):
    """Cut the journal inside its last line (not the header, which is there from the start), and
    return the ids of the rows in it."""
    content = journal.read_bytes()
    lines = content.splitlines(keepends=True)
    if len(lines) < 2:
        return set()
    if torn == 0:
        return set()
    journal.write_bytes(content[: len(content) - min(torn, len(lines[-1]))])
    return {row["id"] for row in json.loads(lines[-1])}
