"""Which arm a request goes to, and which may stand in for it. Pure: no Ray, no HTTP."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from carryover.serving.assignment import assign
from carryover.serving.openai_errors import ApiError
from carryover.serving.traffic import Traffic

ARM_HEADER = "x-carryover-arm"
EXPERIMENT_HEADER = "x-carryover-experiment"
REASON_HEADER = "x-carryover-reason"
# Chosen by the client; nothing else may answer, or a test of one arm would measure another.
EXPLICIT = frozenset({"header", "model"})


@dataclass(frozen=True, slots=True)
class Route:
    """The arm that a request is assigned.

    Attributes:
        arm: its name.
        reason: "weighted", "sticky", "header" or "model".
        unit: hash of the sticky key; None without one.
    """

    arm: str
    reason: str
    unit: str | None = None

    @property
    def is_explicit(self) -> bool:
        """Whether the client chose the arm."""
        return self.reason in EXPLICIT


def choose(
    traffic: Traffic,
    *,
    arms: Collection[str],
    named: str | None,
    header: str | None,
    allow_override: bool,
    key: str | None,
    uniform: float,
) -> Route:
    """Assign an arm.

    Args:
        traffic: the split in force.
        arms: names of all arms.
        named: arm that the request names as its model; None if it asks for the model of all.
        header: value of the request's `x-carryover-arm`; None without one.
        allow_override: whether that header may choose.
        key: sticky key; None without one.
        uniform: a number in [0, 1).

    Raises:
        ApiError: 400 or 403: the header names no arm, or may not choose.
        NoArm: nothing has weight.
    """
    if named is not None:
        return Route(named, "model")
    if header is not None:
        if not allow_override:
            raise ApiError(
                403, f"the header {ARM_HEADER} may not choose the arm here; leave it out, or have "
                "the operator set traffic.allow_override", code="override_not_allowed",
            )  # fmt: skip
        if header not in arms:
            raise ApiError(
                400, f"{ARM_HEADER}: no such arm; arms: {', '.join(arms)}", code="arm_not_found"
            )
        return Route(header, "header")
    assigned = assign(traffic.weights, key=key, salt=traffic.salt, uniform=uniform)
    unit = None if key is None else unit_of(key, traffic.salt)
    return Route(assigned.arm, assigned.reason, unit)


def unit_of(key: str, salt: str) -> str:
    """Name of a sticky key in statistics, from which the key cannot be read."""
    data = key.encode("utf-8", "surrogatepass")
    return blake2b(data, key=salt.encode()[:64], digest_size=8).hexdigest()


def substitutes(
    route: Route, weights: Mapping[str, float], fallback: Sequence[str]
) -> tuple[str, ...]:
    """Arms that may answer instead, in order.

    First those of the configuration's `fallback`, whatever their weight, then those with weight.
    None for a request that chose its arm, nor with an empty `fallback`.
    """
    if route.is_explicit or not fallback:
        return ()
    weighted = (arm for arm, weight in weights.items() if weight > 0)
    return tuple(arm for arm in dict.fromkeys((*fallback, *weighted)) if arm != route.arm)
