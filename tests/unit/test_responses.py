"""Responses: read from Parquet and JSON lines, checked, and tied to their target."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from carryover.cli import app
from carryover.data.merging import merge
from carryover.data.responses import (
    RESPONSES,
    open_responses,
    read_responses,
    require_target,
    responses_metadata,
)
from carryover.errors import DataError

TARGET = {
    "name": "a", "architecture": "A", "hidden_size": 4, "num_hidden_layers": 2, "vocab_size": 100,
    "tokenizer_sha256": "0",
}  # fmt: skip


def response(number, **changes):
    return {
        "id": number, "source": "s", "category": "chat", "temperature": 0.8 * (number % 2),
        "prompt_ids": [1, 2, number], "response_ids": [5, 6], "finish": "stop", **changes,
    }  # fmt: skip


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_parquet_folder_file_and_json_lines_read_alike(tmp_path):
    rows = [response(4), response(1, finish="length", response_ids=[])]
    with open_responses(tmp_path / "s", target=TARGET, sampling={"max_new_tokens": 2}) as store:
        for row in rows:
            store.append([row])
    folder = read_responses(tmp_path / "s")
    assert folder.schema.equals(RESPONSES)
    assert folder.column("id").to_pylist() == [4, 1]
    assert folder.column("prompt_ids").to_pylist() == [[1, 2, 4], [1, 2, 1]]
    assert folder.column("temperature").to_pylist() == pytest.approx([0, 0.8])
    assert responses_metadata(folder)["target"] == TARGET
    assert responses_metadata(folder)["settings"] == {"max_new_tokens": 2}
    file = read_responses(tmp_path / "s" / "part-000000.parquet")
    assert file.equals(folder) and responses_metadata(file)["target"] == TARGET
    lines = read_responses(write_lines(tmp_path / "r.jsonl", rows))
    assert lines.equals(folder) and responses_metadata(lines) == {}


def test_a_store_that_is_being_written_can_be_read(tmp_path):
    with open_responses(tmp_path, target=TARGET, sampling={}) as store:
        store.append([response(7)])
        assert read_responses(tmp_path).column("id").to_pylist() == [7]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"id": 1}', r"line 2: no field source, category"),
        ("{not json", r"line 2: not valid JSON"),
        ("[1, 2]", r"line 2: expected an object"),
        (json.dumps(response(2, prompt_ids=["x"])), r"line 2: .*'x'"),
        (json.dumps(response(2, prompt_ids=[2**40])), r"line 2: .*1099511627776"),
        (json.dumps(response(1)), r"1 ids appear more than once"),
        (json.dumps(response(2, finish="error")), r"finish must be one of stop, length"),
        (json.dumps(response(2, category=None)), r"category has empty values"),
    ],
)
def test_malformed_lines_are_named(tmp_path, text, message):
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(response(1)) + "\n" + text + "\n")
    with pytest.raises(DataError, match=message):
        read_responses(path)


def test_missing_and_foreign_files_are_named(tmp_path):
    with pytest.raises(DataError, match="platform data regenerate"):
        read_responses(tmp_path / "none.parquet")
    with pytest.raises(DataError, match=r"holds no part-\*\.parquet"):
        read_responses(tmp_path)
    (tmp_path / "r.jsonl").write_text("\n")
    with pytest.raises(DataError, match="holds no responses"):
        read_responses(tmp_path / "r.jsonl")
    (tmp_path / "x.parquet").write_bytes(b"nothing")
    with pytest.raises(DataError, match="not Parquet"):
        read_responses(tmp_path / "x.parquet")
    pq.write_table(pa.table({"id": [1], "prompt": ["x"]}), tmp_path / "p.parquet")
    with pytest.raises(DataError, match="lacks the columns source, category"):
        read_responses(tmp_path / "p.parquet")
    (tmp_path / "b.jsonl").write_bytes(b'{"id": "\xff"}\n')
    with pytest.raises(DataError, match="not UTF-8"):
        read_responses(tmp_path / "b.jsonl")


def test_responses_belong_to_their_target(tmp_path):
    with open_responses(tmp_path / "s", target=TARGET, sampling={}) as store:
        store.append([response(1)])
    table = read_responses(tmp_path / "s")
    require_target(table, {**TARGET, "name": "elsewhere"}, source="s")
    with pytest.raises(DataError, match="tokenizer_sha256: expected '1', got '0'"):
        require_target(table, {**TARGET, "tokenizer_sha256": "1"}, source="s")
    lines = read_responses(write_lines(tmp_path / "r.jsonl", [response(1, response_ids=[99])]))
    require_target(lines, TARGET, source="r")
    with pytest.raises(DataError, match="response_ids holds token 99, but the target's vocab"):
        require_target(lines, {**TARGET, "vocab_size": 99}, source="r")


def folder_of(path, rows, *, target=TARGET, **sampling):
    with open_responses(path, target=target, sampling=sampling) as store:
        for row in rows:
            store.append([row])
    return path


def test_merged_responses_are_all_of_them_once(tmp_path):
    first = folder_of(tmp_path / "a", [response(4), response(1)], temperatures=[0.0])
    again = [response(4), response(9, prompt_ids=[1, 2, 1]), response(2, prompt_ids=[1, 2])]
    # as many tokens in all, but another prompt
    again += [response(3, prompt_ids=[1, 2, 4, 5], response_ids=[6])]
    second = folder_of(tmp_path / "b", again, temperatures=[0.8])
    found = merge([first, second], tmp_path / "both")
    assert found.taken == {str(first): 2, str(second): 2} and (found.rows, found.repeated) == (4, 2)
    merged = read_responses(tmp_path / "both")
    assert merged.column("id").to_pylist() == [0, 1, 2, 3]
    assert merged.column("prompt_ids").to_pylist() == [[1, 2, 4], [1, 2, 1], [1, 2], [1, 2, 4, 5]]
    metadata = responses_metadata(merged)
    assert metadata["target"] == TARGET
    assert metadata["settings"]["merged"] == [{"temperatures": [0.0]}, {"temperatures": [0.8]}]


def test_what_cannot_be_merged_is_refused_and_nothing_is_written(tmp_path):
    first = folder_of(tmp_path / "a", [response(1)])
    other = folder_of(tmp_path / "b", [response(2)], target={**TARGET, "vocab_size": 99})
    lines = write_lines(tmp_path / "r.jsonl", [response(3)])
    out = tmp_path / "both"
    for sources, message in (
        ([first], "at least two"),
        ([first, first], "at least two"),
        ([first, other], "different targets"),
        ([first, lines], "does not say which target"),
        ([first, tmp_path / "none"], "no responses at"),
    ):
        with pytest.raises(DataError, match=message):
            merge(sources, out)
        assert not out.exists()
    with pytest.raises(DataError, match="holds rows already"):
        merge([first, folder_of(tmp_path / "c", [response(5)])], first)


def test_the_merge_command_says_what_it_took(tmp_path):
    folders = [folder_of(tmp_path / name, [response(n) for n in (1, 2)]) for name in "ab"]
    words = ["data", "merge", *map(str, folders), "-o", str(tmp_path / "c")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "2 responses in" in result.output and "2 left out as repeated" in result.output
