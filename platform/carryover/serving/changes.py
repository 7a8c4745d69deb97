"""Changes of the split: each takes the state and returns the next one. Pure.

`Change.before` and `.after` are what the audit log shows of the two states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any

from pydantic import Field

from carryover.config import Config
from carryover.errors import ConfigError
from carryover.serving.audit import AuditEntry
from carryover.serving.traffic import Shadow, Traffic, check_arm, check_weights


class Keep(Enum):
    """Stands for what is in force."""

    KEEP = "keep"


KEEP = Keep.KEEP


class Ramp(Config):
    """Weights of one arm, one after the other, each held until an evaluation succeeds.

    Attributes:
        arm: whose weight grows; the control arm has the rest.
        steps: fractions, increasing.
        position: index of the step in force.
        since: when it comes into force, seconds since the epoch.
        hold_s: the shortest time at a step.
    """

    arm: str
    steps: tuple[float, ...] = Field(min_length=1)
    position: int = Field(default=0, ge=0)
    since: float
    hold_s: float = Field(ge=0)

    @property
    def is_last(self) -> bool:
        """Whether no step is left."""
        return self.position == len(self.steps) - 1


class Kept(Config):
    """What a pause put aside."""

    weights: dict[str, float]
    shadow: Shadow | None


class State(Config):
    """All that the controller decides.

    Attributes:
        traffic: what replicas follow.
        ramp: in progress; None without one.
        kept: while paused, what `resume` brings back.
        ended: whether the experiment was stopped.
        began: when the experiment began, seconds since the epoch.
        since: when the weights in force began.
        evidence_since: when an arm last came into traffic; what the guard saw before is over.
    """

    traffic: Traffic
    ramp: Ramp | None = None
    kept: Kept | None = None
    ended: bool = False
    began: float
    since: float
    evidence_since: float


@dataclass(frozen=True)
class Change:
    """A state and how it came about.

    Attributes:
        state: the next state.
        action: one word for the audit log.
        before: what is shown of the earlier state.
        after: what is shown of the next one.
    """

    state: State
    action: str
    before: dict[str, Any]
    after: dict[str, Any]

    def entry(self, *, time_s: float, who: str, why: str) -> AuditEntry:
        """The line of the audit log."""
        traffic = self.state.traffic
        return AuditEntry(
            time_s=time_s, who=who, action=self.action, experiment=traffic.experiment,
            version=traffic.version, before=self.before, after=self.after, why=why,
        )  # fmt: skip


def describe(state: State) -> dict[str, Any]:
    """What the audit log shows of a state, JSON-able."""
    traffic, ramp = state.traffic, state.ramp
    shown: dict[str, Any] = {"experiment": traffic.experiment, "weights": dict(traffic.weights)}
    if traffic.shadow is not None:
        shown["shadow"] = traffic.shadow.model_dump()
    if traffic.paused:
        shown["paused"] = True
    if ramp is not None:
        shown["ramp"] = {"arm": ramp.arm, "steps": list(ramp.steps), "position": ramp.position}
    if state.ended:
        shown["ended"] = True
    if traffic.revoked:
        shown["revoked"] = list(traffic.revoked)
    return shown


def set_split(
    state: State, weights: Mapping[str, float] | None, *, shadow: Shadow | Keep | None,
    arms: Sequence[str], effective_at: float,
) -> Change:  # fmt: skip
    """Take these weights, which ends a ramp and a pause, or another shadow, or both.

    Args:
        state: the present one.
        weights: percent or fractions; None leaves them.
        shadow: copies for another arm; None copies nothing, `KEEP` leaves it.
        arms: names of all arms, the control first.
        effective_at: when replicas change over, seconds since the epoch.

    Raises:
        ConfigError: the weights are wrong, there is no such arm, or the experiment has ended.
    """
    _check_running(state)
    if shadow is KEEP:
        shadow = state.traffic.shadow if state.kept is None else state.kept.shadow
    elif shadow is not None:
        check_arm(shadow.arm, arms, what="shadow")
    if weights is not None:
        return _change(
            state, "set", effective_at=effective_at, shadow=shadow, paused=False,
            weights=check_weights(weights, arms), ramp=None, kept=None,
        )  # fmt: skip
    if state.traffic.paused:
        raise ConfigError("the split is paused; resume it before changing the shadow")
    return _change(state, "shadow", effective_at=effective_at, shadow=shadow)


def begin_ramp(
    state: State, steps: Sequence[float], *, arm: str, hold_s: float, arms: Sequence[str],
    effective_at: float,
) -> Change:  # fmt: skip
    """Give an arm the first step's weight; `next_step` goes on.

    Args:
        state: the present one.
        steps: percent, increasing.
        arm: whose weight grows. Other arms but the control keep theirs.
        hold_s: the shortest time at each step.
        arms: names of all arms, the control first.
        effective_at: when replicas change over, seconds since the epoch.

    Raises:
        ConfigError: the steps do not increase or exceed what is free, or `arm` is the control.
    """
    _check_running(state)
    if state.traffic.paused:
        raise ConfigError("the split is paused; resume it first, then ramp")
    check_arm(arm, arms)
    if arm == arms[0]:
        raise ConfigError(
            f"{arm!r} is the control arm, which has the rest; ramp another: {', '.join(arms[1:])}"
        )
    _check_steps(steps)
    others = {
        name: weight
        for name, weight in state.traffic.weights.items()
        if name not in (arm, arms[0]) and weight > 0
    }
    free = 100 * (1 - sum(others.values()))
    if steps[-1] > free + 1e-9:
        raise ConfigError(
            f"ramp step {steps[-1]:g}% exceeds the {free:g}% that {', '.join(others)} leave; "
            "lower it, or set their weights to 0 first"
        )
    ramp = Ramp(
        arm=arm, steps=tuple(step / 100 for step in steps), since=effective_at, hold_s=hold_s
    )
    return _change(
        state, "ramp", effective_at=effective_at, ramp=ramp,
        weights=_ramp_weights(state, ramp, arms),
    )  # fmt: skip


def next_step(state: State, *, arms: Sequence[str], effective_at: float) -> Change:
    """Go to the ramp's next step, or end the ramp after its last one."""
    if state.ramp is None:
        raise ValueError("no ramp is in progress")
    if state.ramp.is_last:
        return _change(state, "ramp done", effective_at=effective_at, ramp=None)
    ramp = state.ramp.model_copy(
        update={"position": state.ramp.position + 1, "since": effective_at}
    )
    return _change(
        state, "ramp step", effective_at=effective_at, ramp=ramp,
        weights=_ramp_weights(state, ramp, arms),
    )  # fmt: skip


