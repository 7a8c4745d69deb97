"""Scores, and which settings are stopped early."""

from math import nan

import pytest

from sweeps.halving import overall, rate_under_limit, rungs, why_stop, why_stop_at
from sweeps.settings import EarlyStop

LOADS = [(0.0, 1), (0.0, 32), (0.0, 4), (0.0, 8), (0.0, 16), (0.0, 2)]
RULE = EarlyStop(after_loads=2, reduction_factor=2, margin=0.1)


def measured(**rates):
    return {name: dict(zip(LOADS, each, strict=False)) for name, each in rates.items()}


def test_a_setting_that_is_far_from_the_best_everywhere_is_stopped():
    rates = measured(good=[10, 100], bad=[5, 50])
    reason = why_stop("bad", rates, LOADS, RULE)
    assert "at most 50% of it" in reason and "number 2 of 2" in reason
    assert why_stop("good", rates, LOADS, RULE) is None


def test_one_that_is_best_at_one_load_goes_on_however_bad_at_others():
    rates = measured(short=[10, 100], long=[30, 5], third=[29, 99])
    assert why_stop("long", rates, LOADS, RULE) is None
    assert why_stop("short", rates, LOADS, RULE) is None


def test_one_within_the_margin_goes_on_whatever_its_rank():
    rates = measured(a=[100, 100], b=[99, 99], c=[95, 95], d=[80, 80])
    assert why_stop("c", rates, LOADS, RULE) is None
    assert why_stop("d", rates, LOADS, RULE)


def test_nothing_is_decided_between_rungs_nor_with_too_few_others():
    assert rungs(RULE, 6) == [2, 4]
    rates = measured(good=[10, 100, 50], bad=[1, 1, 1])
    assert why_stop("bad", rates, LOADS, RULE) is None
    assert why_stop("bad", measured(bad=[1, 1]), LOADS, RULE) is None


def test_rungs_end_before_the_last_load():
    assert rungs(EarlyStop(after_loads=2, reduction_factor=3), 6) == [2]
    assert rungs(EarlyStop(after_loads=2, reduction_factor=3), 7) == [2, 6]
    assert rungs(EarlyStop(after_loads=4), 4) == []
    assert rungs(EarlyStop(after_loads=1, reduction_factor=1.2), 3) == [1, 2]


def test_references_are_neither_stopped_nor_compared_with():
    rates = measured(plain=[1, 1], good=[10, 100], bad=[5, 50])
    assert why_stop("plain", rates, LOADS, RULE, spared=["plain"]) is None
    few = measured(plain=[100, 1000], bad=[5, 50])
    assert why_stop("bad", few, LOADS, RULE, spared=["plain"]) is None


def test_a_load_over_the_limit_counts_little():
    assert rate_under_limit(100, 30, 50) == 100
    assert rate_under_limit(100, 60, 50) == 1
    assert rate_under_limit(100, nan, 50) == 100
    assert rate_under_limit(100, 60, None) == 100


def test_the_overall_rate_is_a_geometric_mean():
    assert overall([4, 9]) == pytest.approx(6)
    assert overall([]) == 0 and overall([1, 0]) == 0


def test_trainings_are_halved_at_the_first_evaluation_after_a_rung():
    curves = {"a": {50: 3.0, 110: 4.0}, "b": {50: 2.0, 110: 3.0}, "c": {60: 1.0, 120: 2.0}}
    assert why_stop_at("c", curves, 100, 3) == "at step 120 only number 3 of 3"
    assert why_stop_at("a", curves, 100, 3) is None
    assert why_stop_at("c", {**curves, "c": {60: 1.0}}, 100, 3) is None
    # decided at 120, so not again before 300
    assert why_stop_at("c", {**curves, "c": {120: 2.0, 180: 2.0}}, 100, 3) is None
    assert why_stop_at("c", {"c": {120: 2.0}}, 100, 3) is None
