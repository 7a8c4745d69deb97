"""An experiment of the split in MLflow: one run, with its verdicts and tables."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from threading import RLock
from typing import Any

from carryover.tracking import Run, Tracker

EXPERIMENT = "traffic"
_RELATIVE = "relative relative_low relative_high"
_NO_METRIC = ("arm", "acceptance_per_position")


class ExperimentRecorder:
    """Writes reports of the controller to MLflow; every call may wait for the store.

    Args:
        uri: of the store; see `stores.store_uri`.
        described: by arm, what it is, for the run's parameters.
    """

    def __init__(
        self, uri: str | None, *, described: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        self._tracker = Tracker(uri)
        self._described = {
            f"{arm}.{key}": value
            for arm, about in (described or {}).items()
            for key, value in about.items()
        }
        self._open = ExitStack()
        self._run: Run | None = None
        self._lock = RLock()

    def record(
        self, report: Mapping[str, Any], run_id: str | None, final: bool
    ) -> str | None:
        """Record an experiment as it stands.

        Args:
            report: of the controller, without NaN.
            run_id: the experiment's run; None starts one, if there is anything to compare.
            final: whether the experiment is over, which ends the run.

        Returns:
            Id of the run; None while there is none.

        Raises:
            EnvironmentProblem: the store cannot be used.
        """
        with self._lock:
            if run_id is None and not has_results(report):
                return None
            run = self._continue(report, run_id)
            step = max(0, int(report["time_s"] - report["began_s"]))
            run.log_metrics(numbers(report), step=step)
            run.set_tags({**verdicts(report), "carryover.status": report["status"]})
            for name in ("arms", "comparisons", "log", "statistics"):
                run.log_dict(report[name], f"{name}.json")
            if final:
                try:
                    run.log_text(_page(report), "report.html")
                finally:
                    self.close()
            return run.id

    def close(self) -> None:
        """End the run in progress; a later `record` can continue it."""
        with self._lock:
            self._open.close()
            self._run = None

    def _continue(self, report: Mapping[str, Any], run_id: str | None) -> Run:
        if self._run is not None and self._run.id == run_id:
            return self._run
        self.close()
        run = self._open.enter_context(
            self._tracker.run(experiment=EXPERIMENT, name=report["experiment"], run_id=run_id)
        )
        if run_id is None:
            run.log_params(
                {
                    "control": report["control"],
                    "arms": [row["arm"] for row in report["arms"]],
                    "began_s": report["began_s"],
                    **self._described,
                    "guard": report["guard"],
                }
            )
        self._run = run
        return run


def _page(report: Mapping[str, Any]) -> str:
    # matplotlib, for the end of an experiment alone
    from carryover.serving.report import render

    return render(report)


def has_results(report: Mapping[str, Any]) -> bool:
    """Whether requests of two arms can be compared."""
    return sum(row["requests"] > 0 for row in report["arms"]) > 1


def numbers(report: Mapping[str, Any]) -> dict[str, float]:
    """Metrics of a run: `ARM.NAME` of each arm, and `ARM.METRIC.relative...` of comparisons."""
    found = {
        f"{row['arm']}.{name}": value
        for row in report["arms"]
        for name, value in row.items()
        if name not in _NO_METRIC and value is not None
    }
    for arm, by_metric in report["comparisons"].items():
        for metric, comparison in by_metric.items():
            # The error rate is compared by its difference; other metrics by their relative change.
            form = "estimate low high" if metric == "error_rate" else _RELATIVE
            for name in form.split():
                if comparison[name] is not None:
                    found[f"{arm}.{metric}.{name}"] = comparison[name]
    return found


def verdicts(report: Mapping[str, Any]) -> dict[str, str]:
    """Tags of a run: `verdict.ARM.METRIC`."""
    return {
        f"verdict.{arm}.{metric}": comparison["verdict"]
        for arm, by_metric in report["comparisons"].items()
        for metric, comparison in by_metric.items()
    }
