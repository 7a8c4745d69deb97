"""What an ingress replica is told of its application."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from carryover.serving.admission import IngressConfig
from carryover.serving.keys import ApiKey
from carryover.serving.traffic import TrafficConfig


@dataclass(frozen=True)
class FrontSettings:
    """All that a replica of the front needs besides its arms.

    Attributes:
        model: the model name that clients ask for.
        control: name of the control arm.
        traffic: the resolved `traffic:` section.
        ingress: the `ingress:` section.
        keys: of clients; none lets everybody in.
        admin_keys: of those who may change the split.
        seeds: whether the engines survive a per-request seed.
        replicas: replicas of each arm.
        described: by arm, what `/v1/models` tells about it.
    """

    model: str
    control: str
    traffic: TrafficConfig
    ingress: IngressConfig = field(default_factory=IngressConfig)
    keys: Sequence[ApiKey] = ()
    admin_keys: Sequence[ApiKey] = ()
    seeds: bool = True
    replicas: int = 1
    described: dict[str, dict[str, Any]] = field(default_factory=dict)
