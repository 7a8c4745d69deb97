"""Goals: met, missed by how much, or not measured."""

import pytest

from carryover.bench.statistics import Interval
from carryover.results import goals


def test_a_baseline_is_held_to_its_acceptance_length():
    assert goals.baseline_acceptance(Interval(2.0, 1.9, 2.1)).verdict == "met"
    missed = goals.baseline_acceptance(Interval(1.68, 1.6, 1.7))
    assert missed.met is False and missed.verdict == "missed: by 0.32"
    assert missed.measured == "1.68 [1.60, 1.70]"
    absent = goals.baseline_acceptance(None)
    assert absent.met is None and absent.verdict == absent.measured == "not measured"


@pytest.mark.parametrize(
    ("other", "interval", "verdict"),
    [
        ("baseline", Interval(1.07, 1.01, 1.13), "met"),
        ("baseline", Interval(1.05, 1.01, 1.09), "missed: by 1.5 points"),
        ("control", Interval(1.05, 1.01, 1.09), "met"),
        ("control", Interval(1.05, 0.99, 1.11), "missed: the interval has 0 in it"),
        ("control", Interval(1.0, 0.97, 1.03), "missed: by 4.0 points; the interval has 0 in it"),
        ("control", Interval(0.9, 0.85, 0.95), "missed: by 14.0 points; it loses"),
        ("control", Interval(1.2), "missed: there is no interval"),
        ("control", None, "not measured"),
    ],
)
def test_a_gain_must_be_large_enough_and_beyond_chance(other, interval, verdict):
    found = goals.acceptance_gain(other, interval)
    assert found.verdict == verdict
    assert found.met is (None if interval is None else verdict == "met")


def test_the_best_arm_is_held_to_the_speed_up():
    found = goals.online_speedup({"a": Interval(1.2, 1.1, 1.3), "b": Interval(1.9, 1.8, 2.0)})
    assert found.verdict == "missed: by 0.10x" and found.measured == "1.90x [1.80, 2.00] (b)"
    assert goals.online_speedup({"a": Interval(2.4, 2.3, 2.5)}).met is True
    assert goals.online_speedup({}).met is None


def test_a_gain_must_be_beyond_chance_at_every_load():
    high, unsure, low = Interval(1.05, 1.02, 1.08), Interval(1.01, 0.99, 1.03), Interval(0.98)
    assert goals.gain_at_every_load({1: high, 8: high, 32: high}).met is True
    found = goals.gain_at_every_load({1: high, 8: unsure, 32: low})
    assert found.verdict == "missed: the interval at 8 has 0 in it; by 2.0 points at 32"
    assert found.measured == "at 1, 8, 32; lowest -2.0% at 32"
    assert goals.gain_at_every_load({1: high, 8: high}).verdict == (
        "not measured at 32; above 0 at all others"
    )
    assert goals.gain_at_every_load({}).verdict == "not measured"


def test_verdicts_rest_on_valid_and_whole_runs():
    met = goals.baseline_acceptance(Interval(2.5, 2.4, 2.6))
    assert goals.doubted(met, invalid=False, partial=False) == met
    invalid = goals.doubted(met, invalid=True, partial=True)
    assert invalid.met is None and "INVALID" in invalid.verdict
    partial = goals.doubted(met, invalid=False, partial=True)
    assert partial.met is True and partial.verdict == "met (PARTIAL run)"
    absent = goals.baseline_acceptance(None)
    assert goals.doubted(absent, invalid=True, partial=True) == absent
