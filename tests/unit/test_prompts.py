"""Prompts from files, stores and data sets, in the forms that people have them."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from carryover.data.prompts import PROMPTS, PromptSource, read_prompt_sources, read_prompts
from carryover.data.store import RowStore
from carryover.errors import DataError

ULTRACHAT = {
    "prompt": "Hello?", "prompt_id": "c0ffee",
    "messages": [
        {"content": "Hello?", "role": "user"},
        {"content": "Hi.", "role": "assistant"},
        {"content": "Who are you?", "role": "user"},
        {"content": "A model.", "role": "assistant"},
    ],
}  # fmt: skip
MAGPIE = {
    "uuid": "d00d", "instruction": "Add 1 and 2.", "response": "3", "task_category": "Math",
    "conversations": [
        {"from": "human", "value": "Add 1 and 2."},
        {"from": "gpt", "value": "3"},
    ],
}  # fmt: skip


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_form_of_row(tmp_path):
    rows = [
        {"prompt": "One"},
        {"turns": ["Two", "More"], "category": "mt_bench", "source": "bench"},
        {"messages": [{"role": "system", "content": "Be brief."},
                      {"role": "user", "content": "Three"}]},
        ULTRACHAT,
        MAGPIE,
        {"instruction": "Six", "turns": None},
    ]  # fmt: skip
    prompts = read_prompts(write_lines(tmp_path / "mine.jsonl", rows))
    assert [prompt.id for prompt in prompts] == list(range(6))
    assert [prompt.turns for prompt in prompts] == [
        ("One",), ("Two", "More"), ("Three",), ("Hello?", "Who are you?"), ("Add 1 and 2.",),
        ("Six",),
    ]  # fmt: skip
    assert [prompt.category for prompt in prompts] == [
        "general", "mt_bench", "general", "general", "Math", "general",
    ]  # fmt: skip
    assert [prompt.source for prompt in prompts] == [
        "mine",
        "bench",
        "mine",
        "mine",
        "mine",
        "mine",
    ]
    assert prompts[2].system == "Be brief."
    assert prompts[2].messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Three"},
    ]
    assert prompts[3].messages(["I am me."]) == [
        {"role": "user", "content": "Hello?"},
        {"role": "assistant", "content": "I am me."},
        {"role": "user", "content": "Who are you?"},
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("oops", "line 2: not valid JSON"),
        ('{"text": "x"}', "line 2: no prompt; a row needs one of turns, messages"),
        ('{"prompt": "  "}', "line 2: prompt must hold text"),
        ('{"prompt": 3}', "line 2: prompt must hold text, got 3"),
        ('{"turns": []}', "line 2: turns must be a list that is not empty"),
        ('{"turns": "x"}', "line 2: turns must be a list"),
        ('{"turns": ["x", null]}', "line 2: turns must hold text, got None"),
        ('{"messages": [{"role": "judge", "content": "x"}]}', "line 2: messages: a message needs"),
        ('{"messages": [{"role": "user", "content": ["x"]}]}', "line 2: messages: a message needs"),
        ('{"messages": ["x"]}', "line 2: messages: expected"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "line 2: messages has no user"),
    ],
)
def test_malformed_rows_are_named_by_line(tmp_path, line, message):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        read_prompts(path)


def test_own_ids_are_kept_only_if_all_are_usable(tmp_path):
    kept = write_lines(tmp_path / "a.jsonl", [{"id": 7, "prompt": "a"}, {"id": 3, "prompt": "b"}])
    assert [prompt.id for prompt in read_prompts(kept)] == [7, 3]
    for other in ({"prompt": "b"}, {"id": 7, "prompt": "b"}, {"id": "x", "prompt": "b"},
                  {"id": True, "prompt": "b"}, {"id": -2, "prompt": "b"}):  # fmt: skip
        path = write_lines(tmp_path / "b.jsonl", [{"id": 7, "prompt": "a"}, other])
        assert [prompt.id for prompt in read_prompts(path)] == [0, 1]


def test_parquet_and_stores(tmp_path):
    pq.write_table(pa.Table.from_pylist([ULTRACHAT, ULTRACHAT]), tmp_path / "u.parquet")
    assert [p.turns[1] for p in read_prompts(tmp_path / "u.parquet")] == ["Who are you?"] * 2
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"no column turns, messages.*it has text"):
        read_prompts(tmp_path / "t.parquet")
    pq.write_table(pa.table({"prompt": ["x", ""]}), tmp_path / "e.parquet")
    with pytest.raises(DataError, match="row 1: prompt must hold text"):
        read_prompts(tmp_path / "e.parquet")
    (tmp_path / "bad.parquet").write_bytes(b"no")
    with pytest.raises(DataError, match="not Parquet"):
        read_prompts(tmp_path / "bad.parquet")
    with RowStore(tmp_path / "store", schema=PROMPTS, target={}, settings={}) as store:
        store.append([{"id": 5, "source": "self", "category": "code", "prompt": "Write."}])
        # a row that is in no part yet counts as well
        (prompt,) = read_prompts(tmp_path / "store")
    assert (prompt.id, prompt.source, prompt.category) == (5, "self", "code")
    assert read_prompts(tmp_path / "store") == [prompt]


def test_selection(tmp_path):
    path = write_lines(tmp_path / "p.jsonl", [{"prompt": str(n)} for n in range(50)])
    first = read_prompts(PromptSource(path=str(path), limit=3, category="x"))
    assert [prompt.turns[0] for prompt in first] == ["0", "1", "2"]
    assert {prompt.category for prompt in first} == {"x"}
    mixed = read_prompts(PromptSource(path=str(path), shuffle_seed=1, limit=10))
    assert mixed == read_prompts(PromptSource(path=str(path), shuffle_seed=1, limit=10))
    assert [prompt.id for prompt in mixed] != sorted(prompt.id for prompt in mixed)
    joined = read_prompt_sources([PromptSource(path=str(path), limit=2)] * 2)
    assert [(p.id, p.turns[0]) for p in joined] == [(0, "0"), (1, "1"), (2, "0"), (3, "1")]
    with pytest.raises(DataError, match="neither split nor subset"):
        read_prompts(PromptSource(path=str(path), split="train"))


def test_data_sets_in_folders(tmp_path):
    import datasets

    chats = datasets.Dataset.from_list([ULTRACHAT] * 3)
    tests = datasets.Dataset.from_list([ULTRACHAT])
    both = datasets.DatasetDict({"train_sft": chats, "test_sft": tests})
    both.save_to_disk(tmp_path / "ultrachat")
    source = PromptSource(path=str(tmp_path / "ultrachat"), split="train_sft")
    prompts = read_prompts(source)
    assert [prompt.id for prompt in prompts] == [0, 1, 2]
    assert prompts[0].source == "ultrachat" and prompts[0].turns == ("Hello?", "Who are you?")
    with pytest.raises(DataError, match="has the splits train_sft, test_sft; choose one"):
        read_prompts(tmp_path / "ultrachat")
    with pytest.raises(DataError, match="has the splits train_sft, test_sft; got 'train'"):
        read_prompts(PromptSource(path=str(tmp_path / "ultrachat"), split="train"))
    # as a clone of a hub repository looks
    folder = tmp_path / "magpie" / "data"
    folder.mkdir(parents=True)
    rows = [MAGPIE, {**MAGPIE, "conversations": [], "instruction": None}]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train-00000-of-00001.parquet")
    (prompt,) = read_prompts(tmp_path / "magpie")
    assert (prompt.category, prompt.turns) == ("Math", ("Add 1 and 2.",))


def test_what_cannot_be_found_is_named(tmp_path):
    for path in (tmp_path / "none.jsonl", "none", "./a/b", "a/b/c", "owner/file.jsonl"):
        with pytest.raises(DataError, match="no prompts at"):
            read_prompts(path)
    # tests have no network, and the hub's client says so
    with pytest.raises(DataError, match=r"(?s)cannot load the data set 'no/such': .*a folder"):
        read_prompts("no/such")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="holds no prompts"):
        read_prompts(tmp_path / "empty.jsonl")
