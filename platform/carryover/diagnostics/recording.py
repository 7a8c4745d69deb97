"""A diagnosis as a run in MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from carryover.diagnostics.headroom import Headroom
    from carryover.diagnostics.replay import Replay
    from carryover.diagnostics.session import Job
    from carryover.tracking import Tracker

EXPERIMENT = "diagnostics"
KIND_TAG = "carryover.diagnostic"
Kind = Literal["headroom", "replay"]


def record(tracker: Tracker, kind: Kind, name: str, job: Job, found: Replay | Headroom) -> str:
    """Record a diagnosis, and return the run's id.

    Args:
        tracker: of the store.
        kind: of diagnosis.
        name: of the run.
        job: what was asked.
        found: the answer; all numbers in it become metrics, lists by block position, and all words
            parameters.
    """
    with tracker.run(experiment=EXPERIMENT, name=name, tags={KIND_TAG: kind}) as run:
        answer = asdict(found)
        words = {key: value for key, value in answer.items() if isinstance(value, str)}
        asked = {key: str(value) for key, value in asdict(job).items() if value is not None}
        run.log_params(asked | words)
        run.log_dict(answer, f"{kind}.json")
        run.log_metrics(_flat({key: answer[key] for key in answer.keys() - words.keys()}))
        return run.id


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    metrics: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            metrics |= _flat(value, f"{prefix}{key}/")
        elif isinstance(value, list):
            for each in value:
                place = each.pop("slot", None) or each.pop("position")
                top = f"_{each.pop('top')}" if "top" in each else ""
                metrics |= _flat(each, f"{prefix}{key}{top}/position_{place}/")
        else:
            metrics[f"{prefix}{key}"] = float(value)
    return metrics