def pause(state: State, *, arms: Sequence[str], effective_at: float) -> Change:
    """Send everything to the control arm; weights, shadow and ramp are kept for `resume`.

    Raises:
        ConfigError: already paused, or ended.
    """
    _check_running(state)
    if state.traffic.paused:
        raise ConfigError("the split is already paused; `platform traffic resume` ends the pause")
    kept = Kept(weights=state.traffic.weights, shadow=state.traffic.shadow)
    return _change(
        state, "pause", effective_at=effective_at, weights=_all_to(arms[0], arms),
        shadow=None, paused=True, kept=kept,
    )  # fmt: skip


def resume(state: State, *, effective_at: float) -> Change:
    """Bring back what `pause` put aside; a ramp's step starts anew.

    Raises:
        ConfigError: not paused, or ended.
    """
    _check_running(state)
    if state.kept is None:
        raise ConfigError("the split is not paused, so there is nothing to resume")
    ramp = None if state.ramp is None else state.ramp.model_copy(update={"since": effective_at})
    return _change(
        state, "resume", effective_at=effective_at, weights=state.kept.weights,
        shadow=state.kept.shadow, paused=False, kept=None, ramp=ramp,
    )  # fmt: skip


def roll_back(state: State, *, arms: Sequence[str], now: float) -> Change:
    """Send everything to the control arm at once; ends ramp, pause and shadow."""
    return _change(
        state, "rollback", effective_at=now, weights=_all_to(arms[0], arms), shadow=None,
        paused=False, ramp=None, kept=None,
    )  # fmt: skip


