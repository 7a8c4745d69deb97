"""Whatever people and the guard do to the split, in whatever order, its rules hold."""

import math
from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from carryover.errors import ConfigError
from carryover.serving import changes
from carryover.serving.changes import KEEP, State, first_state
from carryover.serving.traffic import Shadow, Traffic, check_weights

ARMS = ("baseline", "carryover", "control")


@st.composite
def weightings(draw):
    parts = draw(st.lists(st.integers(0, 1000), min_size=3, max_size=3).filter(any))
    whole = draw(st.sampled_from([1, 100]))
    return {arm: whole * part / sum(parts) for arm, part in zip(ARMS, parts, strict=True)}


steps = st.lists(st.floats(-10, 120), min_size=1, max_size=5)
actions = st.one_of(
    st.tuples(st.just("set"), weightings()),
    st.tuples(st.just("shadow"), st.sampled_from([None, Shadow(arm="control", share=0.5)])),
    st.tuples(st.just("ramp"), st.one_of(steps, steps.map(sorted)), st.sampled_from(ARMS)),
    *(st.tuples(st.just(name)) for name in ("step", "pause", "resume", "roll back", "stop")),
    st.tuples(st.just("begin"), st.sampled_from(["june", "july"]), weightings()),
    st.tuples(st.just("revoke"), st.sampled_from(["a", "b"])),
)


def apply(state, action, now):
    times = {"effective_at": now + 1}
    match action:
        case ("set", weights):
            return changes.set_split(state, weights, shadow=KEEP, arms=ARMS, **times)
        case ("shadow", shadow):
            return changes.set_split(state, None, shadow=shadow, arms=ARMS, **times)
        case ("ramp", percents, arm):
            return changes.begin_ramp(state, percents, arm=arm, hold_s=0, arms=ARMS, **times)
        case ("step",):
            return changes.next_step(state, arms=ARMS, **times) if state.ramp else None
        case ("pause",):
            return changes.pause(state, arms=ARMS, **times)
        case ("resume",):
            return changes.resume(state, **times)
        case ("roll back",):
            return changes.roll_back(state, arms=ARMS, now=now)
        case ("stop",):
            return changes.stop(state, arms=ARMS, **times)
        case ("begin", name, weights):
            return changes.begin_experiment(state, name, weights, arms=ARMS, now=now, **times)
        case ("revoke", key):
            return changes.revoke(state, key, now=now)


@given(first=weightings(), todo=st.lists(actions, max_size=25))
def test_every_sequence_of_changes_keeps_the_rules(first, todo):
    traffic = Traffic(version=1, experiment="may", salt="may", weights=check_weights(first, ARMS))
    state = first_state(traffic, now=0.0)
    for now, action in enumerate(todo, 1):
        try:
            change = apply(state, action, float(now))
        except ConfigError as error:
            assert str(error)
            continue
        if change is None:
            continue
        before, state = state, change.state
        split = state.traffic
        assert split.version == before.traffic.version + 1
        assert tuple(split.weights) == ARMS
        assert all(0 <= weight <= 1 for weight in split.weights.values())
        assert math.isclose(math.fsum(split.weights.values()), 1, abs_tol=1e-9)
        assert set(before.traffic.revoked) <= set(split.revoked)
        if state.ended or split.paused or action == ("roll back",):
            assert split.weights == {"baseline": 1.0, "carryover": 0.0, "control": 0.0}
            assert split.shadow is None
        assert split.paused == (state.kept is not None)
        if state.ramp is not None and not split.paused:
            assert split.weights[state.ramp.arm] == state.ramp.steps[state.ramp.position]
        assert not (state.ended and state.ramp)
        # a restart reads the same state back
        assert State.model_validate_json(state.model_dump_json()) == state


@given(weights=weightings(), steps=st.lists(st.floats(0.01, 100), min_size=1, unique=True))
def test_pause_and_resume_change_nothing(weights, steps):
    traffic = Traffic(version=1, experiment="may", salt="may", weights=check_weights(weights, ARMS))
    before = first_state(traffic, now=0.0)
    with suppress(ConfigError):
        before = apply(before, ("ramp", sorted(steps), "carryover"), 1.0).state
    after = apply(apply(before, ("pause",), 2.0).state, ("resume",), 3.0).state
    assert after.traffic.weights == before.traffic.weights
    assert (after.ramp is None) == (before.ramp is None)
    if after.ramp is not None:
        assert (after.ramp.steps, after.ramp.position) == (before.ramp.steps, before.ramp.position)
