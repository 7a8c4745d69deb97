"""The controller as a Ray Serve deployment: with MLflow, metrics, and an orderly end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray import serve

from carryover.serving.controller import TrafficController
from carryover.serving.controller_metrics import SplitMetrics
from carryover.serving.experiment_record import ExperimentRecorder
from carryover.serving.traffic import TrafficConfig


def deployment(
    config: TrafficConfig, *, arms: Sequence[str], described: Mapping[str, Any] | None = None
) -> Any:
    """Bind the controller as a Ray Serve deployment, for the ingress's init args.

    Args:
        config: the resolved section.
        arms: names of all arms, the control first.
        described: by arm, what it is, JSON-able.
    """
    deployed = serve.deployment(
        DeployedController,
        name=TrafficController.__name__,
        num_replicas=1,
        max_ongoing_requests=1000,
        # How soon a controller that died is replaced.
        health_check_period_s=2,
        health_check_timeout_s=30,
        ray_actor_options={"num_cpus": 0.1},
    )
    return deployed.bind(config.model_dump(mode="json"), list(arms), dict(described or {}))


class DeployedController(TrafficController):
    """What `deployment` binds.

    Args:
        config: the resolved `traffic:` section, as a mapping.
        arms: names of all arms, the control first.
        described: by arm, what it is.

    Raises:
        ConfigError: the section does not fit the arms.
        ServingError: another controller uses the state folder, or it is damaged.
    """

    def __init__(self, config: dict[str, Any], arms: list[str], described: dict[str, Any]) -> None:
        recorder = None
        if config["record"]:
            recorder = ExperimentRecorder(config["tracking_uri"], described=described)
        super().__init__(
            config, arms=arms, described=described, recorder=recorder, publish=SplitMetrics()
        )

    def __del__(self) -> None:
        # Called by Ray Serve when the application stops, and by Python if the start failed.
        if hasattr(self, "_split"):
            self.close()
