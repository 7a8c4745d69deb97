"""Comparisons and rules on requests as they come; error rates are in test_guard_simulation.py."""

import json
import math
import re
from dataclasses import replace
from zlib import crc32

import numpy as np
import pytest
from guard_arms import EVEN, T0, arm_pair
from guard_simulation import PER_BLOCK, RATE, Rounds, simulate

from carryover.errors import ConfigError
from carryover.serving.guard import METRICS, GuardRules, breaches, compare, compare_all, lacking
from carryover.serving.observations import ArmStatistics, Observation, split_name
from carryover.serving.sequential import (
    boundary,
    effective_number,
    small_sample_factor,
    sub_gaussian_factor,
)


def test_the_direction_of_better_is_right_for_each_metric():
    control, treatment = arm_pair(2500, tpot=0.8, ttft=1.5, lift=1.2, failures=(0.02, 0.15))
    found = compare_all(control, {"carryover": treatment})["carryover"]
    verdicts = {metric: comparison.verdict for metric, comparison in found.items()}
    assert verdicts == {
        "acceptance_length": "better", "tpot_s": "better", "ttft_s": "worse",
        "e2e_s": "inconclusive", "error_rate": "worse",
    }  # fmt: skip
    swapped = compare_all(treatment, {"baseline": control})["baseline"]
    opposite = {"better": "worse", "worse": "better", "inconclusive": "inconclusive"}
    assert {metric: opposite[found.verdict] for metric, found in swapped.items()} == verdicts
    assert found["tpot_s"].relative == pytest.approx(-0.2, abs=0.03)
    assert found["error_rate"].estimate == pytest.approx(0.13, abs=0.03)
    assert found["acceptance_length"].relative == pytest.approx(0.2 * 3.3 / 4.3, abs=0.03)


def test_numbers_fit_together():
    control, treatment = arm_pair(1500, tpot=0.9)
    for metric, found in compare_all(control, {"carryover": treatment})["carryover"].items():
        assert found.low <= found.estimate <= found.high
        assert found.relative_low <= found.relative <= found.relative_high
        assert found.treatment - found.control == pytest.approx(found.estimate)
        assert found.relative == pytest.approx(found.estimate / found.control)
        assert found.alpha == pytest.approx(0.05 / len(METRICS))
        assert found.why.count("\n") == 0
        # what counts as one: requests, or answers that have the number
        expected = [arm.splits[EVEN].units[:, 0].sum() for arm in (control, treatment)]
        if metric == "error_rate":
            assert [found.n_control, found.n_treatment] == expected
        else:
            assert found.n_control < expected[0]


def test_an_even_split_of_one_period_gives_the_plain_figures():
    control, treatment = arm_pair(1000)
    found = compare(control, treatment, metric="acceptance_length")
    assert found.control == pytest.approx(control.summary()["acceptance_length"])
    assert found.treatment == pytest.approx(treatment.summary()["acceptance_length"])
    found = compare(control, treatment, metric="error_rate")
    assert found.control == pytest.approx(control.summary()["error_rate"])


def test_the_product_gives_the_simulations_numbers():
    """One experiment through `Observation` and through the simulation: the same first verdict."""
    rng = np.random.default_rng(5)
    traffic = Rounds(lift=0.3)
    kept = [traffic(rng, 1, first, first + 4) for first in range(0, 400, 4)]
    columns = {
        name: np.concatenate([getattr(part, name)[0] for part in kept])
        for name in ("arm", "group", "y", "x")
    }

    def replay(rng, experiments, first, last):
        part = traffic(np.random.default_rng(0), 1, first, last)
        return replace(part, **{name: column[None, first:last] for name, column in columns.items()})

    found_at = simulate(replay, "acceptance_length", experiments=1, last=396).found_at[0]
    assert found_at > 0
    units = {}
    arms = ArmStatistics("baseline"), ArmStatistics("carryover")
    for number in range(400):
        unit = name_of_group(int(columns["group"][number]), units)
        arm = arms[int(columns["arm"][number])]
        # The simulation's blocks begin with the experiment.
        start = T0 // (PER_BLOCK / RATE * 64) * (PER_BLOCK / RATE * 64)
        arm.add(
            Observation(
                start + number / RATE, arm.arm, arm.arm, "sticky", EVEN, "ok", unit=unit,
                rounds=int(columns["x"][number]), accepted=int(columns["y"][number]),
            )
        )  # fmt: skip
        verdict = compare(*arms, metric="acceptance_length").verdict
        if number + 1 == found_at:
            assert verdict == "better"
            return
        if number + 1 == found_at - 4:
            assert verdict == "inconclusive"
    raise AssertionError("no verdict")


