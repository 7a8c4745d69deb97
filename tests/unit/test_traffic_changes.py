"""Changes of the split, each as a pure step from one state to the next."""

import pytest

from carryover.errors import ConfigError
from carryover.serving import changes
from carryover.serving.changes import KEEP, first_state
from carryover.serving.traffic import Shadow, Traffic

ARMS = ("baseline", "carryover", "control")
NOW = 1000.0


def state(weights=(0.9, 0.1, 0.0), **settings):
    traffic = Traffic(
        version=1, experiment="may", salt="may", weights=dict(zip(ARMS, weights, strict=True)),
        **settings,
    )  # fmt: skip
    return first_state(traffic, now=0.0)


def set_split(before, weights, shadow=KEEP):
    return changes.set_split(
        before, weights, shadow=shadow, arms=ARMS, effective_at=NOW + 1
    )


def ramp(before, steps, arm="carryover", hold_s=0.0):
    return changes.begin_ramp(
        before, steps, arm=arm, hold_s=hold_s, arms=ARMS, effective_at=NOW + 1
    )


def pause(before):
    return changes.pause(before, arms=ARMS, effective_at=NOW + 1)


def weights(found):
    return tuple(round(weight, 12) for weight in found.traffic.weights.values())


def test_set_takes_weights_at_one_instant_and_keeps_the_rest():
    before = state(shadow=Shadow(arm="control", share=0.5), revoked=("key-1",))
    change = set_split(before, {"baseline": 50, "carryover": 50})
    traffic = change.state.traffic
    assert (traffic.version, traffic.effective_at) == (2, NOW + 1)
    assert weights(change.state) == (0.5, 0.5, 0)
    assert traffic.shadow == before.traffic.shadow
    assert traffic.revoked == ("key-1",)
    assert change.action == "set"
    assert change.before["weights"]["carryover"] == 0.1
    assert change.after["weights"]["carryover"] == 0.5
    assert before.traffic.version == 1


def test_shadow_comes_and_goes_without_touching_weights():
    shadow = Shadow(arm="control", share=0.1)
    change = set_split(state(), None, shadow)
    assert change.state.traffic.shadow == shadow
    assert weights(change.state) == (0.9, 0.1, 0)
    assert change.state.since == 0.0
    assert set_split(change.state, None, None).state.traffic.shadow is None
    with pytest.raises(ConfigError, match=r"shadow: no arm 'contrl'; did you mean 'control'"):
        set_split(state(), None, Shadow(arm="contrl", share=0.1))


def test_a_ramp_goes_through_its_steps_and_ends():
    found, seen = ramp(state((1.0, 0.0, 0.0)), [1, 5, 25, 50]).state, []
    while found.ramp is not None:
        seen.append(weights(found))
        change = changes.next_step(found, arms=ARMS, effective_at=NOW)
        assert change.action == ("ramp done" if found.ramp.is_last else "ramp step")
        found = change.state
    assert seen == [(0.99, 0.01, 0), (0.95, 0.05, 0), (0.75, 0.25, 0), (0.5, 0.5, 0)]
    assert weights(found) == seen[-1]
    with pytest.raises(ValueError, match="no ramp"):
        changes.next_step(found, arms=ARMS, effective_at=NOW)


def test_a_ramp_leaves_other_arms_their_weight():
    found = ramp(state((0.7, 0.0, 0.3)), [10, 70]).state
    assert weights(found) == (0.6, 0.1, 0.3)
    assert weights(changes.next_step(found, arms=ARMS, effective_at=NOW).state) == (
        0.0, 0.7, 0.3,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"71% exceeds the 70% that control leave"):
        ramp(state((0.7, 0.0, 0.3)), [10, 71])


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([], "at least one step"),
        ([5, 1], "must increase, got 1 after 5; for example 1,5"),
        ([5, 5, 10], "must increase, got 5 after 5; for example 5,10"),
        ([0, 5], "above 0 and at most 100, got 0"),
        ([50, 101], "at most 100, got 101"),
        ([float("nan")], "got nan"),
    ],
)
def test_steps_that_do_not_increase_are_refused(steps, said):
    with pytest.raises(ConfigError) as error:
        ramp(state(), steps)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("arm", "said"),
    [("baseline", "is the control arm"), ("carry", "did you mean 'carryover'?")],
)
def test_only_a_known_arm_beside_the_control_can_be_ramped(arm, said):
    with pytest.raises(ConfigError) as error:
        ramp(state(), [1], arm=arm)
    assert said in str(error.value)


