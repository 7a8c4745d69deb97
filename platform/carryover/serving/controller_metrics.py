"""Prometheus metrics of the controller: what only it knows; requests are counted by the ingress.

Everything here is a gauge of the experiment's state, restored with it when the controller
restarts. A gauge without a value (no acceptance yet) is not set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.util.metrics import Gauge

VERDICTS = {"worse": -1.0, "inconclusive": 0.0, "better": 1.0}
_OF_EXPERIMENT = ("experiment",)
_OF_ARM = ("experiment", "arm")


class SplitMetrics:
    """Publishes the controller's overview."""

    def __init__(self) -> None:
        def gauge(name: str, description: str, keys: tuple[str, ...]) -> Gauge:
            return Gauge(f"carryover_split_{name}", description=description, tag_keys=keys)

        self._version = gauge("version", "Number of the split in force.", _OF_EXPERIMENT)
        self._step = gauge(
            "ramp_step", "Step of the ramp in progress, from 1; 0 without one.", _OF_EXPERIMENT
        )
        self._failed = gauge(
            "evaluation_failed", "1 while the guard's evaluation fails.", _OF_EXPERIMENT
        )
        self._dropped = gauge(
            "dropped_observations", "Requests that the statistics lack.", _OF_EXPERIMENT
        )
        self._compared = gauge("compared_requests", "Requests in the comparison.", _OF_ARM)
        self._errors = gauge("error_rate", "Share of compared requests that failed.", _OF_ARM)
        self._acceptance = gauge("acceptance_length", "Pooled acceptance length.", _OF_ARM)
        self._verdict = gauge(
            "verdict", "Against the control: 1 better, 0 inconclusive, -1 worse.",
            (*_OF_ARM, "metric"),
        )  # fmt: skip

    def __call__(self, overview: Mapping[str, Any]) -> None:
        """Set every gauge from `TrafficController`'s overview."""
        experiment = {"experiment": overview["experiment"]}
        ramp, failed = overview["ramp"], overview["evaluation"]["failed"]
        self._version.set(overview["version"], tags=experiment)
        self._step.set(0 if ramp is None else ramp["position"] + 1, tags=experiment)
        self._failed.set(1 if failed else 0, tags=experiment)
        self._dropped.set(overview["dropped"] + overview["unknown"], tags=experiment)
        for row in overview["arms"]:
            tags = {**experiment, "arm": row["arm"]}
            self._compared.set(row["requests"], tags=tags)
            for gauge, key in (
                (self._errors, "error_rate"),
                (self._acceptance, "acceptance_length"),
            ):
                # NaN is the only number that differs from itself.
                if row[key] is not None and row[key] == row[key]:
                    gauge.set(row[key], tags=tags)
        for arm, by_metric in overview["comparisons"].items():
            for metric, found in by_metric.items():
                tags = {**experiment, "arm": arm, "metric": metric}
                self._verdict.set(VERDICTS[found["verdict"]], tags=tags)
