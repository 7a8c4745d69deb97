"""What the configuration asks of the split, and when that changes what people have set since. Pure.

The configuration is taken over when it differs from what it last asked for. The same again, at a
restart or from every ingress replica, does not undo a roll-back or `platform traffic set`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from carryover.errors import ConfigError
from carryover.serving.changes import (
    Change,
    State,
    begin_experiment,
    describe,
    first_state,
    set_split,
)
from carryover.serving.traffic import TrafficConfig, initial_traffic

# What Serve's `user_config` may change in a running application.
LIVE = ("experiment", "salt", "weights", "shadow", "guard")
# What an experiment is about.
_BEGINNING = ("experiment", "salt", "control", "arms")


def wishes(config: TrafficConfig, arms: Sequence[str], described: Mapping[str, Any]) -> dict:
    """What a resolved section asks for, JSON-able."""
    asked = config.model_dump(mode="json", include=set(LIVE))
    return {**asked, "control": arms[0], "arms": {arm: described.get(arm) for arm in arms}}


def overlaid(
    config: TrafficConfig, section: Mapping[str, Any], arms: Sequence[str]
) -> TrafficConfig:
    """A resolved section with the changes that a `user_config` makes in it.

    Raises:
        ConfigError: a key or value is wrong, or cannot change while the application runs.
    """
    values = config.model_dump(mode="json")
    if "experiment" in section and config.salt == config.experiment:
        values["salt"] = None
    merged = TrafficConfig.parse({**values, **section}, source="user_config.traffic")
    fixed = [
        key
        for key in TrafficConfig.model_fields
        if key not in LIVE and getattr(merged, key) != getattr(config, key)
    ]
    if fixed:
        raise ConfigError(
            f"user_config.traffic cannot change {', '.join(fixed)} while the application runs; it "
            f"may hold {', '.join(LIVE)}; change the application's arguments for others"
        )
    return merged.resolve(arms=arms, application=config.experiment)


def begin(config: TrafficConfig, *, now: float) -> Change:
    """The first start of an application."""
    state = first_state(initial_traffic(config), now=now)
    return Change(state, "begin", {}, describe(state))


def adopt(
    state: State, config: TrafficConfig, *, old: Mapping[str, Any], new: Mapping[str, Any],
    arms: Sequence[str], now: float, effective_at: float,
) -> Change | None:  # fmt: skip
    """The change that brings the state to a changed configuration; None if it has not changed.

    Another experiment or salt, or arms that are no longer what they were, begin an experiment:
    what was measured before says nothing about it.

    Args:
        state: in force.
        config: the resolved section.
        old: `wishes` of the configuration before.
        new: `wishes` of this one.
        arms: names of all arms, the control first.
        now: seconds since the epoch.
        effective_at: when replicas change over.

    Raises:
        ConfigError: the experiment has ended, and the new configuration does not name another.
    """
    if any(old.get(key) != new[key] for key in _BEGINNING):
        return begin_experiment(
            state, config.experiment, config.weights, arms=arms, now=now,
            effective_at=effective_at, salt=config.salt, shadow=config.shadow,
        )  # fmt: skip
    if old.get("weights") != new["weights"] or old.get("shadow") != new["shadow"]:
        return set_split(
            state, config.weights, shadow=config.shadow, arms=arms, effective_at=effective_at
        )
    if old.get("guard") != new["guard"]:
        return Change(state, "guard", {"guard": old.get("guard")}, {"guard": new["guard"]})
    return None


def what_changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """A sentence for the audit log."""
    changed = [key for key in new if old.get(key) != new[key]]
    arms_old, arms_new = old.get("arms") or {}, new["arms"]
    if "arms" in changed:
        names = sorted(
            (arms_old.keys() ^ arms_new.keys())
            | {arm for arm, what in arms_old.items() if arms_new.get(arm) != what}
        )
        changed[changed.index("arms")] = f"arms ({', '.join(names)})"
    return f"the configuration changed: {', '.join(changed)}"
