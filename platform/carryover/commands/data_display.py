"""How `platform data` shows progress, results and files in the terminal."""

from __future__ import annotations

import random
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from carryover.commands.options import log_console, progress
from carryover.errors import TargetError

if TYPE_CHECKING:
    import pyarrow as pa

    from carryover.data.inspection import Histogram, Inspection
    from carryover.data.prompts import Prompt
    from jobs.regenerate import RegenerationSummary
    from jobs.synthesize import SynthesisSummary

LOG_EVERY_S = 30.0
_BAR_WIDTH = 40
_SAMPLE_CHARACTERS = 600


class Reporter:
    """Shows a job's events: a bar in a terminal, a line every half minute elsewhere.

    Args:
        what: is being made, as in "prompts".
        resume_hint: folder that keeps what is done, named when the job is interrupted.
    """

    def __init__(self, what: str, *, resume_hint: str) -> None:
        self._what = what
        self._hint = resume_hint
        self._console = log_console()
        self._bar = progress() if self._console.is_terminal else None
        self._task: Any = None
        self._logged = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if isinstance(error, KeyboardInterrupt):
            self._console.print(
                f"stopped; what is done is in [bold]{escape(self._hint)}[/], "
                "and the same command goes on from there"
            )

    def __call__(self, event: Any) -> None:
        from jobs.regenerate import Estimate, RegenerationProgress

        if isinstance(event, str):
            self._remark(event)
        elif isinstance(event, Estimate):
            self._remark(
                f"{event.rows:,} to go, about {event.tokens_per_response:.0f} tokens each at "
                f"{event.tokens_per_s:,.0f} tokens/s: {duration(event.seconds)}, at most "
                f"{size(event.disk_bytes)} on disk ({size(event.free_bytes)} free)"
            )
        elif isinstance(event, RegenerationProgress):
            self._advance(event.rows, event.total, event.tokens_per_s, event.seconds_left)
        else:
            self._advance(event.found, event.wanted, event.tokens_per_s, None)

    def _remark(self, text: str) -> None:
        (self._bar.console if self._bar else self._console).print(escape(text), highlight=False)

    def _advance(self, done: int, total: int, speed: float, seconds_left: float | None) -> None:
        rate = f"{speed:,.0f} tokens/s" if speed else ""
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task(self._what, total=total, rate=rate)
                self._bar.start()
            self._bar.update(self._task, completed=done, total=total, rate=rate)
        elif time.monotonic() - self._logged >= LOG_EVERY_S:
            self._logged = time.monotonic()
            left = "" if seconds_left is None else f", {duration(seconds_left)} left"
            self._remark(f"{done:,} of {total:,} {self._what}{', ' * bool(rate)}{rate}{left}")


def show_synthesis(console: Console, summary: SynthesisSummary) -> None:
    """Print how many prompts there are and what was left out."""
    console.print(
        f"[bold green]{summary.found:,} prompts[/] in {escape(summary.path)} "
        f"({summary.added:,} new, from {summary.attempts:,} attempts)",
        highlight=False,
    )
    if summary.rejected:
        left_out = ", ".join(f"{count:,} {reason}" for reason, count in summary.rejected.items())
        console.print(f"left out: {left_out}", highlight=False)
    console.print(f"look: [cyan]platform data inspect {escape(summary.path)}[/]", highlight=False)


def show_regeneration(
    console: Console, summary: RegenerationSummary, *, max_prompt_tokens: int
) -> None:
    """Print how many responses there are, how many were cut, and what was left out."""
    counts = summary.counts
    console.print(
        f"[bold green]{summary.rows:,} responses[/] in {escape(summary.path)} "
        f"({counts.done:,} new, {counts.stored:,} there before)",
        highlight=False,
    )
    if counts.done:
        console.print(
            f"{counts.response_tokens:,} tokens in {duration(summary.seconds)}: "
            f"{summary.tokens_per_s:,.0f} tokens/s; {counts.cut:,} of {counts.done:,} "
            f"({counts.cut / counts.done:.0%}) were cut at the length limit",
            highlight=False,
        )
    if counts.too_long:
        console.print(f"left out: {counts.too_long:,} longer than {max_prompt_tokens} tokens")
    if counts.refused:
        console.print(
            f"[yellow]left out: {counts.refused:,} that the engine refused[/], the first because: "
            f"{escape(summary.first_refusal)}"
        )
    if summary.restarts:
        console.print(f"[yellow]{summary.restarts} engine restarts[/]")
    console.print(f"look: [cyan]platform data inspect {escape(summary.path)}[/]", highlight=False)


