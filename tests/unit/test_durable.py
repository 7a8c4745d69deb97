"""Files are there in whole or not at all, whatever interrupts their writer."""

import pytest

from carryover.durable import append_line, read_lines, replacing, write_whole


def test_a_file_is_replaced_in_whole(tmp_path):
    path = tmp_path / "state.json"
    write_whole(path, "first")
    write_whole(path, b"second")
    assert path.read_text() == "second"
    assert [file.name for file in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize("interruption", [ValueError, KeyboardInterrupt])
def test_an_interrupted_writer_changes_nothing(tmp_path, interruption):
    path = tmp_path / "state.json"
    write_whole(path, "first")
    with pytest.raises(interruption), replacing(path) as partial:
        partial.write_text("half")
        raise interruption
    assert path.read_text() == "first"
    assert [file.name for file in tmp_path.iterdir()] == ["state.json"]


def test_lines_survive_a_cut_at_any_byte(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert read_lines(path) == []
    first, second, third = {"row": 1}, {"text": "ü\n"}, {"row": 3}
    append_line(path, first)
    size = path.stat().st_size
    append_line(path, second)
    content = path.read_bytes()
    for end in range(size, len(content) + 1):
        path.write_bytes(content[:end])
        whole = [first, second] if end == len(content) else [first]
        assert read_lines(path) == whole
        append_line(path, third)
        assert read_lines(path) == [*whole, third]


def test_a_damaged_line_is_no_end(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"row": 1}\nnot JSON\n{"row": 3}\n')
    with pytest.raises(ValueError):
        read_lines(path)
