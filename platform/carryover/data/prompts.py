"""Prompts: user turns to which a target responds, from files, folders or Hugging Face data sets.

A row has one of these fields, looked for in this order:

    turns          list of user turns
    messages       list of {"role", "content"} (UltraChat)
    conversations  list of {"from", "value"} (Magpie, ShareGPT)
    prompt         one user turn
    instruction    one user turn

and may have `id`, `category` and `source`. Assistant messages are left out: responses are always
the target's own.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from carryover.config import Config
from carryover.data.lines import read_json_lines
from carryover.data.store import is_store, read_store
from carryover.errors import DataError

TEXT_FIELDS = ("turns", "messages", "conversations", "prompt", "instruction")
DEFAULT_CATEGORY = "general"
_ROLES = {
    "system": "system", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant",
}  # fmt: skip
PROMPTS = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("category", pa.string(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),
    ]
)
_FILE_SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prompt:
    """User turns of one conversation.

    Attributes:
        id: unique in its list: the row's own, or its position.
        source: data set that it comes from.
        category: kind of task.
        turns: user turns in order; at least one.
        system: system message, if the row has one.
    """

    id: int
    source: str
    category: str
    turns: tuple[str, ...]
    system: str | None = None

    def messages(self, replies: Sequence[str] = ()) -> list[dict[str, str]]:
        """Chat messages up to the user turn that follows `replies` (the earlier responses)."""
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn, reply in zip(self.turns, replies, strict=False):
            messages += [
                {"role": "user", "content": turn},
                {"role": "assistant", "content": reply},
            ]
        return [*messages, {"role": "user", "content": self.turns[len(replies)]}]


class PromptSource(Config):
    """Where prompts come from, and which of them."""

    path: str = Field(
        description="JSON lines or Parquet file, folder, or Hugging Face data set name"
    )
    split: str | None = Field(None, description="of a data set; null if it has only one")
    subset: str | None = Field(None, description="configuration name of a data set")
    limit: int | None = Field(None, ge=1, description="at most so many prompts")
    shuffle_seed: int | None = Field(None, description="null keeps the order")
    category: str | None = Field(None, description="replaces the rows' own")


def read_prompts(source: str | Path | PromptSource) -> list[Prompt]:
    """Read prompts.

    Args:
        source: a file, folder or data set name, or a `PromptSource` that selects from one.

    Raises:
        DataError: missing, unreadable, or a malformed row (with its line or row number).
    """
    if not isinstance(source, PromptSource):
        source = PromptSource(path=str(source))
    prompts = _numbered(list(_read(source)), source.path)
    if source.shuffle_seed is not None:
        random.Random(source.shuffle_seed).shuffle(prompts)
    if source.category is not None:
        prompts = [replace(prompt, category=source.category) for prompt in prompts]
    return prompts[: source.limit]


def read_prompt_sources(sources: Sequence[PromptSource]) -> list[Prompt]:
    """Read and join several sources; more than one are numbered anew, by position.

    Raises:
        DataError: as `read_prompts`.
    """
    lists = [read_prompts(source) for source in sources]
    if len(lists) == 1:
        return lists[0]
    joined = [prompt for prompts in lists for prompt in prompts]
    return [replace(prompt, id=number) for number, prompt in enumerate(joined)]


def parse_prompt(row: Mapping[str, Any], *, where: str, source: str) -> Prompt:
    """Make a prompt from one row; the id is the row's own, or -1.

    Args:
        row: fields as in the module's description.
        where: for errors, such as "prompts.jsonl, line 3".
        source: used if the row names none.

    Raises:
        DataError: no usable field, or a field of the wrong form.
    """
    name = next((name for name in TEXT_FIELDS if row.get(name) is not None), None)
    if name is None:
        raise DataError(
            f"{where}: no prompt; a row needs one of {', '.join(TEXT_FIELDS)}, "
            f"got {', '.join(row) or 'no fields'}"
        )
    value, system = row[name], None
    if name in ("prompt", "instruction"):
        turns = [value]
    elif not isinstance(value, list | tuple) or len(value) == 0:
        raise DataError(f"{where}: {name} must be a list that is not empty, got {value!r:.60}")
    elif name == "turns":
        turns = list(value)
    else:
        system, turns = _user_turns(value, where=f"{where}: {name}")
    for turn in turns:
        if not isinstance(turn, str) or not turn.strip():
            raise DataError(f"{where}: {name} must hold text, got {turn!r:.60}")
    if not turns:
        raise DataError(f"{where}: {name} has no user message")
    number = row.get("id")
    usable = isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 2**63
    return Prompt(
        id=number if usable else -1,
        source=str(row.get("source") or source),
        category=str(row.get("category") or row.get("task_category") or DEFAULT_CATEGORY),
        turns=tuple(turns),
        system=system,
    )


def _user_turns(messages: Sequence[Any], *, where: str) -> tuple[str | None, list[str]]:
    system, turns = None, []
    for message in messages:
        if not isinstance(message, Mapping):
            raise DataError(f"{where}: expected {{role, content}}, got {message!r:.60}")
        role = _ROLES.get(message.get("role", message.get("from")))
        text = message.get("content", message.get("value"))
        if role is None or not isinstance(text, str):
            raise DataError(
                f"{where}: a message needs a role ({', '.join(_ROLES)}) and its text, "
                f"got {message!r:.80}"
            )
        if role == "system" and not turns:
            system = text
        elif role == "user":
            turns.append(text)
    return system, turns


def _numbered(prompts: list[Prompt], path: str) -> list[Prompt]:
    """Keep the rows' ids if all have one and no two are alike; else number by position."""
    if not prompts:
        raise DataError(f"{path} holds no prompts")
    ids = [prompt.id for prompt in prompts]
    if min(ids) >= 0 and len(set(ids)) == len(ids):
        return prompts
    return [replace(prompt, id=number) for number, prompt in enumerate(prompts)]


