"""Files of a finished bench: rows, tables and report."""

from __future__ import annotations

from pathlib import Path

from carryover.bench.records import write_requests
from carryover.bench.result import BenchResult

ROWS = "requests.parquet"


def write_outputs(result: BenchResult) -> None:
    """Write everything that is made from a result into its folder."""
    write_requests(result.requests, result.folder / ROWS)


def output_files(result: BenchResult) -> list[Path]:
    """What `write_outputs` wrote."""
    names = (ROWS, "requests.csv", "report.html")
    listed = [result.folder / name for name in names]
    listed += sorted(result.folder.glob("*.png"))
    return [path for path in listed if path.exists()]