def show_inspection(console: Console, found: Inspection) -> None:
    """Print the numbers of a file."""
    console.print(f"[bold]{found.rows:,} {found.kind}[/] in {escape(found.path)}", highlight=False)
    target = found.metadata.get("target")
    if target:
        parts = [f"{key} {value}" for key, value in target.items() if key != "tokenizer_sha256"]
        console.print(f"target: {escape(', '.join(parts))}", highlight=False)
        console.print(f"tokenizer: sha256 {target['tokenizer_sha256']}", highlight=False)
    for key in ("engine", "settings"):
        if found.metadata.get(key):
            values = ", ".join(f"{name} {_short(v)}" for name, v in found.metadata[key].items())
            console.print(f"{key}: {escape(values)}", highlight=False)
    for name, counts in found.counts.items():
        table = Table(title=name, title_justify="left", box=None, show_header=False)
        for value, count in list(counts.items())[:20]:
            share = count / found.rows
            table.add_row(escape(value), f"{count:,}", f"{share:6.1%}", _bar(share))
        if len(counts) > 20:
            table.add_row(f"and {len(counts) - 20} more")
        console.print(table)
    if found.kind == "responses":
        cut = sum(found.cut.values())
        by_temperature = ", ".join(
            f"{found.cut.get(t, 0) / total:.0%} at {t}"
            for t, total in sorted(found.counts["temperature"].items())
        )
        console.print(
            f"cut at the length limit: {cut:,} of {found.rows:,} ({cut / found.rows:.1%}); "
            f"by temperature: {by_temperature}",
            highlight=False,
        )
    for name, lengths in found.lengths.items():
        _show_histogram(console, name, lengths)


def show_samples(
    console: Console,
    found: Inspection,
    rows: pa.Table | list[Prompt],
    *,
    count: int,
    seed: int,
    target: str | None,
) -> None:
    """Print some rows; responses are decoded with their target's tokenizer.

    Raises:
        TargetError: `target` was given and cannot be read.
    """
    chosen = sorted(random.Random(seed).sample(range(found.rows), min(count, found.rows)))
    if not chosen:
        return
    if found.kind == "prompts":
        for number in chosen:
            prompt = rows[number]
            console.rule(f"{prompt.id} · {escape(prompt.category)}", align="left")
            console.print(_clip("\n\n".join(prompt.turns)), markup=False, highlight=False)
        return
    name = target or found.metadata.get("target", {}).get("name")
    if name is None:
        console.print("no samples: the file names no target; give --target to decode them")
        return
    from carryover.targets import resolve

    try:
        tokenizer = resolve(name).load_tokenizer()
    except TargetError as error:
        if target is not None:
            raise
        console.print(f"no samples: {escape(str(error))}; give --target to decode them")
        return
    for row in rows.take(chosen).to_pylist():
        console.rule(
            f"{row['id']} · {escape(row['category'])} · temperature {row['temperature']:.4g} · "
            f"{len(row['response_ids'])} tokens · {row['finish']}",
            align="left",
        )
        prompt, response = (tokenizer.decode(row[key]) for key in ("prompt_ids", "response_ids"))
        console.print(_clip(prompt), style="dim", markup=False, highlight=False)
        console.print(_clip(response), markup=False, highlight=False)


def duration(seconds: float) -> str:
    """A time in the unit that suits it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def size(num_bytes: float) -> str:
    """A size in the unit that suits it."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def _show_histogram(console: Console, name: str, lengths: Histogram) -> None:
    console.print(
        f"[italic]{name} length in {lengths.unit}[/]: mean {lengths.mean:.1f}, "
        f"median {lengths.median:g}, longest {lengths.longest}",
        highlight=False,
    )
    table = Table(box=None, show_header=False)
    highest = max(count for _, _, count in lengths.bins)
    for low, high, count in lengths.bins:
        label = f"{low}" if low == high else f"{low}-{high}"
        table.add_row(label, f"{count:,}", _bar(count / highest))
    console.print(table)


def _bar(share: float) -> str:
    """A bar of eighths of a character; what is not nothing shows."""
    eighths = round(share * _BAR_WIDTH * 8) or (1 if share > 0 else 0)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _clip(text: str) -> str:
    if len(text) <= _SAMPLE_CHARACTERS:
        return text
    return f"{text[:_SAMPLE_CHARACTERS]} ... ({len(text) - _SAMPLE_CHARACTERS} more characters)"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