def _read(source: PromptSource) -> Iterator[Prompt]:
    path = Path(source.path).expanduser()
    if path.is_file() or is_store(path):
        if source.split is not None or source.subset is not None:
            raise DataError(f"{path} is a file, and has neither split nor subset; leave them out")
        yield from _read_file(path)
    elif path.exists() or _is_data_set_name(source.path):
        yield from _read_data_set(source, local=path.exists())
    else:
        raise DataError(
            f"no prompts at {path}; give a JSON lines or Parquet file, a folder, "
            "or a Hugging Face data set such as HuggingFaceH4/ultrachat_200k"
        )


def _is_data_set_name(text: str) -> bool:
    return not text.startswith((".", "~", "/")) and not text.endswith(_FILE_SUFFIXES) and (
        text.count("/") == 1
    )  # fmt: skip


def _read_file(path: Path) -> Iterator[Prompt]:
    name = path.stem if path.is_file() else path.name
    if path.is_dir():
        rows, unit = enumerate(read_store(path, PROMPTS).to_pylist()), "row"
    elif path.suffix == ".parquet":
        rows, unit = enumerate(_parquet_rows(path)), "row"
    else:
        rows, unit = read_json_lines(path), "line"
    for number, row in rows:
        yield parse_prompt(row, where=f"{path}, {unit} {number}", source=name)


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    wanted = {*TEXT_FIELDS, "id", "source", "category", "task_category"}
    try:
        file = pq.ParquetFile(path)
        columns = [name for name in file.schema_arrow.names if name in wanted]
        if not set(columns) & set(TEXT_FIELDS):
            raise DataError(
                f"{path}: no column {', '.join(TEXT_FIELDS)}; it has "
                f"{', '.join(file.schema_arrow.names)}"
            )
        for batch in file.iter_batches(columns=columns):
            yield from batch.to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} is damaged or not Parquet: {error}") from None


def _read_data_set(source: PromptSource, *, local: bool) -> Iterator[Prompt]:
    rows = _load_data_set(source, local=local)
    name = Path(source.path).name
    left_out = 0
    for number, row in enumerate(rows):
        try:
            yield parse_prompt(row, where=f"{source.path}, row {number}", source=name)
        except DataError:
            # Its rows are not the user's to mend; but if it is of another form, say so.
            if number == left_out >= 10:
                raise
            left_out += 1
    if left_out:
        logger.warning("%s: left out %d rows without a usable prompt", source.path, left_out)


def _load_data_set(source: PromptSource, *, local: bool) -> Any:
    import datasets

    path = str(Path(source.path).expanduser()) if local else source.path
    saved = local and (Path(path) / "dataset_dict.json").exists()
    saved = saved or (local and (Path(path) / "state.json").exists())
    try:
        if saved:
            found = datasets.load_from_disk(path)
        else:
            found = datasets.load_dataset(path, source.subset)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"cannot load the data set {source.path!r}: {reason}\n"
            "give a name that this machine can reach, a folder that holds a copy of it, or a file"
        ) from None
    if not isinstance(found, datasets.DatasetDict):
        return found
    splits = list(found)
    split = source.split or (splits[0] if len(splits) == 1 else None)
    if split not in found:
        raise DataError(
            f"{source.path} has the splits {', '.join(splits)}; "
            + (f"got {source.split!r}" if source.split else "choose one: split: NAME")
        )
    return found[split]