def stop(state: State, *, arms: Sequence[str], effective_at: float) -> Change:
    """End the experiment: everything to the control arm, and no further change.

    Raises:
        ConfigError: it has ended already.
    """
    _check_running(state)
    return _change(
        state, "stop", effective_at=effective_at, weights=_all_to(arms[0], arms),
        shadow=None, paused=False, ramp=None, kept=None, ended=True,
    )  # fmt: skip


def begin_experiment(
    state: State, experiment: str, weights: Mapping[str, float], *, arms: Sequence[str],
    now: float, effective_at: float, salt: str | None = None, shadow: Shadow | None = None,
) -> Change:  # fmt: skip
    """Begin another experiment, whose sticky keys are assigned anew.

    Raises:
        ConfigError: the weights or the shadow are wrong.
    """
    if shadow is not None:
        check_arm(shadow.arm, arms, what="shadow")
    return _change(
        state, "begin", effective_at=effective_at, experiment=experiment,
        salt=salt or experiment, weights=check_weights(weights, arms), shadow=shadow,
        paused=False, ramp=None, kept=None, ended=False, began=now,
    )  # fmt: skip


def revoke(state: State, key_id: str, *, now: float) -> Change:
    """No longer accept an API key.

    Raises:
        ConfigError: it is revoked already.
    """
    if key_id in state.traffic.revoked:
        raise ConfigError(f"key {key_id!r} is revoked already")
    # Weights that are about to come into force still do so at their instant.
    effective_at = max(now, state.traffic.effective_at)
    return _change(
        state, "revoke", effective_at=effective_at,
        revoked=(*state.traffic.revoked, key_id),
    )  # fmt: skip


def renumber(state: State, version: int) -> Change:
    """The same split under a later number."""
    traffic = state.traffic.model_copy(update={"version": version})
    after = state.model_copy(update={"traffic": traffic})
    return Change(after, "renumber", describe(state), describe(after))


def first_state(traffic: Traffic, *, now: float) -> State:
    """The state of an application that starts for the first time."""
    return State(traffic=traffic, began=now, since=now, evidence_since=now)


_TRAFFIC_FIELDS = frozenset(Traffic.model_fields)


def _change(
    state: State, action: str, *, effective_at: float, **updates: Any
) -> Change:
    """The next version with some fields replaced, in whichever of the two records has them."""
    ours = {name: value for name, value in updates.items() if name not in _TRAFFIC_FIELDS}
    theirs = {name: value for name, value in updates.items() if name in _TRAFFIC_FIELDS}
    traffic = state.traffic.model_copy(
        update={**theirs, "version": state.traffic.version + 1, "effective_at": effective_at}
    )
    moved = traffic.weights != state.traffic.weights or "began" in ours
    entered = any(
        weight > 0 and not state.traffic.weights.get(arm) for arm, weight in traffic.weights.items()
    )
    times = {"since": effective_at} if moved else {}
    if entered:
        times["evidence_since"] = effective_at
    after = state.model_copy(update={**times, **ours, "traffic": traffic})
    return Change(after, action, describe(state), describe(after))


def _check_running(state: State) -> None:
    if state.ended:
        raise ConfigError(
            f"experiment {state.traffic.experiment!r} has ended; "
            "begin another with `platform traffic set --experiment NAME ARM=WEIGHT ...`"
        )


def _check_steps(steps: Sequence[float]) -> None:
    if not steps:
        raise ConfigError("a ramp needs at least one step, for example 1,5,25,50")
    outside = [step for step in steps if not 0 < step <= 100]
    if outside:
        raise ConfigError(f"ramp steps are percent, above 0 and at most 100, got {outside[0]:g}")
    for earlier, later in pairwise(steps):
        if later <= earlier:
            raise ConfigError(
                f"ramp steps must increase, got {later:g} after {earlier:g}; for example "
                + ",".join(f"{step:g}" for step in sorted(set(steps)))
            )


def _ramp_weights(state: State, ramp: Ramp, arms: Sequence[str]) -> dict[str, float]:
    """The step's weight for the ramped arm, theirs for the others, the rest for the control."""
    weights = {**state.traffic.weights, ramp.arm: ramp.steps[ramp.position]}
    weights[arms[0]] = max(0.0, 1 - sum(weights[name] for name in arms[1:]))
    return weights


def _all_to(arm: str, arms: Sequence[str]) -> dict[str, float]:
    return {name: float(name == arm) for name in arms}
