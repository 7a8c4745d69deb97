"""What a prompts or responses file holds, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from carryover.data.lines import read_json_lines
from carryover.data.prompts import Prompt, read_prompts
from carryover.data.responses import read_responses, responses_metadata
from carryover.data.store import is_store, part_files, read_metadata

HISTOGRAM_BINS = 10


@dataclass(frozen=True)
class Histogram:
    """Counts of whole numbers in bins of equal width.

    Attributes:
        unit: of the numbers.
        bins: (first number, last number, count).
        mean: of the numbers.
        median: of the numbers.
        longest: of the numbers.
    """

    unit: str
    bins: list[tuple[int, int, int]]
    mean: float
    median: float
    longest: int


@dataclass(frozen=True)
class Inspection:
    """What is in a file.

    Attributes:
        kind: `responses` or `prompts`.
        path: that was read.
        rows: how many there are.
        counts: for each column (category, source, ...), rows by value.
        cut: rows by temperature that ended at the length limit; empty for prompts.
        lengths: of each text column.
        metadata: target, settings, engine and versions, if the file records them.
    """

    kind: str
    path: str
    rows: int
    counts: dict[str, dict[str, int]]
    cut: dict[str, int]
    lengths: dict[str, Histogram]
    metadata: dict[str, Any]


def inspect(path: str | Path) -> tuple[Inspection, pa.Table | list[Prompt]]:
    """Read a prompts or responses file and count what is in it.

    Returns:
        The numbers, and the rows themselves.

    Raises:
        DataError: missing or malformed.
    """
    path = Path(path).expanduser()
    if _holds_responses(path):
        table = read_responses(path)
        return _inspect_responses(path, table), table
    prompts = read_prompts(path)
    return _inspect_prompts(path, prompts), prompts


def histogram(numbers: Sequence[int], *, unit: str, bins: int = HISTOGRAM_BINS) -> Histogram:
    """Count numbers (at least one, none negative) in `bins` or fewer bins of equal, round width."""
    ordered = sorted(numbers)
    longest = ordered[-1]
    width = _round_up(longest // bins + 1)
    counts = Counter(number // width for number in ordered)
    half = len(ordered) // 2
    middle = ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
    return Histogram(
        unit=unit,
        bins=[(i * width, (i + 1) * width - 1, counts[i]) for i in range(longest // width + 1)],
        mean=sum(ordered) / len(ordered),
        median=float(middle),
        longest=longest,
    )


def _round_up(width: int) -> int:
    """The next of 1, 2, 5, 10, 20, 50, ..."""
    scale = 1
    while True:
        for step in (1, 2, 5):
            if step * scale >= width:
                return step * scale
        scale *= 10


def _holds_responses(path: Path) -> bool:
    """Whether the first row has response tokens; a wrong guess ends in the right error."""
    if is_store(path):
        parts = part_files(path)
        if parts:
            return "response_ids" in pq.read_schema(parts[0]).names
        return "temperatures" in (read_metadata(path) or {}).get("settings", {})
    if not path.is_file():
        return False
    if path.suffix == ".parquet":
        try:
            return "response_ids" in pq.read_schema(path).names
        except pa.ArrowInvalid:
            return True
    return any("response_ids" in row for _, row in [next(read_json_lines(path), (0, {}))])


def _inspect_responses(path: Path, table: pa.Table) -> Inspection:
    temperatures = [f"{value:.4g}" for value in table.column("temperature").to_pylist()]
    finish = table.column("finish").to_pylist()
    counts = {name: _count(table.column(name).to_pylist()) for name in ("category", "source")}
    counts["finish"] = _count(finish)
    counts["temperature"] = _count(temperatures)
    return Inspection(
        kind="responses",
        path=str(path),
        rows=table.num_rows,
        counts=counts,
        cut=_count(t for t, reason in zip(temperatures, finish, strict=True) if reason == "length"),
        lengths={
            name: histogram(pc.list_value_length(table.column(column)).to_pylist(), unit="tokens")
            for name, column in (("prompt", "prompt_ids"), ("response", "response_ids"))
        },
        metadata=responses_metadata(table),
    )


def _inspect_prompts(path: Path, prompts: list[Prompt]) -> Inspection:
    parquet = is_store(path) or (path.is_file() and path.suffix == ".parquet")
    return Inspection(
        kind="prompts",
        path=str(path),
        rows=len(prompts),
        counts={
            "category": _count(prompt.category for prompt in prompts),
            "source": _count(prompt.source for prompt in prompts),
            "user turns": _count(len(prompt.turns) for prompt in prompts),
        },
        cut={},
        lengths={"prompt": histogram([len(p.turns[0]) for p in prompts], unit="characters")},
        metadata=(read_metadata(path) or {}) if parquet else {},
    )


def _count(values: Any) -> dict[str, int]:
    """Rows by value, most frequent first."""
    return dict(Counter(map(str, values)).most_common())
