"""Tables and figures of text in GitHub's Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from carryover.bench.statistics import Interval

DASH = "–"


def percent(ratio: Interval | None) -> str:
    """A ratio as a gain in percent, with its interval; a dash where there is none."""
    return DASH if ratio is None or not isfinite(ratio.value) else ratio.as_gain


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """A table; the first `left` columns align left, the others right."""
    marks = ["---" if place < left else "---:" for place in range(len(columns))]
    lines = [columns, marks, *rows]
    return "\n".join(f"| {' | '.join(_cell(each) for each in line)} |" for line in lines)


def narrow(text: str) -> str:
    """A figure with the interval below it, for tables of many columns."""
    return text.replace(" [", "<br>[")


def details(summary: str, lines: Sequence[str]) -> str:
    """A list that opens on a click."""
    listed = "\n".join(f"- {line}" for line in lines)
    return f"<details><summary>{summary}</summary>\n\n{listed}\n\n</details>"


def slug(text: str) -> str:
    """Text as a part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "section"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").strip()