def test_set_ends_a_ramp():
    assert set_split(ramp(state(), [20, 30]).state, {"baseline": 100}).state.ramp is None


def test_pause_gives_all_to_the_control_and_resume_brings_everything_back():
    before = ramp(state(shadow=Shadow(arm="control", share=0.5)), [20, 30]).state
    paused = pause(before).state
    assert weights(paused) == (1, 0, 0)
    assert paused.traffic.paused and paused.traffic.shadow is None
    with pytest.raises(ConfigError, match="already paused"):
        pause(paused)
    with pytest.raises(ConfigError, match="resume it first"):
        ramp(paused, [1])
    with pytest.raises(ConfigError, match="resume it before"):
        set_split(paused, None, None)
    resumed = changes.resume(paused, effective_at=NOW + 51).state
    assert weights(resumed) == weights(before)
    assert resumed.traffic.shadow == before.traffic.shadow
    assert (resumed.ramp.steps, resumed.ramp.position) == (before.ramp.steps, 0)
    # what was seen before the pause does not count for the step
    assert resumed.ramp.since == NOW + 51
    assert not resumed.traffic.paused and resumed.kept is None
    with pytest.raises(ConfigError, match="not paused"):
        changes.resume(resumed, effective_at=NOW)


def test_set_during_a_pause_ends_it_and_keeps_the_shadow_that_was_put_aside():
    paused = pause(state(shadow=Shadow(arm="control", share=0.5))).state
    found = set_split(paused, {"baseline": 50, "carryover": 50}).state
    assert not found.traffic.paused and found.kept is None
    assert found.traffic.shadow == Shadow(arm="control", share=0.5)


@pytest.mark.parametrize("prepare", [lambda s: s, lambda s: ramp(s, [20]).state,
                                     lambda s: pause(s).state])  # fmt: skip
def test_rolling_back_works_at_once_whatever_goes_on(prepare):
    before = prepare(state(shadow=Shadow(arm="control", share=1.0)))
    change = changes.roll_back(before, arms=ARMS, now=NOW)
    assert weights(change.state) == (1, 0, 0)
    assert change.state.traffic.effective_at == NOW
    assert (change.state.ramp, change.state.kept, change.state.traffic.shadow) == (None, None, None)


def test_an_ended_experiment_takes_nothing_but_another_experiment():
    ended = changes.stop(state(), arms=ARMS, effective_at=NOW).state
    assert ended.ended and weights(ended) == (1, 0, 0)
    for attempt in (
        lambda: set_split(ended, {"baseline": 100}),
        lambda: ramp(ended, [1]),
        lambda: pause(ended),
        lambda: changes.stop(ended, arms=ARMS, effective_at=NOW),
    ):
        with pytest.raises(ConfigError, match="'may' has ended"):
            attempt()
    begun = changes.begin_experiment(
        ended, "june", {"baseline": 50, "carryover": 50}, arms=ARMS, now=NOW, effective_at=NOW + 1
    ).state
    assert not begun.ended and begun.began == NOW
    assert (begun.traffic.experiment, begun.traffic.salt) == ("june", "june")
    assert begun.traffic.version == ended.traffic.version + 1


def test_evidence_begins_anew_only_when_an_arm_comes_into_traffic():
    before = state((1.0, 0.0, 0.0))
    entered = set_split(before, {"baseline": 90, "carryover": 10}).state
    assert (entered.since, entered.evidence_since) == (NOW + 1, NOW + 1)
    later = changes.set_split(
        entered, {"baseline": 50, "carryover": 50}, shadow=KEEP, arms=ARMS,
        effective_at=NOW + 101,
    ).state  # fmt: skip
    assert (later.since, later.evidence_since) == (NOW + 101, NOW + 1)


def test_keys_are_revoked_once_and_stay_so():
    change = changes.revoke(state(), "team-a", now=NOW)
    assert change.state.traffic.revoked == ("team-a",)
    assert change.after["revoked"] == ["team-a"]
    with pytest.raises(ConfigError, match="revoked already"):
        changes.revoke(change.state, "team-a", now=NOW)
    # weights that are to come into force later still come then
    coming = set_split(state(), {"baseline": 100}).state
    assert changes.revoke(coming, "b", now=NOW).state.traffic.effective_at == NOW + 1
