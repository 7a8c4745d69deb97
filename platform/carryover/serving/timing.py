"""How long things take between the controller and the ingress replicas."""

from __future__ import annotations

from dataclasses import dataclass

# Between two calls of an ingress replica.
HEARTBEAT_S = 0.5


@dataclass(frozen=True)
class Timing:
    """Waits of the controller, in seconds.

    Attributes:
        replica_timeout_s: a replica silent for longer is gone.
        lead_s: from a change to the instant at which replicas change over: two heartbeats, so
            that all know of it by then.
        confirm_timeout_s: how long a change waits for confirmations.
        record_timeout_s: how long the end of an experiment waits for its record.
        lock_timeout_s: how long an earlier controller may take to give the state folder back,
            before this one stands by.
    """

    replica_timeout_s: float = 6 * HEARTBEAT_S
    lead_s: float = 2 * HEARTBEAT_S
    confirm_timeout_s: float = 5.0
    record_timeout_s: float = 30.0
    lock_timeout_s: float = 5.0
