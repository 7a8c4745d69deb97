"""What the controller tells: the overview for `show`, and everything for `report`. Pure.

Numbers that do not exist (a percentile of no request) are null, since JSON knows no NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from carryover.serving.changes import State
from carryover.serving.evaluation import Comparisons, Evaluation
from carryover.serving.guard import GuardRules
from carryover.serving.observations import ArmStatistics
from carryover.serving.replicas import Replica


def overview(
    state: State, statistics: Mapping[str, ArmStatistics], comparisons: Comparisons, *,
    arms: Sequence[str], rules: GuardRules, now: float,
) -> dict[str, Any]:  # fmt: skip
    """The split and what came of it so far: what `show` prints.

    Args:
        state: in force.
        statistics: by arm.
        comparisons: with the control, by arm and metric.
        arms: names of all arms, the control first.
        rules: of the guard.
        now: seconds since the epoch.
    """
    traffic, ramp = state.traffic, state.ramp
    return {
        "experiment": traffic.experiment,
        "status": "ended" if state.ended else "paused" if traffic.paused else "running",
        "version": traffic.version,
        "time_s": now,
        "began_s": state.began,
        "since_s": state.since,
        "control": arms[0],
        "weights": dict(traffic.weights),
        "kept_weights": None if state.kept is None else dict(state.kept.weights),
        "shadow": None if traffic.shadow is None else traffic.shadow.model_dump(),
        "ramp": None if ramp is None else ramp.model_dump(mode="json"),
        "revoked": list(traffic.revoked),
        "arms": [
            {
                "arm": arm,
                "weight": traffic.weights[arm],
                **statistics[arm].summary(),
            }
            for arm in arms
        ],
        "comparisons": {
            arm: {metric: asdict(found) for metric, found in by_metric.items()}
            for arm, by_metric in comparisons.items()
        },
        "guard": rules.model_dump(mode="json"),
    }


def evaluation_view(last: Evaluation | None, *, failed: str, count: int) -> dict[str, Any]:
    """The last evaluation of the guard.

    Args:
        last: what it found; None before the first.
        failed: why the last one failed; empty if it did not.
        count: evaluations of this experiment so far.
    """
    view: dict[str, Any] = {"count": count, "failed": failed}
    if last is not None:
        view |= {"time_s": last.time_s, "decision": last.decision, "why": last.why}
    return view


def replica_views(replicas: Mapping[str, Replica], *, now: float) -> list[dict[str, Any]]:
    """The live ingress replicas."""
    return [
        {"replica": name, "version": found.version, "seen_s_ago": max(0.0, now - found.seen_s)}
        for name, found in sorted(replicas.items())
    ]


def without_nan(value: Any) -> Any:
    """The same value with null for every number that JSON cannot hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: without_nan(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return value
