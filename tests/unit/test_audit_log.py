"""The audit log and the state folder: nothing lost, nothing invented, whatever the crash."""

import json
import os
import subprocess
import sys

import pytest

from carryover.errors import ServingError
from carryover.serving.audit import AuditEntry, AuditLog
from carryover.serving.changes import first_state
from carryover.serving.state_folder import Saved, StateFolder
from carryover.serving.traffic import Traffic


def entry(version=1, **values):
    return AuditEntry(
        time_s=1.5, who="ann@host", action="set", experiment="may", version=version,
        **{"after": {"weights": {"baseline": 1.0}}, "why": "tésting", **values},
    )  # fmt: skip


def saved(version=1):
    traffic = Traffic(version=version, experiment="may", salt="s", weights={"baseline": 1.0})
    state = first_state(traffic, now=1.0)
    return Saved(state=state, entry=entry(version), configured={"weights": {"baseline": 1.0}})


def test_entries_come_back_in_order(tmp_path):
    log = AuditLog(tmp_path / "deep" / "audit.jsonl")
    entries = [entry(version) for version in range(1, 6)]
    for each in entries:
        log.append(each)
    assert log.read() == (entries, 0)
    assert log.read(last=2) == (entries[-2:], 0)
    assert AuditLog(log.path).read() == (entries, 0)


def test_every_cut_of_the_last_line_loses_that_line_alone(tmp_path):
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    log.append(entry(1))
    log.append(entry(2))
    whole = path.read_bytes()
    begin = whole.index(b"\n") + 1
    for cut in range(begin, len(whole)):
        path.write_bytes(whole[:cut])
        log = AuditLog(path)
        log.append(entry(3))
        entries, unreadable = log.read()
        # a line without its newline may be whole; then it counts
        complete = cut == len(whole) - 1
        expected = [1, 2, 3] if complete else [1, 3]
        assert [each.version for each in entries] == expected, cut
        assert unreadable == (0 if complete or cut == begin else 1)


def test_garbage_between_entries_is_counted_and_skipped(tmp_path):
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    log.append(entry(1))
    with open(path, "ab") as file:
        file.write(b"\x00\xff{]\n[]\n" + json.dumps({"time_s": 1}).encode() + b"\n\n")
    log.append(entry(2))
    entries, unreadable = log.read()
    assert [each.version for each in entries] == [1, 2]
    assert unreadable == 3


def test_a_line_that_could_not_be_written_leaves_no_half(tmp_path, monkeypatch):
    log = AuditLog(tmp_path / "audit.jsonl")
    log.append(entry(1))

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        log.append(entry(2))
    monkeypatch.undo()
    log.append(entry(3))
    assert [each.version for each in log.read()[0]] == [1, 3]


def test_the_state_comes_back(tmp_path):
    folder = StateFolder(tmp_path / "state")
    assert folder.load() is None
    assert folder.load_results() is None
    folder.save(saved(1))
    folder.save_results({"a": 1})
    folder.close()
    again = StateFolder(tmp_path / "state")
    assert again.load() == saved(1)
    assert again.load_results() == {"a": 1}
    assert [each.version for each in again.audit.read()[0]] == [1]
    again.close()


def test_a_crash_between_state_and_log_is_made_good(tmp_path, monkeypatch):
    folder = StateFolder(tmp_path)
    folder.save(saved(1))
    with monkeypatch.context() as patch:
        # as if the process ended here: nothing is appended, and nothing undone
        patch.setattr(folder.audit, "append", lambda entry: None)
        folder.save(saved(2))
    folder.close()
    again = StateFolder(tmp_path)
    assert again.load().state.traffic.version == 2
    assert [each.version for each in again.audit.read()[0]] == [1, 2]
    assert again.load() is not None
    assert [each.version for each in again.audit.read()[0]] == [1, 2]
    again.close()


def test_a_change_that_cannot_be_logged_does_not_come_back_with_the_next_start(
    tmp_path, monkeypatch
):
    folder = StateFolder(tmp_path)
    folder.save(saved(1))

    def full(entry):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder.audit, "append", full)
    with pytest.raises(OSError, match="No space"):
        folder.save(saved(2))
    folder.close()
    again = StateFolder(tmp_path)
    assert again.load() == saved(1)
    again.close()


def test_a_damaged_state_is_refused_with_its_name(tmp_path):
    for text, said in (("{", "cannot read"), ("{}", "is not a state of the split")):
        (tmp_path / "traffic.json").write_text(text)
        folder = StateFolder(tmp_path)
        with pytest.raises(ServingError, match=said) as error:
            folder.load()
        assert "traffic.json" in str(error.value) and "move it away" in str(error.value)
        folder.close()


def test_only_one_process_writes_a_folder(tmp_path):
    first = StateFolder(tmp_path)
    first.save(saved(1))
    second = StateFolder(tmp_path)
    assert (first.is_owner, second.is_owner) == (True, False)
    assert second.load() == saved(1)
    with pytest.raises(ServingError, match="another application still has the state folder"):
        second.save(saved(2))
    second.close()
    first.close()
    first.close()
    third = StateFolder(tmp_path)
    assert third.is_owner and third.load() == saved(1)
    third.close()


def test_a_killed_controller_leaves_no_lock_and_no_torn_state(tmp_path):
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\n"
        "from test_audit_log import StateFolder, saved\n"
        "folder = StateFolder(Path(sys.argv[1]))\n"
        "version = 0\n"
        "while True:\n"
        "    version += 1\n"
        "    folder.save(saved(version))\n"
        "    print(version, flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), os.path.dirname(__file__)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    for _ in range(30):
        last = int(process.stdout.readline())
    process.kill()
    last = max([last, *(int(line) for line in process.stdout.read().split())])
    process.wait()
    process.stdout.close()
    folder = StateFolder(tmp_path, lock_timeout_s=5)
    version = folder.load().state.traffic.version
    # what was answered is there; one more may be, of which nobody was told
    assert version in (last, last + 1)
    assert [each.version for each in folder.audit.read()[0]] == list(range(1, version + 1))
    folder.close()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ServingError, match="cannot use the state folder"):
        StateFolder(tmp_path / "file" / "state")
