"""What must hold of assignment whatever the weights, keys and salts."""

from math import nan

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from carryover.serving.assignment import NoArm, assign

ARMS = ("autoregressive", "baseline", "carryover", "control")
some_weights = st.dictionaries(
    st.sampled_from(ARMS), st.integers(0, 100).map(float), min_size=1
).filter(lambda weights: any(weights.values()))
keys = st.text(max_size=40)
salts = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=12)
uniforms = st.floats(0, 1, exclude_max=True)
KEYS = [f"session-{number}" for number in range(4000)]


def by_key(weights, key, *, salt="s", excluded=()):
    return assign(weights, key=key, salt=salt, uniform=0.5, excluded=excluded).arm


@given(some_weights)
def test_shares_over_uniform_draws_are_the_weights_exactly(weights):
    """The draw is a step function of `uniform`; its steps are as long as the weights."""
    total, edge = sum(weights.values()), 0.0
    for arm, weight in weights.items():
        if weight:
            for inside in (0.001, 0.5, 0.999):
                uniform = (edge + inside * weight) / total
                found = assign(weights, key=None, salt="s", uniform=uniform)
                assert (found.arm, found.reason) == (arm, "weighted")
        edge += weight


@given(some_weights, st.none() | keys, salts, uniforms, st.sets(st.sampled_from(ARMS)))
def test_an_arm_without_weight_or_excluded_is_never_chosen(weights, key, salt, uniform, excluded):
    allowed = {arm for arm, weight in weights.items() if weight > 0} - excluded
    if not allowed:
        with pytest.raises(NoArm, match="no arm can take the request"):
            assign(weights, key=key, salt=salt, uniform=uniform, excluded=excluded)
        return
    found = assign(weights, key=key, salt=salt, uniform=uniform, excluded=excluded)
    assert found.arm in allowed
    assert found.reason == ("weighted" if key is None else "sticky")


@given(some_weights, keys, salts, uniforms, uniforms, st.floats(0.01, 1000), st.randoms())
def test_a_key_stays_whatever_the_draw_the_order_and_the_scale(
    weights, key, salt, first, second, scale, random
):
    shuffled = list(weights.items())
    random.shuffle(shuffled)
    scaled = {arm: weight * scale for arm, weight in shuffled}
    found = assign(weights, key=key, salt=salt, uniform=first)
    assert found == assign(scaled, key=key, salt=salt, uniform=second)


@given(some_weights, keys, salts, st.sampled_from(ARMS), st.floats(0, 200))
def test_an_arm_that_grows_only_gains_keys_and_one_that_shrinks_only_loses(
    weights, key, salt, arm, weight
):
    changed = {**weights, arm: weight}
    assume(any(changed.values()))
    before, after = by_key(weights, key, salt=salt), by_key(changed, key, salt=salt)
    if weight >= weights.get(arm, 0):
        assert after in (before, arm)
    else:
        assert after == before or before == arm


@given(some_weights, keys, salts, st.sampled_from(ARMS))
def test_excluding_an_arm_moves_its_own_keys_alone(weights, key, salt, arm):
    rest = {name: weight for name, weight in weights.items() if name != arm}
    assume(any(rest.values()))
    before = by_key(weights, key, salt=salt)
    after = by_key(weights, key, salt=salt, excluded=[arm])
    assert after == before if before != arm else after != arm
    assert after == by_key(rest, key, salt=salt), "as if the arm did not exist"


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_shares_over_keys_are_the_weights(share):
    weights = {"baseline": 1 - share, "carryover": share}
    count = sum(by_key(weights, key) == "carryover" for key in KEYS)
    spread = (len(KEYS) * share * (1 - share)) ** 0.5
    assert abs(count - len(KEYS) * share) < 4 * spread


def test_only_the_share_that_must_move_moves():
    before, after = {"baseline": 90.0, "carryover": 10.0}, {"baseline": 75.0, "carryover": 25.0}
    pairs = [(by_key(before, key), by_key(after, key)) for key in KEYS]
    assert not [pair for pair in pairs if pair == ("carryover", "baseline")]
    moved = sum(first != second for first, second in pairs) / len(KEYS)
    assert moved == pytest.approx(0.15, abs=0.025)


def test_experiments_of_different_salts_split_the_same_keys_independently():
    weights = {"baseline": 1.0, "carryover": 1.0}
    both = [
        (by_key(weights, key, salt="first"), by_key(weights, key, salt="second")) for key in KEYS
    ]
    for pair in {(a, b) for a in weights for b in weights}:
        assert both.count(pair) / len(KEYS) == pytest.approx(0.25, abs=0.03)


def test_similar_keys_are_no_more_alike_than_others():
    weights = {"baseline": 1.0, "carryover": 1.0}
    same = sum(
        by_key(weights, f"user-{number}") == by_key(weights, f"user-{number + 1}")
        for number in range(4000)
    )
    assert same / 4000 == pytest.approx(0.5, abs=0.035)


@pytest.mark.parametrize("key", ["", "\0", "\udcff", "ü" * 5000])
def test_any_key_will_do(key):
    assert by_key({"baseline": 1.0, "carryover": 1.0}, key) in ("baseline", "carryover")


def test_the_end_of_the_unit_interval_belongs_to_the_last_arm():
    weights = {"a": 0.1, "b": 0.2, "c": 0.7, "d": 0.0}
    assert assign(weights, key=None, salt="s", uniform=1 - 2**-53).arm == "c"


@pytest.mark.parametrize("weight", [nan, -1.0, 0.0])
def test_what_is_no_weight_is_none(weight):
    weights = {"baseline": 1.0, "carryover": weight}
    assert {by_key(weights, key) for key in KEYS[:50]} == {"baseline"}


def test_the_error_says_why_there_is_no_arm():
    with pytest.raises(NoArm, match=r"unavailable: a; at weight 0: b"):
        assign({"a": 1.0, "b": 0.0}, key=None, salt="s", uniform=0.1, excluded={"a"})
    with pytest.raises(NoArm, match="there are no arms"):
        assign({}, key=None, salt="s", uniform=0.1)


def test_a_vanishing_weight_is_still_legal():
    assert by_key({"baseline": 1.0, "carryover": 5e-324}, "k") == "baseline"
