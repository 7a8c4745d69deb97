"""Which arm a request goes to, which may stand in, and what is let in."""

import pytest

from carryover.serving.admission import Gate, Health
from carryover.serving.openai_errors import ApiError
from carryover.serving.routing import Route, choose, substitutes, unit_of
from carryover.serving.traffic import Traffic

ARMS = ("control", "canary", "idle")
WEIGHTS = {"control": 0.75, "canary": 0.25, "idle": 0.0}


def route(**changes):
    asked = {
        "arms": ARMS, "named": None, "header": None, "allow_override": True, "key": None,
        "uniform": 0.1, **changes,
    }  # fmt: skip
    traffic = Traffic(version=1, experiment="e", salt="s", weights=WEIGHTS)
    return choose(traffic, **asked)


def test_a_name_goes_before_a_header_and_a_header_before_chance():
    assert route(named="idle", header="canary") == Route("idle", "model")
    assert route(header="idle", key="k") == Route("idle", "header")
    assert route() == Route("control", "weighted")
    assert route(uniform=0.9).arm == "canary"
    sticky = route(key="k")
    assert sticky.reason == "sticky" and sticky == route(key="k", uniform=0.99)
    assert sticky.unit == unit_of("k", "s") and sticky.unit != "k"


def test_a_header_that_may_not_choose_is_refused_and_not_ignored():
    with pytest.raises(ApiError) as caught:
        route(header="canary", allow_override=False)
    assert caught.value.status == 403
    with pytest.raises(ApiError) as caught:
        route(header="nobody")
    assert caught.value.status == 400 and "control, canary, idle" in caught.value.message


def test_units_differ_by_experiment_and_hide_the_key():
    assert unit_of("someone", "a") != unit_of("someone", "b")
    assert "someone" not in unit_of("someone", "a")


@pytest.mark.parametrize(
    ("assigned", "fallback", "expected"),
    [
        ("canary", ["control"], ("control",)),
        ("control", ["control"], ("canary",)),
        ("canary", ["idle", "control"], ("idle", "control")),
        ("canary", [], ()),
    ],
)
def test_an_arm_without_weight_stands_in_only_if_listed(assigned, fallback, expected):
    assert substitutes(Route(assigned, "weighted"), WEIGHTS, fallback) == expected


@pytest.mark.parametrize("reason", ["header", "model"])
def test_nothing_stands_in_for_an_arm_that_the_client_chose(reason):
    assert substitutes(Route("canary", reason), WEIGHTS, ["control"]) == ()


def test_a_gate_lets_in_its_part_of_the_limit_and_no_more():
    gate = Gate(ARMS, limit=5, replicas=2)
    assert [gate.enter("canary") for _ in range(4)] == [True, True, True, False]
    assert gate.is_full("canary") and not gate.is_full("control")
    gate.leave("canary")
    assert gate.enter("canary")
    assert Gate(ARMS, limit=1, replicas=4).enter("idle")


def test_an_arm_goes_down_once_at_a_sure_sign_or_after_several():
    health = Health()
    assert health.failed("a", "gone", definite=True)
    assert not health.failed("a", "gone", definite=True) and health.down == {"a": "gone"}
    assert health.recovered("a") and not health.recovered("a")
    unsure = [health.failed("b", "slow", definite=False) for _ in range(3)]
    assert unsure == [False, False, True]
    health.recovered("b")
    for _ in range(5):
        assert not health.failed("b", "slow", definite=False)
        health.succeeded("b")
    assert not health.down


def front(**settings):
    """An ingress replica on its own, without Ray."""
    from carryover.serving.ingress import ArmIngress
    from carryover.serving.settings import FrontSettings
    from carryover.serving.traffic import TrafficConfig

    traffic = TrafficConfig().resolve(arms=["a"], application="test")
    return ArmIngress({}, {}, settings=FrontSettings("m", "a", traffic, **settings))


@pytest.mark.parametrize(("temperature", "refused"), [(0.7, True), (None, True), (0, False)])
def test_seeds_are_refused_where_engines_do_not_survive_them(monkeypatch, temperature, refused):
    from ray.serve.llm.openai_api_models import ChatCompletionRequest

    # freezing is for a process of its own
    monkeypatch.setattr("gc.freeze", lambda: None)
    message = [{"role": "user", "content": "hello"}]
    body = ChatCompletionRequest(model="m", messages=message, seed=3, temperature=temperature)
    front(seeds=True)._check_limits(body)
    if not refused:
        front(seeds=False)._check_limits(body)
        return
    with pytest.raises(ApiError, match="temperature to 0") as caught:
        front(seeds=False)._check_limits(body)
    assert caught.value.param == "seed" and caught.value.status == 400
