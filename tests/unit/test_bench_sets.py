"""Workloads by name: public formats, folders of sets, and a mix that must not be miscalled."""

import json

import pytest

from carryover.bench import sets
from carryover.bench.sets import PAPER_COUNTS, read_workload
from carryover.bench.workload import count_categories
from carryover.errors import ConfigError, DataError


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def copy(tmp_path):
    """A whole copy of the Red Hat sets, with the paper's counts."""
    for name, count in {**PAPER_COUNTS, "writing": 80}.items():
        write(tmp_path / f"{name}.jsonl", [{"prompt": f"{name} {n}"} for n in range(count)])
    return tmp_path


def test_spec_benchs_rows_keep_their_sets_and_mt_bench_is_one(tmp_path):
    path = write(
        tmp_path / "question.jsonl",
        [
            {"question_id": 81, "category": "writing", "turns": ["write", "again"]},
            {"question_id": 91, "category": "roleplay", "turns": ["play", "again"]},
            {"question_id": 161, "category": "translation", "turns": ["translate"]},
        ],
    )
    prompts = read_workload(str(path))
    assert count_categories(prompts) == {"mt_bench": 2, "translation": 1}
    assert prompts[0].messages() == [{"role": "user", "content": "write"}]


def test_humanevals_code_becomes_an_instruction(tmp_path):
    row = {
        "task_id": "HumanEval/0", "prompt": "def f(x):\n", "entry_point": "f", "test": "assert f(1)"
    }  # fmt: skip
    (prompt,) = read_workload(str(write(tmp_path / "HumanEval.jsonl", [row])))
    assert prompt.category == "humaneval"
    assert "```python\ndef f(x):\n" in prompt.turns[0] and "assert" not in prompt.turns[0]


def test_the_evaluation_files_format_is_read_with_its_categories(tmp_path):
    rows = [{"source": "spec-bench", "category": "qa", "question_id": 7, "turns": ["why?"]}]
    (prompt,) = read_workload(str(write(tmp_path / "prompts.jsonl", rows)))
    assert (prompt.category, prompt.source) == ("qa", "spec-bench")


def test_files_of_a_folder_are_sets_unless_their_rows_tell_with_ids_of_their_own(tmp_path):
    write(tmp_path / "one.jsonl", [{"id": 0, "prompt": "a"}, {"id": 1, "prompt": "b"}])
    write(tmp_path / "two.jsonl", [{"id": 0, "prompt": "c", "category": "x"}])
    prompts = read_workload(str(tmp_path))
    assert count_categories(prompts) == {"one": 2, "x": 1}
    assert len({prompt.id for prompt in prompts}) == 3


def test_the_red_hat_sets_come_whole_or_one_by_one(copy):
    assert len(read_workload("speculator-benchmarks", folder=copy)) == 924
    chosen = read_workload("RedHatAI/speculator_benchmarks:qa,rag", folder=copy)
    assert count_categories(chosen) == {"qa": 80, "rag": 80}
    with pytest.raises(ConfigError, match="has no set raq; it has HumanEval"):
        read_workload("speculator-benchmarks:raq", folder=copy)


def test_the_papers_mix_is_the_papers_or_an_error(copy):
    prompts = read_workload("paper-844", folder=copy)
    assert len(prompts) == 844 and "writing" not in count_categories(prompts)
    write(copy / "qa.jsonl", [{"prompt": "only one"}])
    with pytest.raises(DataError, match=r"qa: 1 instead of 80.*must not be called paper-844"):
        read_workload("paper-844", folder=copy)
    (copy / "rag.jsonl").unlink()
    with pytest.raises(DataError, match=r"has no rag.jsonl"):
        read_workload("paper-844", folder=copy)


def test_without_a_copy_the_sets_come_from_the_hub_by_name(monkeypatch):
    import datasets

    asked = []

    def load(name, *, data_files, split):
        asked.append((name, data_files, split))
        return [{"prompt": "a"}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    (prompt,) = read_workload("speculator-benchmarks:qa")
    assert (prompt.category, prompt.source) == ("qa", "qa")
    assert asked == [(sets.HUB_NAME, "qa.jsonl", "train")]

    def fail(*_, **__):
        raise ConnectionError("no network\nlong story")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DataError, match="no network\ngive a folder"):
        read_workload("speculator-benchmarks:qa")


def test_a_copy_for_a_workload_that_takes_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="prompts_folder"):
        read_workload("mine.jsonl", folder=tmp_path)
