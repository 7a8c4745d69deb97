"""Files of a finished bench: rows, tables and report."""

from __future__ import annotations

from pathlib import Path

from carryover.bench.records import write_requests
from carryover.bench.result import BenchResult

ROWS, PAGE = "requests.parquet", "report.html"


def write_outputs(result: BenchResult) -> None:
    """Write everything that is made from a result into its folder."""
    # the rows first: a report that fails must not take them along
    write_requests(result.requests, result.folder / ROWS)
    if result.config.report:
        from carryover.bench.html import write_report

        write_report(result, result.folder / PAGE)


def output_files(result: BenchResult) -> list[Path]:
    """What `write_outputs` wrote."""
    names = (ROWS, "requests.csv", PAGE)
    listed = [result.folder / name for name in names]
    listed += sorted(result.folder.glob("*.png"))
    return [path for path in listed if path.exists()]
