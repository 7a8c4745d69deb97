"""The benchmarks of this repository's own parts, one after the other, in one table of ratios.

    python -m carryover.bench.parts [--only NAME ...] [--json]

Each part is measured by a module of this package, in a process of its own, as a ratio of two
things that ran in turn on this machine: ratios survive a slower machine, seconds do not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Ratio:
    """One ratio of a part.

    Attributes:
        part: module in `carryover.bench`.
        key: of its JSON report; a mapping there gives a ratio for each of its keys.
        text: what is divided by what.
        goal: bound, None where the ratio is only told.
        bound: on which side of the goal is good; `near` is within 3%.
    """

    part: str
    key: str
    text: str
    goal: float | None = None
    bound: Literal["least", "most", "near"] = "most"

    def met(self, value: float) -> bool | None:
        """Whether the goal is reached; None without one."""
        if self.goal is None:
            return None
        if self.bound == "near":
            return abs(value / self.goal - 1) <= 0.03
        return value >= self.goal if self.bound == "least" else value <= self.goal

    def show_goal(self) -> str:
        """The goal in words."""
        if self.goal is None:
            return ""
        return {"least": "at least", "most": "at most", "near": "within 3% of"}[self.bound] + (
            f" {self.goal:g}"
        )


RATIOS = (
    Ratio("cli", "help_ratio", "`platform --help` over an empty Typer program's", 1.5),
    Ratio("train_step", "tokens_per_s_ratio", "training speed over speculators'", 2.5, "least"),
    Ratio("train_step", "peak_memory_ratio", "training memory over speculators'", 0.35),
    Ratio("transition", "parallel_over_sequential",
          "draft-verify-draft, all anchors at once over one by one"),
    Ratio("transition", "carryover_over_control", "time of a Carryover step over a control step"),
    Ratio("transition", "memory_growth", "memory with twice the anchors over once"),
    Ratio("plugin", "draft_step_ratio", "draft step with carried rows over without, batch", 1.05),
    Ratio("plugin", "markov_draft_step_ratio", "the same of a Markov drafter, batch"),
    Ratio("plugin", "markov_over_dflash", "Markov draft step over DFlash, batch"),
    Ratio("plugin", "end_to_end_ratio", "engine tokens/s, carrying over not", 0.97, "least"),
    Ratio("plugin", "plugin_off_over_absent", "stock engine, plugin registered over absent",
          1.0, "near"),
    Ratio("ingress", "p50_latency_ratio", "median latency, our ingress over Ray's", 1.05),
    Ratio("ingress", "throughput_ratio", "requests/s, our ingress over Ray's", 0.95, "least"),
    Ratio("crosscheck", "throughput_ratio", "tokens/s, this bench over `vllm bench serve`",
          1.0, "near"),
)  # fmt: skip
PARTS = tuple(dict.fromkeys(ratio.part for ratio in RATIOS))


@dataclass(frozen=True)
class Measured:
    """What came of a part.

    Attributes:
        part: its name.
        seconds: how long it took.
        report: its JSON; None if it failed.
        problem: the end of its errors if it failed.
    """

    part: str
    seconds: float
    report: Mapping[str, Any] | None
    problem: str = ""


def main(arguments: list[str] | None = None) -> int:
    """Measure the parts and print the table; returns 1 if one could not be measured."""
    parser = argparse.ArgumentParser(prog="python -m carryover.bench.parts")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="NAME",
                        help=f"of {', '.join(PARTS)}")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    found = []
    for part in options.only:
        print(f"measuring {part} ...", file=sys.stderr, flush=True)
        found.append(measure(part))
    if options.json:
        print(json.dumps({each.part: each.report for each in found}))
    else:
        _print(found)
    for each in found:
        if each.report is None:
            print(f"{each.part} failed:\n{each.problem}", file=sys.stderr)
    return int(any(each.report is None for each in found))


def measure(part: str) -> Measured:
    """Run one part in a process of its own."""
    started_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-P", "-m", f"carryover.bench.{part}", "--json"],
        capture_output=True, text=True,
    )  # fmt: skip
    seconds = time.monotonic() - started_s
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return Measured(part, seconds, json.loads(lines[-1]))
    return Measured(part, seconds, None, done.stderr.strip()[-2000:])


def rows(found: list[Measured]) -> list[tuple[str, str, float | None, str, bool | None]]:
    """Part, what, value, goal, and whether it is met; a value of None was not measured."""
    listed = []
    for measured in found:
        for ratio in (ratio for ratio in RATIOS if ratio.part == measured.part):
            value = None if measured.report is None else measured.report.get(ratio.key)
            if not isinstance(value, Mapping):
                value = {"": value}
            for name, number in value.items():
                text = f"{ratio.text} {name}".strip()
                met = None if number is None else ratio.met(number)
                listed.append((measured.part, text, number, ratio.show_goal(), met))
    return listed


def _print(found: list[Measured]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading, justify in (("part", "left"), ("ratio", "left"), ("value", "right"),
                             ("goal", "left"), ("", "left")):  # fmt: skip
        table.add_column(heading, justify=justify)
    for part, text, value, goal, met in rows(found):
        shown = "[red]not measured[/]" if value is None else f"{value:.3f}"
        mark = {None: "", True: "[green]met[/]", False: "[yellow]missed[/]"}[met]
        table.add_row(part, text, shown, goal, mark)
    Console().print(table)
    took = ", ".join(f"{each.part} {each.seconds:.0f} s" for each in found)
    print(f"took: {took}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
