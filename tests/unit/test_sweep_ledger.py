"""What a sweep's folder keeps, however the sweep ended."""

import json

import pytest

from carryover.errors import ConfigError
from sweeps.ledger import Ledger, TrialEnd

IDENTITY = {"max_tokens": 8, "drafters": {"a": "x", "b": "y"}}


def open_ledger(folder, identity=IDENTITY):
    return Ledger(folder, identity, kept=("rate", "tpot"), part=("temperature", "concurrency"))


def row(setting="s", concurrency=1, rate=5.0):
    return {
        "setting": setting, "temperature": 0.0, "concurrency": concurrency,
        "figures": {"rate": rate, "other": 1},
    }  # fmt: skip


def test_measurements_survive_and_only_some_figures_stay_in_memory(tmp_path):
    first = open_ledger(tmp_path)
    assert first.add(row()) and first.add(row(concurrency=2))
    again = open_ledger(tmp_path)
    assert again.has("s", (0.0, 2)) and not again.has("s", (0.0, 4))
    rate, tpot = again.figures["s"][0.0, 1]
    assert rate == 5.0 and tpot != tpot
    assert list(again.rows()) == [row(), row(concurrency=2)]


def test_a_part_that_is_measured_twice_counts_once(tmp_path):
    ledger = open_ledger(tmp_path)
    assert ledger.add(row(rate=1.0))
    assert not ledger.add(row(rate=2.0))
    assert open_ledger(tmp_path).figures["s"][0.0, 1][0] == 1.0


@pytest.mark.parametrize("cut", [1, 9, 60])
def test_a_line_that_a_kill_cut_is_measured_again(tmp_path, cut):
    ledger = open_ledger(tmp_path)
    ledger.add(row(concurrency=1))
    ledger.add(row(concurrency=2))
    text = ledger.rows_file.read_text()
    ledger.rows_file.write_text(text[:-cut])
    again = open_ledger(tmp_path)
    assert again.has("s", (0.0, 1)) and not again.has("s", (0.0, 2))
    again.add(row(concurrency=2))
    assert ledger.rows_file.read_text() == text


def test_a_file_that_is_one_cut_line_is_empty(tmp_path):
    open_ledger(tmp_path)
    (tmp_path / "measurements.jsonl").write_text('{"setting": "s')
    assert open_ledger(tmp_path).figures == {}


def test_ends_survive_and_say_what_is_over(tmp_path):
    ledger = open_ledger(tmp_path)
    ledger.end(TrialEnd("a", "died", "memory"))
    ledger.end(TrialEnd("b", "failed", "too long"))
    ledger.end(TrialEnd("c", "stopped", "hopeless"))
    again = open_ledger(tmp_path)
    assert again.ends["b"].reason == "too long"
    assert [again.is_over(name) for name in "abcd"] == [False, True, True, False]
    assert not again.is_over("b", retry_failed=True)
    assert again.is_over("c", retry_failed=True)


def test_another_sweep_does_not_mix_in_and_the_difference_is_named(tmp_path):
    open_ledger(tmp_path)
    with pytest.raises(ConfigError, match="max_tokens: 8 before, 9 now"):
        open_ledger(tmp_path, {**IDENTITY, "max_tokens": 9})


def test_arms_may_be_added_but_not_changed(tmp_path):
    open_ledger(tmp_path)
    open_ledger(tmp_path, {**IDENTITY, "drafters": {"a": "x", "c": "z"}})
    with pytest.raises(ConfigError, match=r"drafters\.a"):
        open_ledger(tmp_path, {**IDENTITY, "drafters": {"a": "other"}})


def test_files_are_lines_of_json(tmp_path):
    ledger = open_ledger(tmp_path)
    ledger.end(TrialEnd("a", "died", "of\nseveral lines"))
    (line,) = ledger.trials_file.read_text().splitlines()
    assert json.loads(line)["reason"] == "of\nseveral lines"
