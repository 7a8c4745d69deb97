"""The `traffic:` section: weights in percent or fractions, names checked, nothing left open."""

import math
from pathlib import Path

import pytest

from carryover.errors import ConfigError
from carryover.serving.traffic import TrafficConfig, check_weights, initial_traffic

ARMS = ("baseline", "carryover", "control")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"baseline": 90, "carryover": 10}, (0.9, 0.1, 0)),
        ({"baseline": 0.9, "carryover": 0.1}, (0.9, 0.1, 0)),
        ({"carryover": 1}, (0, 1, 0)),
        ({"carryover": 100}, (0, 1, 0)),
        # one percent and ninety-nine, since the sum says percent
        ({"baseline": 99, "carryover": 1}, (0.99, 0.01, 0)),
        ({"baseline": 33.33, "carryover": 33.33, "control": 33.33}, (1 / 3, 1 / 3, 1 / 3)),
        ({"baseline": 1 / 3, "carryover": 2 / 3}, (1 / 3, 2 / 3, 0)),
    ],
)
def test_the_sum_says_whether_weights_are_percent_or_fractions(given, expected):
    found = check_weights(given, ARMS)
    assert tuple(found) == ARMS
    assert tuple(found.values()) == pytest.approx(expected)
    assert math.fsum(found.values()) == pytest.approx(1, abs=1e-15)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"baseline": 90, "carryover": 5}, "got 95 from baseline=90 carryover=5; for example "
         "baseline=95 carryover=5"),
        ({"carryover": 10}, "for example carryover=10 baseline=90"),
        ({"baseline": 0.5}, "for example baseline=1"),
        ({"carryover": 0.25}, "for example carryover=0.25 baseline=0.75"),
        ({"carryover": 70, "control": 60}, "got 130 from carryover=70 control=60; lower some"),
        ({}, "got 0 from nothing"),
        ({"baseline": 110, "carryover": -10}, "weight of 'carryover' must be 0 or more, got -10"),
        ({"baseline": math.nan}, "must be 0 or more, got nan"),
        ({"baseline": math.inf}, "must be 0 or more, got inf"),
        ({"carry": 100}, "no arm 'carry'; did you mean 'carryover'?"),
        ({"zzz": 100}, "no arm 'zzz'; arms: baseline, carryover, control"),
    ],
)  # fmt: skip
def test_wrong_weights_are_refused_with_the_fix(given, said):
    with pytest.raises(ConfigError) as error:
        check_weights(given, ARMS)
    assert said in str(error.value)


def test_without_weights_everything_goes_to_the_control_arm(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    resolved = TrafficConfig().resolve(arms=ARMS, application="shop")
    assert resolved.weights == {"baseline": 1.0, "carryover": 0.0, "control": 0.0}
    assert (resolved.experiment, resolved.salt) == ("shop", "shop")
    assert resolved.fallback == ["baseline"]
    assert resolved.state == tmp_path / "runs/serve/shop"
    assert resolved.tracking_uri == f"sqlite:///{tmp_path}/mlflow.db"
    traffic = initial_traffic(resolved)
    assert (traffic.version, traffic.weights) == (1, resolved.weights)
    # what crosses to the controller's process is resolved once more there
    again = TrafficConfig.parse(resolved.model_dump(mode="json"))
    assert again.resolve(arms=ARMS, application="other") == resolved


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"fallback": ["baselin"]}, "traffic.fallback: no arm 'baselin'; did you mean 'baseline'?"),
        ({"shadow": {"arm": "x", "share": 0.1}}, "traffic.shadow.arm: no arm 'x'"),
        ({"weights": {"baseline": 50}}, "traffic.weights must sum to 100"),
    ],
)
def test_a_section_that_does_not_fit_the_arms_is_refused(settings, said):
    with pytest.raises(ConfigError) as error:
        TrafficConfig.parse(settings).resolve(arms=ARMS, application="shop")
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"wieghts": {}}, "did you mean 'weights'?"),
        ({"experiment": "a b"}, "an experiment's name holds up to 64 letters"),
        ({"experiment": ""}, "an experiment's name holds up to 64 letters"),
        ({"shadow": {"arm": "x", "share": 0}}, "shadow.share"),
        ({"shadow": {"arm": "x", "share": 1.5}}, "shadow.share"),
        ({"guard": {"max_error": 0.1}}, "did you mean 'max_error_rate'?"),
    ],
)
def test_unknown_keys_and_values_are_refused(settings, said):
    with pytest.raises(ConfigError) as error:
        TrafficConfig.parse(settings)
    assert said in str(error.value)


def test_a_state_folder_of_the_users_is_kept(tmp_path):
    resolved = TrafficConfig(state=tmp_path / "s", record=False).resolve(
        arms=ARMS, application="shop"
    )
    assert resolved.state == Path(tmp_path / "s")
    assert resolved.tracking_uri is None
