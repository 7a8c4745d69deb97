"""What becomes of the workers' records: MLflow metrics, and lines and bars for the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from carryover.tracking import Run
from jobs.train_view import View

MAX_RECORDED_STEPS = 2000


class Recorder:
    """Takes the workers' records, in order.

    Args:
        run: gets the metrics.
        view: shows them.
        num_steps: of the whole run; of more than 2,000 not every step is recorded.
        states_s: as the attribute, of earlier starts of this run.

    Attributes:
        states_s: seconds that workers took for states that are kept on disk, all workers added up.
        error: class name and message of a user's error in a worker, or None.
    """

    def __init__(self, run: Run, view: View, num_steps: int, *, states_s: float = 0.0) -> None:
        self.view = view
        self.states_s = states_s
        self.error: tuple[str, str] | None = None
        self._run = run
        self._every = max(1, num_steps // MAX_RECORDED_STEPS)

    def take(self, event: Mapping[str, Any]) -> None:
        """Record one."""
        kind = event["kind"]
        if kind == "error":
            self.error = self.error or (event["type"], event["message"])
        elif kind == "step":
            self.view.step(event)
            if event["step"] % self._every == 0 or event["step"] == 1:
                self._run.log_metrics(step_metrics(event), event["step"])
        elif kind == "evaluation":
            self.view.evaluation(event)
            metrics = {f"eval/{name}": value for name, value in event["metrics"].items()}
            metrics["time/evaluation_s"] = event["evaluation_s"]
            self._run.log_metrics(metrics, event["step"])
        elif kind == "checkpoint":
            self.view.checkpoint(event)
            self._run.log_metrics({"time/checkpoint_s": event["checkpoint_s"]}, event["step"])
        elif kind == "cached":
            self.states_s += event["seconds"]
            self.view.cached(event)
        elif kind == "stage":
            self.view.worker_stage(event)


def step_metrics(event: Mapping[str, Any]) -> dict[str, float]:
    """MLflow metrics of one step."""
    step_s = max(event["step_s"], 1e-9)
    metrics = {f"train/{name}": value for name, value in event["metrics"].items()}
    metrics |= {f"time/{name}_s": value for name, value in event["stages_s"].items()}
    metrics |= {
        "train/lr": event["lr"],
        "train/epoch": event["epoch"],
        "train/gradient_norm": event["gradient_norm"],
        "train/skipped_steps": event["skipped_steps"],
        "train/tokens_per_s": event["pack_tokens"] / step_s,
        "train/anchors_per_s": event["metrics"].get("anchors", 0) / step_s,
        "time/step_s": step_s,
    }
    return metrics
