"""Prompts of a bench by name: public benchmark sets, and the mix that the paper measured.

A workload is one of

    FILE or FOLDER             as everywhere (`data.prompts`); in a folder of JSON lines files, rows
                               without a category are of a set that is called as their file
    RedHatAI/speculator_benchmarks   the Red Hat speculator benchmark: every set that it has
    speculator-benchmarks:qa,rag     the same, only these sets
    paper-844                  the eight sets and 844 prompts of the paper, or an error
    OWNER/NAME                 any other Hugging Face data set

Of Spec-Bench's rows (`question_id`, `category`, `turns`) those with one of MT-Bench's eight
categories are counted as one set, as Spec-Bench does. HumanEval's rows (`task_id`, `prompt`,
`entry_point`) hold a piece of code, which is put into an instruction. Of
several turns the first is asked, as vLLM's and the paper's benches do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from carryover.bench.workload import count_categories
from carryover.data.lines import read_json_lines
from carryover.data.prompts import DEFAULT_CATEGORY, Prompt, parse_prompt, read_prompts
from carryover.data.store import is_store
from carryover.errors import ConfigError, DataError

HUB_NAME = "RedHatAI/speculator_benchmarks"
SHORT_NAME = "speculator-benchmarks"
PAPER_MIX = "paper-844"
# The sizes of HumanEval and of Spec-Bench's six sets are public; 844 leaves 200 for the eighth.
PAPER_COUNTS = {
    "HumanEval": 164, "math_reasoning": 80, "qa": 80, "question": 80, "rag": 80,
    "summarization": 80, "tool_call": 200, "translation": 80,
}  # fmt: skip
SPECULATOR_SETS = (*PAPER_COUNTS, "writing")
MT_BENCH = "mt_bench"
_MT_BENCH_CATEGORIES = {
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
}  # fmt: skip
_INSTRUCTION = (
    "Write a solution to the following problem and make sure that it passes the tests:\n"
    "```python\n{code}\n```"
)


def read_workload(name: str, *, folder: Path | None = None) -> list[Prompt]:
    """Read the prompts of a workload, with ids that are unique in it.

    Args:
        name: see the module's description.
        folder: a local copy of the Red Hat sets, `SET.jsonl` each; None: from the hub.

    Raises:
        DataError: missing or unreadable prompts, or a mix that is not the paper's.
        ConfigError: no such set.
    """
    if name == PAPER_MIX:
        prompts = _read_speculator_sets(tuple(PAPER_COUNTS), folder)
        check_paper_mix(prompts)
        return prompts
    short, _, chosen = name.partition(":")
    if short in (SHORT_NAME, HUB_NAME):
        sets = tuple(chosen.split(",")) if chosen else SPECULATOR_SETS
        unknown = sorted(set(sets) - set(SPECULATOR_SETS))
        if unknown:
            raise ConfigError(
                f"{short} has no set {', '.join(unknown)}; it has {', '.join(SPECULATOR_SETS)}"
            )
        return _read_speculator_sets(sets, folder)
    if folder is not None:
        raise ConfigError(
            f"prompts_folder is a copy of {HUB_NAME}, and the prompts are {name!r}; leave it out, "
            f"or set the prompts to {SHORT_NAME} or {PAPER_MIX}"
        )
    path = Path(name).expanduser()
    if path.is_dir() and not is_store(path) and (files := sorted(path.glob("*.jsonl"))):
        return _join([_read_set(file, file.stem, category=file.stem) for file in files])
    if path.suffix in (".jsonl", ".json", ".ndjson") and path.is_file():
        return _read_set(path, path.stem, category=DEFAULT_CATEGORY)
    return read_prompts(name)


def check_paper_mix(prompts: Sequence[Prompt]) -> None:
    """Refuse prompts whose counts are not those of the paper's workload.

    Raises:
        DataError: tells every set that differs.
    """
    found = count_categories(prompts)
    wrong = [
        f"{name}: {found.get(name, 0)} instead of {PAPER_COUNTS.get(name, 0)}"
        for name in sorted(found.keys() | PAPER_COUNTS.keys())
        if found.get(name, 0) != PAPER_COUNTS.get(name, 0)
    ]
    if wrong:
        raise DataError(
            f"this is not the paper's mix of {sum(PAPER_COUNTS.values())} prompts "
            f"({', '.join(wrong)}), so it must not be called {PAPER_MIX}; "
            f"use {SHORT_NAME} for the sets as they are"
        )


def _read_speculator_sets(names: Sequence[str], folder: Path | None) -> list[Prompt]:
    if folder is not None:
        missing = [name for name in names if not (folder / f"{name}.jsonl").is_file()]
        if missing:
            raise DataError(
                f"{folder} has no {', '.join(f'{name}.jsonl' for name in missing)}; "
                f"give a whole copy of {HUB_NAME}"
            )
        sets = [_read_set(folder / f"{name}.jsonl", name) for name in names]
        return _join(
            [
                [replace(prompt, category=name) for prompt in prompts]
                for name, prompts in zip(names, sets, strict=True)
            ]
        )
    return _join([_read_hub_set(name) for name in names])


def _read_hub_set(name: str) -> list[Prompt]:
    import datasets

    try:
        found = datasets.load_dataset(HUB_NAME, data_files=f"{name}.jsonl", split="train")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"cannot load {name}.jsonl of {HUB_NAME}: {reason}\n"
            "give a folder that holds a copy of it as prompts_folder"
        ) from None
    return [
        replace(_parse(row, f"{HUB_NAME}, {name}, row {number}", name), category=name)
        for number, row in enumerate(found, 1)
    ]


def _read_set(path: Path, name: str, *, category: str = DEFAULT_CATEGORY) -> list[Prompt]:
    """Prompts of a file, those without a category in this one."""
    rows = read_json_lines(path)
    prompts = [_parse(row, f"{path}, line {number}", name) for number, row in rows]
    if not prompts:
        raise DataError(f"{path} holds no prompts")
    prompts = [
        replace(prompt, category=category) if prompt.category == DEFAULT_CATEGORY else prompt
        for prompt in prompts
    ]
    return _join([prompts])


def _parse(row: Mapping[str, Any], where: str, name: str) -> Prompt:
    prompt = parse_prompt(row, where=where, source=name)
    if "task_id" in row and "entry_point" in row:
        text = _INSTRUCTION.format(code=prompt.turns[0])
        prompt = replace(prompt, category=row.get("category") or "humaneval", turns=(text,))
    if "question_id" in row and row.get("category") in _MT_BENCH_CATEGORIES:
        prompt = replace(prompt, category=MT_BENCH)
    return prompt


def _join(sets: Sequence[Sequence[Prompt]]) -> list[Prompt]:
    """One list, numbered by position unless the rows' own numbers are unique."""
    prompts = [prompt for part in sets for prompt in part]
    ids = [prompt.id for prompt in prompts]
    if min(ids) >= 0 and len(set(ids)) == len(ids):
        return prompts
    return [replace(prompt, id=number) for number, prompt in enumerate(prompts)]
