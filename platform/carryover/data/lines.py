"""JSON lines with line numbers in their errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from carryover.errors import DataError


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) for every line that is not blank.

    Raises:
        DataError: no such file, not UTF-8, or a line that is not a JSON object.
    """
    try:
        file = path.open(encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    with file:
        number = 0
        try:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise DataError(
                        f"{path}, line {number}: expected an object like {{...}}, "
                        f"got {line.strip()[:60]}"
                    )
                yield number, row
        except UnicodeDecodeError as error:
            raise DataError(f"{path}, near line {number + 1}: not UTF-8 text ({error})") from None
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: not valid JSON: {error}") from None