def name_of_group(group, known):
    """A sticky key that falls into a group."""
    number = len(known)
    while group not in known:
        known.setdefault(crc32(f"k{number}".encode()) % 256, f"k{number}")
        number += 1
    return known[group]


@pytest.mark.parametrize("metric", METRICS)
def test_no_data_is_said_and_not_judged(metric):
    empty, full = ArmStatistics("carryover"), arm_pair(300)[0]
    for pair in ((full, empty), (empty, full), (empty, ArmStatistics("other"))):
        found = compare(*pair, metric=metric)
        assert found.verdict == "inconclusive"
        assert "to compare, in any period in which both arms had traffic" in found.why
        assert math.isnan(found.estimate) and math.isnan(found.low) and math.isnan(found.high)


def test_an_arm_without_drafts_has_nothing_to_compare_on_acceptance():
    control, _ = arm_pair(600)
    _, plain = arm_pair(600, rounds=0, accepted=0)
    found = compare(control, plain, metric="acceptance_length")
    assert found.verdict == "inconclusive" and found.n_treatment == 0
    assert "no answers with drafts of carryover" in found.why
    assert compare(control, plain, metric="tpot_s").n_treatment > 0


@pytest.mark.parametrize("metric", METRICS)
def test_one_key_is_one_unit_however_many_requests(metric):
    control, treatment = arm_pair(2000, tpot=0.5, lift=2, failures=(0, 0.5), unit="one")
    found = compare(control, treatment, metric=metric)
    assert found.verdict == "inconclusive" and math.isnan(found.low)
    assert "too few" in found.why


def test_a_few_keys_are_a_few_units():
    control, treatment = ArmStatistics("baseline"), ArmStatistics("carryover")
    for number in range(3000):
        arm, factor = ((control, 1.0), (treatment, 0.5))[number % 2]
        arm.add(
            Observation(T0 + number, arm.arm, arm.arm, "sticky", EVEN, "ok",
                        unit=f"{arm.arm} {number % 24 // 2}", tpot_s=0.02 * factor)
        )  # fmt: skip
    found = compare(control, treatment, metric="tpot_s")
    assert found.verdict == "inconclusive"
    assert "the equivalent of 12, 20 are needed" in found.why


def test_the_first_seconds_give_no_verdict():
    control, treatment = arm_pair(2000, tpot=0.5, time_s=T0 + 3)
    found = compare(control, treatment, metric="tpot_s")
    assert found.verdict == "inconclusive" and "too short a time" in found.why


def test_no_variance_at_all_still_needs_evidence():
    control, treatment = ArmStatistics("baseline"), ArmStatistics("carryover")
    seen = []
    for number in range(600):
        arm = (control, treatment)[number % 2]
        arm.add(
            Observation(T0 + number, arm.arm, arm.arm, "weighted", EVEN, "ok",
                        tpot_s=0.01 if arm is treatment else 0.02)
        )  # fmt: skip
        seen.append(compare(control, treatment, metric="tpot_s"))
    assert seen[19].verdict == "inconclusive" and seen[-1].verdict == "better"
    assert seen[-1].relative == pytest.approx(-0.5)
    assert seen[-1].relative_low < -0.5 < seen[-1].relative_high


def test_no_failure_at_all_bounds_the_difference():
    control, treatment = arm_pair(2000, failures=(0, 0))
    found = compare(control, treatment, metric="error_rate")
    assert found.verdict == "inconclusive" and found.estimate == 0
    assert -0.01 < found.low < 0 < found.high < 0.01
    assert math.isnan(found.relative)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 0.0])
def test_times_that_cannot_be_do_not_reach_the_comparison(value):
    control, treatment = arm_pair(600)
    before = compare(control, treatment, metric="ttft_s")
    for arm in (control, treatment):
        arm.add(
            Observation(T0, arm.arm, arm.arm, "weighted", EVEN, "ok", ttft_s=value, tpot_s=0.02)
        )
    assert compare(control, treatment, metric="ttft_s") == before


