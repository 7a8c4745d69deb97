"""What a data file is said to hold."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from carryover.cli import app
from carryover.commands.data_display import duration, size
from carryover.data.inspection import histogram, inspect
from carryover.data.prompts import PROMPTS
from carryover.data.responses import open_responses
from carryover.data.store import RowStore
from carryover.errors import DataError, TargetError
from carryover.targets import resolve

RUN = CliRunner()


def make_responses(folder, target):
    with open_responses(folder, target=target, sampling={"temperatures": [0, 0.8]}) as store:
        for number in range(10):
            store.append(
                [
                    {
                        "id": number, "source": "mine",
                        "category": "code" if number < 3 else "chat",
                        "temperature": 0.8 * (number % 2), "prompt_ids": [72] * (number + 1),
                        "response_ids": [70, 71, 72][: 1 + number % 3],
                        "finish": "length" if number in (1, 3, 4) else "stop",
                    }
                ]
            )  # fmt: skip
    return folder


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=200), st.integers(1, 20))
def test_a_histogram_counts_every_number_once(numbers, bins):
    found = histogram(numbers, unit="x", bins=bins)
    assert sum(count for _, _, count in found.bins) == len(numbers)
    assert len(found.bins) <= bins
    for low, high, count in found.bins:
        assert count == sum(low <= number <= high for number in numbers)
    assert found.longest == max(numbers)
    assert found.mean == pytest.approx(sum(numbers) / len(numbers))
    half = sorted(numbers)[(len(numbers) - 1) // 2 : len(numbers) // 2 + 1]
    assert found.median == sum(half) / len(half)


def test_responses_are_counted(tmp_path):
    found, rows = inspect(make_responses(tmp_path, {"name": "a"}))
    assert (found.kind, found.rows, rows.num_rows) == ("responses", 10, 10)
    assert found.counts == {
        "category": {"chat": 7, "code": 3}, "source": {"mine": 10},
        "finish": {"stop": 7, "length": 3}, "temperature": {"0": 5, "0.8": 5},
    }  # fmt: skip
    assert found.cut == {"0.8": 2, "0": 1}
    assert found.lengths["prompt"].longest == 10 and found.lengths["response"].longest == 3
    assert found.metadata["target"] == {"name": "a"}


def test_prompts_are_counted_in_every_form(tmp_path):
    lines = tmp_path / "p.jsonl"
    lines.write_text('{"turns": ["a", "b"], "category": "x"}\n{"prompt": "cc"}\n')
    found, rows = inspect(lines)
    assert (found.kind, found.rows) == ("prompts", 2)
    assert found.counts["user turns"] == {"2": 1, "1": 1}
    assert found.lengths["prompt"].mean == 1.5 and rows[0].turns == ("a", "b")
    pq.write_table(pa.table({"prompt": ["x"]}), tmp_path / "p.parquet")
    assert inspect(tmp_path / "p.parquet")[0].kind == "prompts"
    with RowStore(tmp_path / "s", schema=PROMPTS, target={"name": "a"}, settings={}) as store:
        store.append([{"id": 0, "source": "self", "category": "x", "prompt": "y"}])
        assert inspect(tmp_path / "s")[0].kind == "prompts", "also while it is written"
    assert inspect(tmp_path / "s")[0].metadata["target"] == {"name": "a"}


def test_responses_are_recognised_in_every_form(tmp_path):
    with open_responses(tmp_path / "s", target={}, sampling={"temperatures": [0]}) as store:
        row = {
            "id": 0, "source": "s", "category": "c", "temperature": 0, "prompt_ids": [1],
            "response_ids": [2], "finish": "stop",
        }  # fmt: skip
        store.append([row])
        assert inspect(tmp_path / "s")[0].kind == "responses", "also while it is written"
    assert inspect(tmp_path / "s" / "part-000000.parquet")[0].kind == "responses"
    (tmp_path / "r.jsonl").write_text(json.dumps(row))
    assert inspect(tmp_path / "r.jsonl")[0].kind == "responses"


def test_broken_files_are_the_users_to_mend(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"no")
    for path in (tmp_path / "x.parquet", tmp_path / "none", tmp_path / "none.jsonl"):
        with pytest.raises(DataError):
            inspect(path)


def test_the_command_shows_numbers_and_decoded_samples(tmp_path, tiny_llama):
    target = resolve(str(tiny_llama))
    folder = make_responses(tmp_path / "s", target.identity())
    done = RUN.invoke(app, ["data", "inspect", str(folder), "--samples", "10"])
    assert done.exit_code == 0, done.output
    text = done.output
    assert "10 responses" in text and "sha256" in text
    assert "cut at the length limit: 3 of 10 (30.0%)" in text
    assert "20% at 0, 40% at 0.8" in text
    assert "chat" in text and "70.0%" in text and "█" in text
    assert target.load_tokenizer().decode([70, 71, 72]) in text
    numbers = json.loads(RUN.invoke(app, ["data", "inspect", str(folder), "--json"]).output)
    assert numbers["rows"] == 10 and numbers["cut"] == {"0.8": 2, "0": 1}


def test_samples_need_a_target_that_can_be_read(tmp_path, tiny_llama):
    row = (
        '{"id": 0, "source": "s", "category": "c", "temperature": 0, "prompt_ids": [70], '
        '"response_ids": [71], "finish": "stop"}'
    )
    path = tmp_path / "r.jsonl"
    path.write_text(row)
    done = RUN.invoke(app, ["data", "inspect", str(path)])
    assert done.exit_code == 0 and "give --target" in done.output
    done = RUN.invoke(app, ["data", "inspect", str(path), "--target", str(tiny_llama)])
    assert resolve(str(tiny_llama)).load_tokenizer().decode([71]) in done.output
    done = RUN.invoke(app, ["data", "inspect", str(path), "--target", str(tmp_path / "none")])
    assert isinstance(done.exception, TargetError)
    gone = make_responses(tmp_path / "s", {"name": "/gone", "tokenizer_sha256": "0"})
    done = RUN.invoke(app, ["data", "inspect", str(gone)])
    assert done.exit_code == 0 and "no samples: no target at '/gone'" in done.output


def test_prompts_are_shown_as_they_are(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": "Is [bold] kept? " + "x" * 700, "category": "[red]q"}))
    done = RUN.invoke(app, ["data", "inspect", str(path)])
    assert "Is [bold] kept?" in done.output and "[red]q" in done.output
    assert "(116 more characters)" in done.output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["synthesize", "-n", "5", "--target", "x/y", "--set", "temperature=0.5"],
         ["num_prompts: 5", "target: x/y", "temperature: 0.5"]),
        (["regenerate", "-p", "a.jsonl", "-p", "b/c", "--limit", "3", "--split", "s"],
         ["- path: a.jsonl", "- path: b/c", "limit: 3", "split: s"]),
        (["regenerate", "-o", "a: b", "--set", "out=c", "--set", "temperatures=[0,1]"],
         ["out: c", "temperatures:\n- 0.0\n- 1.0"]),
        (["regenerate", "--out", "a: b"], ["out: 'a: b'"]),
    ],
)  # fmt: skip
def test_flags_and_settings_make_the_configuration(arguments, expected):
    done = RUN.invoke(app, ["data", *arguments, "--dry-run"])
    assert done.exit_code == 0, done.exception
    for line in expected:
        assert line in done.output


def test_a_dry_run_can_be_used_as_a_configuration(tmp_path):
    for command in ("synthesize", "regenerate"):
        first = RUN.invoke(app, ["data", command, "--dry-run", "--target", "a/b"]).output
        path = tmp_path / f"{command}.yaml"
        path.write_text(first)
        again = RUN.invoke(app, ["data", command, "--config", str(path), "--dry-run"]).output
        assert again == first


def test_a_limit_without_prompts_is_refused():
    done = RUN.invoke(app, ["data", "regenerate", "--limit", "5", "--dry-run"])
    assert "give that too" in str(done.exception)


def test_times_and_sizes_have_units():
    assert [duration(s) for s in (1, 89, 300, 7200)] == ["1 s", "89 s", "5 min", "2.0 h"]
    assert [size(b) for b in (5, 1500, 2e6, 3.21e9, 4e12)] == [
        "5 B", "1.5 kB", "2 MB", "3.21 GB", "4 TB",
    ]  # fmt: skip
