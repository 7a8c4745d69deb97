"""What the user of a training job sees: one line per event, a progress bar, a final table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carryover.commands.options import log_console, progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars

    from carryover.training.session import Assignment, Data
    from carryover.training.snapshots import Progress
    from carryover.training.states import StateCache

_SMOOTHING = 0.1


class View:
    """Shows a training job on a console.

    Args:
        console: default: standard error, so that results can be piped.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or log_console()
        self._bars: Bars | None = None
        self._steps: Any = None
        self._caching: Any = None
        self._loss: float | None = None
        self._tokens_per_s: float | None = None
        self._acceptance: float | None = None
        self._started = False

    def line(self, text: str) -> None:
        """One line, above the bars if there are any."""
        console = self._console if self._bars is None else self._bars.console
        console.print(text, highlight=False, soft_wrap=True)

    def stage(self, text: str) -> None:
        """Something that takes a while begins."""
        self.line(f"[dim]…[/] {text}")

    def data(self, assignment: Assignment, data: Data) -> None:
        """What is trained on."""
        corpus, split = data.corpus, data.split
        tokens = corpus.num_response_tokens(split.train_N)
        capacity = assignment.config.batch.sequence_length
        remarks = [
            f"{count:,} {what}"
            for count, what in (
                (corpus.num_cut, f"cut at {capacity:,} tokens"),
                (corpus.num_dropped, "dropped as too short or with too long a prompt"),
            )
            if count
        ]
        self.line(
            f"[bold]data[/]     {len(split.train_N):,} responses with {tokens:,} tokens in "
            f"{len(data.packs):,} packs of up to {capacity:,}; {len(split.held_out_N):,} held out"
            + "".join(f"; {remark}" for remark in remarks)
        )

    def plan(self, description: Mapping[str, Any], folder: Path, num_steps: int) -> None:
        """What is trained, and for how long."""
        vocabulary = f"{description['draft_vocab_size']:,}"
        if description["draft_vocab_size"] != description["target_vocab_size"]:
            vocabulary += f" of {description['target_vocab_size']:,}"
        self.line(
            f"[bold]drafter[/]  {description['kind']} {description['regime']}, "
            f"{description['layers']} layers, {description['parameters'] / 1e6:.1f}M parameters, "
            f"{description['proposal_length']} tokens a round, vocabulary {vocabulary}, reads "
            f"target layers {', '.join(map(str, description['target_layer_ids']))}"
        )
        self.line(f"[bold]run[/]      {num_steps:,} steps; {folder}")

    def cache(self, cache: StateCache) -> None:
        """How much disk the hidden states take, before anything is written."""
        missing = cache.missing_bytes()
        state = f"{missing / 1e9:.2f} GB to compute and write" if missing else "complete, reused"
        self.line(f"[bold]states[/]   {cache.size_bytes / 1e9:.2f} GB in {cache.folder}: {state}")

    def reused(self, folder: Path, progress: Progress) -> None:
        """The run was finished before."""
        self.line(
            f"[bold]run[/]      {folder} is finished ({progress.step:,} steps); reusing it. "
            "Another --name trains beside it, --restart again"
        )

    def resumed(self, folder: Path, progress: Progress | None) -> None:
        """The run is continued."""
        at = f"step {progress.step:,} of {progress.num_steps:,}" if progress else "its beginning"
        self.line(f"[bold]run[/]      continuing {folder} from {at}")

    def verified(self, summary: str) -> None:
        """The untrained drafter runs in vLLM."""
        self.line(f"[bold]vLLM[/]     {summary}")

    def stopping(self) -> None:
        """The user wants to stop."""
        self.line("stopping after this step, with a checkpoint; Ctrl-C again stops at once without")

    def stopped(self, folder: Path, progress: Progress | None) -> None:
        """The run was stopped by the user."""
        if progress is None:
            self.line("stopped before the first checkpoint; the same command begins again")
        else:
            self.line(
                f"stopped; {folder / 'last'} is the drafter after step {progress.step:,}. The same "
                "command continues the run"
            )

    @contextmanager
    def progress(self, num_steps: int, cache: StateCache | None) -> Iterator[None]:
        """Bars while workers train."""
        with progress() as self._bars:
            missing = cache.missing_tokens() if cache is not None else 0
            if missing:
                self._caching = self._bars.add_task("hidden states", total=missing, rate="tokens")
            self._steps = self._bars.add_task("training", total=num_steps, rate="", start=False)
            try:
                yield
            finally:
                self._bars.stop()
                self._bars = None

    def worker_stage(self, event: Mapping[str, Any]) -> None:
        """A worker reached a stage."""
        if event["name"] == "training":
            if self._started:
                self.line(f"a worker was lost; continuing from step {event['step']:,}")
            self._started = True
            self._bars.update(self._steps, completed=event["step"])
            self._bars.start_task(self._steps)
        else:
            self.stage(event["name"])

    def cached(self, event: Mapping[str, Any]) -> None:
        """Hidden states of some tokens were written."""
        if self._caching is not None:
            self._bars.advance(self._caching, event["tokens"])

    def step(self, event: Mapping[str, Any]) -> None:
        """A step was done."""
        speed = event["pack_tokens"] / max(event["step_s"], 1e-9)
        self._loss = _smooth(self._loss, event["metrics"]["loss"])
        self._tokens_per_s = _smooth(self._tokens_per_s, speed)
        parts = [f"loss {self._loss:.3f}", f"{self._tokens_per_s:,.0f} tokens/s"]
        if self._acceptance is not None:
            parts.append(f"acceptance {self._acceptance:.2f}")
        self._bars.update(self._steps, completed=event["step"], rate=", ".join(parts))

    def evaluation(self, event: Mapping[str, Any]) -> None:
        """The drafter was evaluated on held-out rows."""
        self._acceptance = event["metrics"]["acceptance_length"]
        loss = "" if self._loss is None else f", training loss {self._loss:.3f}"
        best = " (best so far)" if event["improved"] else ""
        self.line(
            f"step {event['step']:,}: held-out acceptance length {self._acceptance:.3f}{best}{loss}"
        )

    def checkpoint(self, event: Mapping[str, Any]) -> None:
        """A checkpoint was written."""
        self.line(f"step {event['step']:,}: checkpoint {event['path']}")

    def finished(self, folder: Path, progress: Progress, kind: str) -> None:
        """The final table, and what to do next."""
        from rich.table import Table

        table = Table(title=f"{kind} training", show_header=False, title_justify="left")
        table.add_column(style="bold")
        table.add_column()
        minutes = progress.trained_s / 60
        table.add_row("steps", f"{progress.step:,} ({progress.skipped_steps} skipped)")
        table.add_row("training time", f"{minutes:.1f} min for {progress.tokens:,} tokens of packs")
        if progress.evaluation:
            table.add_row("held-out acceptance length", _acceptance(progress.evaluation))
            table.add_row("  of the best checkpoint", _acceptance(progress.best))
        table.add_row("best checkpoint", str(folder / "best"))
        table.add_row("last checkpoint", str(folder / "last"))
        self._console.print(table)
        self.line(f"next:  platform checkpoint verify {folder / 'best'}")
        if kind == "baseline":
            self.line(f"       platform train carryover --from {folder / 'best'} --config ...")


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else (1 - _SMOOTHING) * old + _SMOOTHING * new


def _acceptance(evaluation: Mapping[str, float]) -> str:
    return f"{evaluation['acceptance_length']:.3f} at step {evaluation['step']:,.0f}"
