"""A store of rows: durable, unique, of one target and one kind of settings."""

import json
import signal
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from carryover.data import store as store_module
from carryover.data.store import RowStore, part_files, read_metadata, read_store
from carryover.errors import DataError, EnvironmentProblem

SCHEMA = pa.schema([pa.field("id", pa.int64()), pa.field("text", pa.string())])
TARGET = {"name": "a", "architecture": "A", "vocab_size": 8}
SETTINGS = {"temperatures": (0.0, 0.5)}


def open_store(folder, *, target=TARGET, settings=SETTINGS, **options):
    return RowStore(folder, schema=SCHEMA, target=target, settings=settings, **options)


def row(number):
    return {"id": number, "text": f"row {number}"}


def ids(folder):
    return read_store(folder, SCHEMA).column("id").to_pylist()


def test_rows_and_metadata_come_back(tmp_path):
    with open_store(tmp_path / "s", details={"engine": {"name": "vllm"}}) as store:
        store.append([row(3), row(1)])
        store.append([row(2)])
    table = read_store(tmp_path / "s", SCHEMA)
    assert table.to_pylist() == [row(3), row(1), row(2)]
    metadata = read_metadata(tmp_path / "s")
    assert metadata["target"] == TARGET
    assert metadata["settings"] == {"temperatures": [0.0, 0.5]}
    assert metadata["engine"] == {"name": "vllm"}
    # any reader of Parquet finds them, under the product's own keys
    raw = pq.read_schema(part_files(tmp_path / "s")[0]).metadata
    assert json.loads(raw[b"carryover.target"]) == TARGET


def test_parts_have_the_size_asked_for_and_the_journal_ends(tmp_path):
    with open_store(tmp_path, rows_per_part=4) as store:
        for number in range(10):
            store.append([row(number)])
        assert len(part_files(tmp_path)) == 2
        assert ids(tmp_path) == list(range(10))
    assert [pq.read_metadata(part).num_rows for part in part_files(tmp_path)] == [4, 4, 2]
    assert not (tmp_path / "journal.jsonl").exists()


def test_an_id_is_taken_once(tmp_path):
    with open_store(tmp_path) as store:
        store.append([row(1)])
        with pytest.raises(ValueError, match="already holds"):
            store.append([row(2), row(1)])
        with pytest.raises(ValueError, match="already holds"):
            store.append([row(5), row(5)])
        assert store.ids == {1}
    with open_store(tmp_path) as store:
        assert store.ids == {1}
        with pytest.raises(ValueError, match="already holds"):
            store.append([row(1)])
    assert ids(tmp_path) == [1]


def test_a_killed_writer_loses_no_row_that_it_was_given(tmp_path, repository):
    code = (
        "import sys; from tests.unit.test_store import open_store, row\n"
        "store = open_store(sys.argv[1], rows_per_part=50)\n"
        "for number in range(10**6):\n"
        "    store.append([row(2 * number), row(2 * number + 1)])\n"
        "    print(2 * number + 1, flush=True)\n"
    )
    folder = tmp_path / "s"
    writer = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=repository,
    )
    acknowledged = [int(writer.stdout.readline()) for _ in range(330)][-1]
    writer.send_signal(signal.SIGKILL)
    rest = writer.stdout.read().split()
    writer.wait()
    acknowledged = int(rest[-1]) if rest else acknowledged
    found = ids(folder)
    assert found[: acknowledged + 1] == list(range(acknowledged + 1))
    assert len(found) == len(set(found)) and len(found) % 2 == 0
    with open_store(folder) as store:
        assert store.ids == set(found)
        store.append([row(len(found))])
    assert ids(folder) == list(range(len(found) + 1))


def test_a_part_written_just_before_a_kill_is_not_read_twice(tmp_path):
    store = open_store(tmp_path)
    store.append([row(1), row(2)])
    journal = (tmp_path / "journal.jsonl").read_bytes()
    store.close()
    (tmp_path / "journal.jsonl").write_bytes(journal)
    (tmp_path / "part-000009.parquet.partial").write_bytes(b"half")
    assert ids(tmp_path) == [1, 2]
    with open_store(tmp_path) as store:
        assert store.ids == {1, 2}
    assert ids(tmp_path) == [1, 2]
    assert len(list(tmp_path.glob("*.partial"))) == 0


def test_another_target_or_other_settings_are_refused(tmp_path):
    with open_store(tmp_path) as store:
        store.append([row(1)])
    with pytest.raises(DataError, match=r"another target.*\n.*vocab_size: expected 9, got 8"):
        open_store(tmp_path, target={**TARGET, "vocab_size": 9})
    with pytest.raises(DataError, match=r"(?s)other settings.*it has \[0.0, 0.5\].*asked for"):
        open_store(tmp_path, settings={"temperatures": [1.0]})
    with pytest.raises(DataError, match="top_k"):
        open_store(tmp_path, settings={**SETTINGS, "top_k": 5})
    # the same model may be reached under another name
    with open_store(tmp_path, target={**TARGET, "name": "b"}) as store:
        assert store.ids == {1}


def test_rows_that_only_the_journal_holds_are_protected_too(tmp_path):
    store = open_store(tmp_path)
    store.append([row(1)])
    store._lock.close()  # as if the process had died
    with pytest.raises(DataError, match="other settings"):
        open_store(tmp_path, settings={"temperatures": [1.0]})
    assert ids(tmp_path) == [1]


def test_a_store_without_rows_takes_any_settings(tmp_path):
    open_store(tmp_path).close()
    with open_store(tmp_path, settings={}) as store:
        store.append([row(1)])
    assert ids(tmp_path) == [1]


def test_one_writer_at_a_time(tmp_path):
    with open_store(tmp_path), pytest.raises(DataError, match="another process is writing"):
        open_store(tmp_path)
    open_store(tmp_path).close()


def test_unreadable_folders_are_the_users_to_mend(tmp_path):
    with pytest.raises(DataError, match="holds no part"):
        read_store(tmp_path, SCHEMA)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="is a file"):
        open_store(tmp_path / "file")
    with open_store(tmp_path / "s") as store:
        store.append([row(1)])
    part = part_files(tmp_path / "s")[0]
    part.write_bytes(part.read_bytes()[:40])
    with pytest.raises(DataError, match="damaged"):
        read_store(tmp_path / "s", SCHEMA)
    with pytest.raises(DataError, match="damaged"):
        open_store(tmp_path / "s")


def test_a_full_disk_is_named(tmp_path):
    with (
        pytest.raises(EnvironmentProblem, match="no space left"),
        store_module._disk_errors(tmp_path),
        open("/dev/full", "w") as file,
    ):
        file.write("x")
        file.flush()
