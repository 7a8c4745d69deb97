"""What admins may ask of the controller: the arguments of each action, and the change it makes."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, Self

from pydantic import Field, model_validator

from carryover.config import Config
from carryover.errors import ConfigError
from carryover.serving.changes import (
    KEEP,
    Change,
    State,
    begin_experiment,
    begin_ramp,
    pause,
    resume,
    revoke,
    roll_back,
    set_split,
    stop,
)
from carryover.serving.traffic import Experiment, Shadow

MAX_TEXT = 1000


class Changing(Config):
    """Arguments of an action that changes the split."""

    why: str = Field(default="", max_length=MAX_TEXT, description="For the audit log.")
    who: str = Field(
        default="", max_length=MAX_TEXT,
        description="What the person says to be, as user@host; the key is logged as well.",
    )  # fmt: skip

    def change(self, state: State, *, arms: Sequence[str], now: float, at: float) -> Change:
        """The change that is asked for.

        Args:
            state: the present one.
            arms: names of all arms, the control first.
            now: seconds since the epoch.
            at: when replicas change over.

        Raises:
            ConfigError: it cannot be made.
        """
        raise NotImplementedError


class Set(Changing):
    """Take other weights or another shadow, or begin another experiment."""

    weights: dict[str, float] | None = Field(
        default=None, description="Percent or fractions; an arm not named gets nothing."
    )
    shadow: Shadow | None = Field(default=None, description="Copies for another arm.")
    no_shadow: bool = Field(default=False, description="Copy nothing from now on.")
    experiment: Experiment | None = Field(
        default=None, description="Name of an experiment to begin, after the last was stopped."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.shadow is not None and self.no_shadow:
            raise ValueError("shadow and no_shadow contradict each other; give one")
        if self.experiment is not None and self.weights is None:
            raise ValueError("an experiment begins with weights; give them too")
        if self.weights is None and self.shadow is None and not self.no_shadow:
            raise ValueError("give weights, or a shadow, or no_shadow")
        return self

    def change(self, state: State, *, arms: Sequence[str], now: float, at: float) -> Change:
        """Set the split, or begin the experiment."""
        running = state.traffic.experiment
        if self.experiment is None or (self.experiment == running and not state.ended):
            shadow = None if self.no_shadow else self.shadow or KEEP
            return set_split(
                state, self.weights, shadow=shadow, arms=arms, effective_at=at
            )
        if not state.ended:
            raise ConfigError(
                f"experiment {running!r} is still running; end it with `platform traffic stop`, "
                f"then begin {self.experiment!r}"
            )
        if self.experiment == running:
            raise ConfigError(f"experiment {running!r} is over; give the next one another name")
        return begin_experiment(
            state, self.experiment, self.weights, arms=arms, now=now, effective_at=at,
            shadow=self.shadow,
        )  # fmt: skip


class Ramp(Changing):
    """Raise one arm's weight step by step, each after a successful evaluation."""

    steps: list[float] = Field(min_length=1, max_length=100, description="Percent, increasing.")
    arm: str | None = Field(default=None, description="null: the only arm beside the control.")
    hold_s: float = Field(default=0.0, ge=0, description="The shortest time at each step.")

    def change(self, state: State, *, arms: Sequence[str], now: float, at: float) -> Change:
        """Give the arm the first step's weight."""
        arm = self.arm or (arms[1] if len(arms) == 2 else None)
        if arm is None:
            others = ", ".join(arms[1:])
            raise ConfigError(
                f"say which arm to ramp: {others}" if others else "there is no arm to ramp: the "
                f"application has {arms[0]!r} alone"
            )
        return begin_ramp(
            state, self.steps, arm=arm, hold_s=self.hold_s, arms=arms, effective_at=at
        )


class Pause(Changing):
    """Send everything to the control arm for now."""

    def change(self, state: State, *, arms: Sequence[str], now: float, at: float) -> Change:
        """Put the split aside."""
        return pause(state, arms=arms, effective_at=at)


class Resume(Changing):
    """End a pause."""

    def change(self, state: State, *, arms: Sequence[str], now: float, at: float) -> Change:
        """Bring the split back."""
        return resume(state, effective_at=at)


class Rollback(Changing):
    """Send everything to the control arm at once."""

    def change(self, state: State, *, arms: Sequence[str], now: float, at: float) -> Change:
        """Roll back; there is no time to lose, so replicas do not wait for one another."""
        return roll_back(state, arms=arms, now=now)


class Stop(Changing):
    """End the experiment."""

    def change(self, state: State, *, arms: Sequence[str], now: float, at: float) -> Change:
        """End it."""
        return stop(state, arms=arms, effective_at=at)


class Revoke(Changing):
    """No longer accept an API key."""

    key: str = Field(min_length=1, max_length=128, description="Id of the key.")

    def change(self, state: State, *, arms: Sequence[str], now: float, at: float) -> Change:
        """Add it to the revoked ones."""
        return revoke(state, self.key, now=now)


class Show(Config):
    """The split and its results now."""


class Log(Config):
    """The end of the audit log."""

    last: int = Field(default=20, ge=1, le=10_000, description="Entries, newest last.")


class Report(Config):
    """Everything that a report shows."""


ACTIONS: dict[str, type[Config]] = {
    "show": Show, "set": Set, "ramp": Ramp, "pause": Pause, "resume": Resume,
    "rollback": Rollback, "stop": Stop, "revoke": Revoke, "log": Log, "report": Report,
}  # fmt: skip


def parse(action: str, arguments: dict[str, Any]) -> Config:
    """Check an action's arguments.

    Raises:
        ConfigError: no such action or argument, with the nearest name.
    """
    if action not in ACTIONS:
        close = difflib.get_close_matches(action, ACTIONS, n=1, cutoff=0.5)
        fix = f"did you mean {close[0]!r}?" if close else f"actions: {', '.join(ACTIONS)}"
        raise ConfigError(f"no action {action!r}; {fix}")
    return ACTIONS[action].parse(arguments, source=f"the request to {action}")
