"""What the user of a target's training sees."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.train_view import View

if TYPE_CHECKING:
    from carryover.training.snapshots import Progress


class TargetView(View):
    """Shows the training of a target: loss instead of acceptance."""

    def plan_target(self, facts: Mapping[str, Any], folder: Path, num_steps: int) -> None:
        """What is trained on what, and for how long."""
        self.line(
            f"[bold]data[/]     {facts['conversations']:,} conversations, "
            f"{facts['characters']:,} characters, {facts['tokens']:,} tokens in "
            f"{facts['blocks']:,} blocks; {facts['held_out_blocks']:,} blocks held out"
        )
        self.line(f"[bold]target[/]   Llama, {facts['parameters'] / 1e6:.1f}M parameters")
        self.line(f"[bold]run[/]      {num_steps:,} steps; {folder}")

    def evaluation(self, event: Mapping[str, Any]) -> None:
        """The target was evaluated on held-out blocks."""
        metrics = event["metrics"]
        best = " (best so far)" if event["improved"] else ""
        self.line(
            f"step {event['step']:,}: held-out loss {metrics['loss']:.3f}, "
            f"perplexity {metrics['perplexity']:.2f}{best}"
        )

    def finished_target(self, folder: Path, progress: Progress) -> None:
        """The final table, and what to do next."""
        from rich.table import Table

        table = Table(title="target training", show_header=False, title_justify="left")
        table.add_column(style="bold")
        table.add_column()
        table.add_row("steps", f"{progress.step:,}")
        table.add_row(
            "training time", f"{progress.trained_s / 60:.1f} min for {progress.tokens:,} tokens"
        )
        if progress.best:
            table.add_row("lowest held-out loss", f"{progress.best['loss']:.3f}")
        table.add_row("target", str(folder / "best"))
        self._console.print(table)
        self.line(f"next:  platform data regenerate --target {folder / 'best'} --prompts ...")