def test_what_was_not_assigned_by_chance_changes_nothing():
    control, treatment = arm_pair(600)
    before = compare_all(control, {"carryover": treatment})
    for change in ({"reason": "header"}, {"shadow": True}, {"assigned": "baseline"}):
        seen = Observation(T0, "carryover", "carryover", "weighted", EVEN, "ok", tpot_s=9.0)
        for _ in range(100):
            treatment.add(replace(seen, **change))
    assert compare_all(control, {"carryover": treatment}) == before


def test_a_drift_during_a_ramp_is_no_effect():
    """Both arms get slower as the treatment's share grows: only the naive figures differ."""
    rng = np.random.default_rng(1)
    control, treatment = ArmStatistics("baseline"), ArmStatistics("carryover")
    for number in range(4000):
        share = 0.05 if number < 2000 else 0.5
        arm = treatment if rng.random() < share else control
        arm.add(
            Observation(
                T0 + number, arm.arm, arm.arm, "weighted",
                split_name({"baseline": 1 - share, "carryover": share}), "ok",
                tpot_s=float(rng.lognormal(-4 if number < 2000 else -3.5, 0.2)),
            )
        )  # fmt: skip
    found = compare(control, treatment, metric="tpot_s")
    assert found.verdict == "inconclusive" and abs(found.relative) < 0.05
    naive = treatment.summary()["tpot_p50_s"] / control.summary()["tpot_p50_s"] - 1
    assert naive > 0.15


def test_a_period_with_one_arm_alone_is_left_out():
    control, treatment = arm_pair(600)
    before = compare(control, treatment, metric="tpot_s")
    for _ in range(500):
        control.add(
            Observation(T0, "baseline", "baseline", "weighted", "baseline=1", "ok", tpot_s=5.0)
        )
    assert compare(control, treatment, metric="tpot_s") == before


def test_comparisons_survive_json_and_merging():
    control, treatment = arm_pair(600)
    before = compare_all(control, {"carryover": treatment})
    texts = [json.dumps(arm.to_json()) for arm in (control, treatment)]
    back = [ArmStatistics.from_json(json.loads(text)) for text in texts]
    assert compare_all(back[0], {"carryover": back[1]}) == before
    empty = ArmStatistics("carryover")
    empty.merge(treatment)
    assert compare_all(control, {"carryover": empty}) == before


def test_an_unknown_metric_or_alpha_is_refused():
    control, treatment = arm_pair(10)
    with pytest.raises(ConfigError, match=r"no metric 'speed'; metrics: acceptance_length, tpot_s"):
        compare(control, treatment, metric="speed")
    with pytest.raises(ConfigError, match="alpha must lie between 0 and 1, got 5"):
        compare(control, treatment, metric="tpot_s", alpha=5)


def test_the_whole_table_shares_alpha():
    control, treatment = arm_pair(100)
    table = compare_all(control, {"carryover": treatment, "control": treatment}, alpha=0.1)
    assert table["carryover"]["tpot_s"].alpha == pytest.approx(0.1 / 2 / len(METRICS))


def test_the_boundary_is_never_below_its_floor_and_grows():
    values = boundary(np.array([0.0, 1.0, 10.0, 1000.0]), rho=1.0, alpha=0.05)
    assert values[0] == pytest.approx(math.sqrt(2 * math.log(20)))
    assert np.all(np.diff(values) > 0)


def test_few_units_ask_for_more_and_many_for_nothing():
    factors = small_sample_factor(
        np.full(4, 10.0), np.array([4.0, 20.0, 200.0, 1e6]), rho=1.0, alpha=0.05
    )
    assert np.all(np.diff(factors) < 0)
    assert factors[0] > 3 and factors[-1] == pytest.approx(1, abs=1e-3)


def test_effective_numbers():
    assert effective_number(np.array([[1.0] * 10, [10.0] + [0.0] * 9]))[0] == 10
    assert effective_number(np.array([[9.0, 1.0]]))[0] == pytest.approx(100 / 82)
    assert effective_number(np.zeros(4)) == 0


def test_the_coins_factor_bounds_its_moments():
    """E exp(t (X - p)) <= exp(factor t^2 / 2) for every t: what sub-Gaussian means."""
    chance, t = np.meshgrid(np.linspace(0.01, 0.99, 99), np.linspace(-12, 12, 97))
    moment = chance * np.exp(t * (1 - chance)) + (1 - chance) * np.exp(-t * chance)
    assert np.all(np.log(moment) <= sub_gaussian_factor(chance) * t**2 / 2 + 1e-9)


RULES = GuardRules(
    max_error_rate=0.05, max_p95_ttft_s=0.5, max_p95_tpot_s=0.05, min_acceptance_length=2.0
)


