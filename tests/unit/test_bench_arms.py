"""Which arms an endpoint has, and which of them may be compared."""

import httpx
import pytest

from carryover.bench import arms as module
from carryover.bench.arms import (
    check_roles,
    choose_baseline,
    choose_reference,
    find_arms,
    notes_on_arms,
)
from carryover.errors import ConfigError, ServingError

ENGINE = {"max_model_len": 256}


def about(drafter=None, **engine):
    return {"target": "t", "drafter": drafter, "engine": {**ENGINE, **engine}}


def card(model, described=None):
    return {"id": model, "metadata": None if described is None else {"carryover": described}}


@pytest.fixture
def endpoint(monkeypatch):
    """Lets `/v1/models` list the given cards."""

    def listing(*cards, status=200):
        request = httpx.Request("GET", "http://x")
        answer = httpx.Response(status, json={"data": list(cards)}, request=request)
        monkeypatch.setattr(module.httpx, "get", lambda *_, **__: answer)

    return listing


def test_arms_are_the_cards_that_describe_one(endpoint):
    endpoint(card("logical"), card("plain", about()), card("fast", about("d")))
    assert list(find_arms("http://x")) == ["plain", "fast"]
    assert list(find_arms("http://x", wanted=["fast"])) == ["fast"]


def test_models_of_another_server_are_arms_without_a_description(endpoint):
    endpoint(card("m"))
    assert find_arms("http://x") == {"m": {}}


def test_arms_that_differ_in_more_than_the_drafter_are_refused(endpoint):
    endpoint(card("plain", about()), card("fast", about("d", max_model_len=512)))
    with pytest.raises(ConfigError, match="differ in more than the drafter"):
        find_arms("http://x")


def test_allowed_differences_are_compared_and_told(endpoint):
    allowed = {"allowed_differences": ["max_model_len", "extra.enable_prefix_caching"]}
    fast = {
        **about("d", max_model_len=512, extra={"enable_prefix_caching": False}), **allowed,
        "differences": ["extra.enable_prefix_caching", "max_model_len"],
    }  # fmt: skip
    endpoint(card("plain", {**about(), **allowed}), card("fast", fast))
    found = find_arms("http://x")
    assert "also differs in extra.enable_prefix_caching, max_model_len" in notes_on_arms(found)[0]
    endpoint(card("plain", {**about(dtype="float32"), **allowed}), card("fast", fast))
    with pytest.raises(ConfigError, match="differ in more than the drafter"):
        find_arms("http://x")


def test_other_proposal_lengths_are_told():
    arms = {name: {**about("d"), "num_speculative_tokens": n} for name, n in (("a", 7), ("b", 15))}
    assert notes_on_arms(arms) == [
        "the arms propose different numbers of tokens a round: a 7, b 15"
    ]


def test_unknown_arms_and_a_baseline_that_is_not_measured_are_refused(endpoint):
    endpoint(card("plain", about()), card("fast", about("d")))
    with pytest.raises(ConfigError, match="no arm 'fsat' at http://x; it has: plain, fast"):
        find_arms("http://x", wanted=["fsat"])
    with pytest.raises(ConfigError, match="the baseline 'plain' must be among the arms measured"):
        check_roles(find_arms("http://x", wanted=["fast"]), reference=None, baseline="plain")


def test_a_server_that_is_not_ready_is_told(endpoint):
    endpoint(status=503)
    with pytest.raises(ServingError, match="platform serve"):
        find_arms("http://x")


def test_the_reference_is_the_given_the_autoregressive_or_the_first():
    arms = {"fast": about("d"), "plain": about()}
    assert choose_reference(arms) == "plain"
    assert choose_reference(arms, given="fast") == "fast"
    assert choose_reference({"a": about("d"), "b": about("e")}) == "a"
    assert choose_reference({"a": {}, "b": {}}) == "a"
    assert choose_reference({"a": about()}) is None


def test_the_baseline_is_the_given_the_one_of_that_name_or_the_first_that_drafts():
    arms = {"plain": about(), "carryover": about("c"), "baseline": about("b")}
    assert choose_baseline(arms) == "baseline"
    assert choose_baseline(arms, given="carryover") == "carryover"
    assert choose_baseline({"plain": about(), "x": about("d"), "y": about("e")}) == "x"
    assert choose_baseline({"plain": about(), "x": about("d")}) is None
