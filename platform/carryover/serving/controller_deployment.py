"""The controller as a Ray Serve deployment: with MLflow, metrics, and an orderly end."""

from __future__ import annotations

from typing import Any

from carryover.serving.controller import TrafficController
from carryover.serving.controller_metrics import SplitMetrics
from carryover.serving.experiment_record import ExperimentRecorder


class DeployedController(TrafficController):
    """What `controller.deployment` binds.

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