def arm_of(number, **values):
    arm = ArmStatistics("carryover")
    seen = Observation(T0, "carryover", "carryover", "weighted", EVEN, "ok", ttft_s=0.1,
                       tpot_s=0.01, e2e_s=1.0, rounds=20, accepted=60)  # fmt: skip
    for index in range(number):
        arm.add(replace(seen, time_s=T0 + index, **values))
    return arm


def broken(arm, *, rules=RULES, now_s=T0 + 100, evaluation=1):
    return breaches(rules, {"carryover": arm}, now_s=now_s, evaluation=evaluation)


def test_a_good_arm_breaks_nothing():
    assert broken(arm_of(100)) == []
    assert broken(ArmStatistics("carryover")) == []
    assert breaches(RULES, {}, now_s=T0, evaluation=1) == []


@pytest.mark.parametrize(
    ("values", "rule", "text"),
    [
        ({"outcome": "error"}, "max_error_rate", r"error rate 100\.0% \(60 of 60 requests\)"),
        ({"outcome": "fallback"}, "max_error_rate", r"error rate 100\.0% \(60 of 60 requests\)"),
        ({"ttft_s": 0.7}, "max_p95_ttft_s", r"p95 TTFT 0\.7 s \(60 of 60 over\)"),
        ({"tpot_s": 0.06}, "max_p95_tpot_s", r"p95 TPOT 0\.06 s \(60 of 60 over\)"),
        ({"accepted": 10}, "min_acceptance_length", r"acceptance length 1\.50 over 1200 rounds"),
    ],
)
def test_each_rule_catches_its_breach_and_says_so(values, rule, text):
    (breach,) = broken(arm_of(60, **values))
    assert (breach.arm, breach.rule, breach.limit) == ("carryover", rule, getattr(RULES, rule))
    assert re.fullmatch(f"carryover: {text} in the last 300 s breaks {rule} [0-9.]+", breach.text)
    off = RULES.model_copy(update={rule: None})
    assert broken(arm_of(60, **values), rules=off) == []


def test_a_dead_arm_is_caught_after_a_handful_of_requests():
    rules = GuardRules()
    assert not broken(arm_of(4, outcome="error"), rules=rules, evaluation=1)
    assert broken(arm_of(5, outcome="error"), rules=rules, evaluation=1)
    day = 24 * 3600 // 10
    assert not broken(arm_of(7, outcome="error"), rules=rules, evaluation=day)
    assert broken(arm_of(8, outcome="error"), rules=rules, evaluation=day)


def test_old_failures_are_forgotten():
    arm = arm_of(60, outcome="error")
    assert broken(arm, now_s=T0 + 61)
    assert broken(arm, now_s=T0 + 1000) == []


def test_a_bad_day_after_a_good_week_is_seen():
    arm = arm_of(4000)
    for index in range(30):
        name = arm.arm
        arm.add(Observation(T0 + 5000 + index, name, name, "sticky", EVEN, "timeout"))
    assert [breach.rule for breach in broken(arm, now_s=T0 + 5030)] == ["max_error_rate"]


def test_a_client_that_leaves_is_no_breach():
    assert broken(arm_of(100, outcome="disconnected")) == []


def test_evidence_asked_for_grows_with_the_number_of_looks_and_rules():
    arm = arm_of(200)
    for index in range(20):
        arm.add(Observation(T0 + index, arm.arm, arm.arm, "weighted", EVEN, "error"))
    rules = GuardRules(max_error_rate=0.04, window_s=1000)
    firm = [broken(arm, rules=rules, evaluation=number) != [] for number in (1, 4, 40, 4000)]
    assert firm == [True, True, False, False]


def test_what_is_lacking_for_a_ramp_is_said():
    rules = GuardRules(min_requests=50)
    arm = arm_of(60)
    assert lacking(rules, {"carryover": arm}, since_s=T0, now_s=T0 + 60) == {}
    said = lacking(rules, {"carryover": arm}, since_s=T0 + 30, now_s=T0 + 60)
    assert said == {"carryover": "carryover: 30 compared requests in 30 s, 50 needed"}


def test_rules_are_checked_where_they_are_written():
    with pytest.raises(ConfigError, match="max_eror_rate: unknown key; did you mean"):
        GuardRules.parse({"max_eror_rate": 0.1})
    with pytest.raises(ConfigError, match="min_requests"):
        GuardRules.parse({"min_requests": 100_000})
