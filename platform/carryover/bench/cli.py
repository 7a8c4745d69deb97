"""Processor time of `platform --help` beside a Typer program of one empty command.

    python -m carryover.bench.cli --json

What is above 1 is ours: command modules, and whatever they import before a command runs. Both are
started in turn, and the fastest of each is taken: start-up has a floor, and noise only adds.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys

EMPTY = "import typer\napp = typer.Typer()\n@app.command()\ndef empty(): 'Nothing.'\napp()"


def main(arguments: list[str] | None = None) -> None:
    """Measure both and print the ratio."""
    parser = argparse.ArgumentParser(prog="python -m carryover.bench.cli")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--starts", type=int, default=10, help="of each program")
    options = parser.parse_args(arguments)
    programs = {"platform": ["-m", "carryover", "--help"], "empty": ["-c", EMPTY, "--help"]}
    fastest = {name: float("inf") for name in programs}
    for _ in range(options.starts):
        for name, words in programs.items():
            fastest[name] = min(fastest[name], _cpu_s([sys.executable, "-P", *words]))
    report = {
        "help_ratio": round(fastest["platform"] / fastest["empty"], 3),
        "cpu_s": {name: round(seconds, 3) for name, seconds in fastest.items()},
    }
    if options.json:
        print(json.dumps(report))
        return
    for name, seconds in report["cpu_s"].items():
        print(f"{name:9} {seconds:.3f} s of processor time")
    print(f"ratio {report['help_ratio']} (goal: at most 1.5)")


def _cpu_s(command: list[str]) -> float:
    """Processor time of one run of a command, in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


if __name__ == "__main__":
    main()
