"""The one owner of the split: takes changes, gathers what replicas saw, and evaluates the guard.

A plain class with a clock that a test can replace; `deployment` makes the Ray Serve deployment.
Ingress replicas talk to it by `exchange`, people by `admin`, through any ingress replica. It never
stands in the way of a request: replicas keep the split they have when it is away.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from carryover.serving.traffic import Traffic, TrafficConfig

HEARTBEAT_S = 0.5


class TrafficController:
    """Decides the split of one application.

    Args:
        config: the resolved `traffic:` section, as a mapping (it crosses processes).
        arms: names of all arms, the control first.
        clock: seconds since the epoch.

    Raises:
        ConfigError: the section does not fit the arms.
        ServingError: another controller uses the state folder.
    """

    def __init__(
        self,
        config: dict[str, Any],
        *,
        arms: Sequence[str],
        clock: Callable[[], float] = time.time,
    ) -> None:
        raise NotImplementedError

    async def exchange(
        self,
        replica: str,
        version: int,
        observations: list[tuple],
        dropped: int,
        sequence: int = 0,
        events: list[tuple[float, str, str, str]] = (),
    ) -> dict[str, Any] | None:
        """Take what an ingress replica saw since the last call, and give it a newer split.

        Args:
            replica: its unique id.
            version: of the split that it has taken over (that it will follow from
                `effective_at` on): the acknowledgement.
            observations: `Observation.to_tuple()` of finished requests.
            dropped: observations that did not fit its buffer, ever.
            sequence: number of this batch, growing by one from 1; a batch that is delivered again
                after a lost answer keeps its number and is counted once.
            events: (seconds since the epoch, arm, "down" or "up", text): arms that stopped or
                began to answer, for the audit log.

        Returns:
            `Traffic.model_dump(mode="json")` if it is newer than `version`, else None.
        """
        raise NotImplementedError

    async def admin(self, action: str, arguments: dict[str, Any], who: str) -> dict[str, Any]:
        """Answer an admin's request; raises nothing.

        Args:
            action: show, set, ramp, pause, resume, rollback, stop, revoke, log or report.
            arguments: of the action.
            who: for the audit log.

        Returns:
            The action's answer, or `{"error": {"message": ..., "type": ..., "code": status}}`,
            where `code` is the HTTP status.
        """
        raise NotImplementedError

    async def reconfigure_traffic(self, config: dict[str, Any]) -> dict[str, Any]:
        """Take a changed `traffic:` section that came with Serve's `user_config`.

        Only what can change live is taken: experiment, weights, shadow and guard. The same section
        again changes nothing, so that every ingress replica may pass it on.

        Returns:
            As `admin("show")`, or an error.
        """
        raise NotImplementedError

    async def check_health(self) -> None:
        """Called by Ray Serve; keeps the evaluation going."""
        raise NotImplementedError


def deployment(config: TrafficConfig, *, arms: Sequence[str]) -> Any:
    """Bind the controller as a Ray Serve deployment, for the ingress's init args."""
    from ray import serve

    deployed = serve.deployment(
        TrafficController,
        num_replicas=1,
        max_ongoing_requests=1000,
        ray_actor_options={"num_cpus": 0.1},
    )
    return deployed.bind(config.model_dump(mode="json"), arms=list(arms))


__all__ = ["HEARTBEAT_S", "Traffic", "TrafficController", "deployment"]
