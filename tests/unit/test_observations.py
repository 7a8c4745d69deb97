"""What is kept of requests: which of them count, in what memory, and that nothing is lost."""

import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from guard_arms import arm_pair
from hypothesis import given, settings
from hypothesis import strategies as st

from carryover.serving.arm_statistics import (
    COLUMN,
    MAX_LABELS,
    MAX_RECENT,
    MAX_SPLITS,
    NUM_GROUPS,
    OTHER,
    ArmStatistics,
)
from carryover.serving.guard import compare_all
from carryover.serving.history import FIELDS, History, Trail
from carryover.serving.observations import Observation, Statistics, split_name
from carryover.serving.time_blocks import FIRST_BLOCK_S, MAX_BLOCKS, TimeBlocks, common_grid

T0 = 1.8e9
SPLIT = "baseline=0.5 carryover=0.5"
PLAIN = Observation(
    T0, "carryover", "carryover", "weighted", SPLIT, "ok", ttft_s=0.2, tpot_s=0.02, e2e_s=2.0,
    prompt_tokens=10, output_tokens=100, rounds=25, accepted=75, proposed=175,
    accepted_per_position=(25, 20, 15, 10, 5, 0, 0),
)  # fmt: skip
times = st.none() | st.floats(allow_nan=True, allow_infinity=True)
observations = st.builds(
    Observation,
    time_s=st.floats(T0, T0 + 1e6), arm=st.just("carryover"),
    assigned=st.sampled_from(["carryover", "baseline"]),
    reason=st.sampled_from(["weighted", "sticky", "header", "model", "fallback"]),
    split=st.sampled_from([SPLIT, "carryover=1"]),
    outcome=st.sampled_from(["ok", "error", "shed", "timeout", "disconnected", "fallback"]),
    shadow=st.booleans(), label=st.none() | st.sampled_from("ab"),
    unit=st.none() | st.sampled_from("xyz"), ttft_s=times, tpot_s=times, e2e_s=times,
    output_tokens=st.integers(0, 1000), rounds=st.integers(0, 100), accepted=st.integers(0, 700),
    accepted_per_position=st.lists(st.integers(0, 100), max_size=8).map(tuple),
)  # fmt: skip


def filled(seen):
    statistics = ArmStatistics("carryover")
    for observation in seen:
        statistics.add(observation)
    return statistics


def test_a_row_goes_through_json_and_comes_back():
    row = json.loads(json.dumps(PLAIN.to_row()))
    assert Observation.from_row(row) == PLAIN


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("outcome", "great", "outcome must be one of ok"), ("rounds", -1, "at least 0"),
     ("time_s", math.nan, "time_s must be a number"), ("accepted_per_position", (-1,), "at least")],
)  # fmt: skip
def test_a_row_that_makes_no_sense_is_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        Observation.from_row(replace(PLAIN, **{field: value}).to_row())


def test_a_row_of_another_length_is_refused():
    with pytest.raises(ValueError, match="has 18 fields, got 17"):
        Observation.from_row(PLAIN.to_row()[:-1])


@pytest.mark.parametrize(
    ("change", "kind"),
    [({}, "compared"), ({"reason": "sticky"}, "compared"), ({"reason": "header"}, "override"),
     ({"reason": "model"}, "override"),
     ({"reason": "fallback", "assigned": "baseline"}, "fallback"),
     ({"assigned": "baseline"}, "fallback"), ({"shadow": True}, "shadow"),
     ({"shadow": True, "reason": "header"}, "shadow"), ({"outcome": "fallback"}, "compared")],
)  # fmt: skip
def test_only_requests_assigned_by_chance_are_compared(change, kind):
    seen = replace(PLAIN, **change)
    assert seen.kind == kind
    statistics = filled([seen])
    assert statistics.num_compared == (kind == "compared") == len(statistics.recent)
    assert bool(statistics.splits) == (kind == "compared")
    assert statistics.totals[kind].requests == 1


@pytest.mark.parametrize(
    ("outcome", "failed"),
    [("ok", False), ("disconnected", False), ("error", True), ("shed", True), ("timeout", True),
     ("fallback", True)],
)  # fmt: skip
def test_failures_are_what_the_arm_owed(outcome, failed):
    statistics = filled([replace(PLAIN, outcome=outcome)])
    assert statistics.summary()["failures"] == failed
    assert math.isnan(statistics.summary()["acceptance_length"]) == (outcome != "ok")


def test_split_names_do_not_depend_on_order_or_sum():
    assert split_name({"b": 90, "a": 10, "c": 0}) == "a=0.1 b=0.9"
    assert split_name({"a": 0.1, "b": 0.9}) == "a=0.1 b=0.9"
    assert split_name({"a": 1 / 3, "b": 2 / 3}) != split_name({"a": 0.34, "b": 0.66})


def test_acceptance_is_pooled_over_rounds_never_a_mean_of_means():
    seen = [replace(PLAIN, rounds=1, accepted=7), replace(PLAIN, rounds=99, accepted=93)]
    row = filled(seen).summary()
    assert row["acceptance_length"] == 2.0
    assert row["acceptance_per_position"][0] == 50 / 100


def test_a_summary_of_nothing_is_nan():
    row = ArmStatistics("carryover").summary()
    assert row["requests"] == row["failures"] == row["output_tokens"] == 0
    for name in ("error_rate", "ttft_p50_s", "tpot_p95_s", "acceptance_length"):
        assert math.isnan(row[name])
    assert row["acceptance_per_position"] == []


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0])
def test_a_time_that_cannot_be_is_left_out_and_counted(value):
    statistics = filled([PLAIN, replace(PLAIN, ttft_s=value)])
    assert statistics.totals["compared"].invalid == 1
    assert statistics.summary()["ttft_p50_s"] == pytest.approx(0.2)
    assert statistics.splits[SPLIT].units[:, COLUMN["num_ttft"]].sum() == 1
    assert np.isfinite(statistics.splits[SPLIT].units).all()


@settings(max_examples=50, deadline=None)
@given(st.lists(observations, max_size=30))
def test_statistics_come_back_from_json_as_they_were(seen):
    statistics = Statistics(["carryover"])
    statistics.add(seen)
    text = json.dumps(statistics.to_json(), allow_nan=False)
    back = Statistics.from_json(json.loads(text))
    assert json.dumps(back.to_json()) == text
    assert str(back.arms["carryover"].summary()) == str(statistics.arms["carryover"].summary())


@settings(max_examples=40, deadline=None)
@given(st.lists(observations, max_size=20), st.lists(observations, max_size=20))
def test_merged_is_as_if_one_had_seen_all(first, second):
    # Each in order: an observation older than the first block counts in that.
    first, second, both = (
        sorted(seen, key=lambda one: one.time_s) for seen in (first, second, [*first, *second])
    )
    merged, whole = filled(first), filled(both)
    merged.merge(filled(second))
    for kind, totals in whole.totals.items():
        left, right = merged.totals[kind].to_json(), totals.to_json()
        assert left.pop("e2e_s") == pytest.approx(right.pop("e2e_s"))
        assert left == right
    assert {label: totals.requests for label, totals in merged.by_label.items()} == {
        label: totals.requests for label, totals in whole.by_label.items()
    }
    assert merged.splits.keys() == whole.splits.keys()
    for name, sums in whole.splits.items():
        other = merged.splits[name]
        assert other.units.sum(0) == pytest.approx(sums.units.sum(0))
        assert other.products == pytest.approx(sums.products)
        level, base = common_grid([other.blocks, sums.blocks])
        assert other.blocks.on(level, base) == pytest.approx(sums.blocks.on(level, base))
    assert len(merged.recent) == len(whole.recent)


def test_memory_is_bounded_whatever_comes():
    statistics = ArmStatistics("carryover")
    for number in range(MAX_RECENT + 500):
        statistics.add(
            replace(
                PLAIN, time_s=T0 + 50 * number, label=f"label {number}" * 50, unit=f"u{number}",
                split=f"split {number % 100}", accepted_per_position=(1,) * 500,
            )
        )  # fmt: skip
    assert len(statistics.recent) == MAX_RECENT
    assert len(statistics.splits) == MAX_SPLITS and statistics.uncompared > 0
    assert len(statistics.by_label) == MAX_LABELS + 1 and OTHER in statistics.by_label
    assert sum(totals.requests for totals in statistics.by_label.values()) == MAX_RECENT + 500
    assert max(map(len, statistics.by_label)) <= 64
    assert len(json.dumps(statistics.to_json())) < 2.5e6


def test_requests_of_one_key_share_a_group_and_others_spread():
    statistics = filled([replace(PLAIN, unit="same")] * 50)
    assert (statistics.splits[SPLIT].units[:, 0] > 0).sum() == 1
    statistics = filled([PLAIN] * 2000)
    assert (statistics.splits[SPLIT].units[:, 0] > 0).sum() > 0.95 * NUM_GROUPS


def test_one_key_has_the_same_group_in_every_arm():
    groups = []
    for arm in ("baseline", "carryover"):
        statistics = ArmStatistics(arm)
        statistics.add(replace(PLAIN, arm=arm, assigned=arm, unit="same"))
        groups.append(int(np.flatnonzero(statistics.splits[SPLIT].units[:, 0])[0]))
    assert groups[0] == groups[1]


def test_an_arm_that_does_not_exist_is_counted_and_dropped():
    statistics = Statistics(["baseline"])
    assert statistics.add([PLAIN, replace(PLAIN, arm="baseline", assigned="baseline")]) == 1
    assert statistics.history.arms == ["baseline"]


@pytest.mark.parametrize("text", ["{}", '{"format": 99}', "[]", '{"format": 1, "arms": 3}'])
def test_what_are_no_statistics_is_refused(text):
    with pytest.raises(ValueError, match="no statistics of an experiment"):
        Statistics.from_json(json.loads(text))


@given(st.lists(st.floats(0, 1e7), min_size=1, max_size=40))
def test_blocks_of_time_keep_every_request_on_one_grid(offsets):
    blocks, value = TimeBlocks(1), np.ones(1)
    for offset in offsets:
        blocks.add(T0 + offset, value)
    assert blocks.sums.sum() == len(offsets)
    length = FIRST_BLOCK_S * 2**blocks.level
    for offset in offsets:
        number = max(int((T0 + offset) // length), blocks.base)
        assert blocks.sums[number - blocks.base, 0] >= 1
        assert number - blocks.base < MAX_BLOCKS


def test_blocks_of_two_arms_are_set_side_by_side():
    short, long = TimeBlocks(1), TimeBlocks(1)
    for second in range(0, 600, 5):
        short.add(T0 + second, np.ones(1))
    for second in range(0, 40_000, 5):
        long.add(T0 + second, np.ones(1))
    level, base = common_grid([short, long])
    assert level == long.level > short.level
    first, second = short.on(level, base)[:, 0], long.on(level, base)[:, 0]
    assert first.sum() == 120 and second.sum() == 8000
    assert np.all(first <= second)


def test_the_history_spans_everything_in_bounded_memory():
    history = History(interval_s=10, max_intervals=8)
    for minute in range(100):
        history.add(replace(PLAIN, time_s=T0 + 60 * minute, outcome="ok" if minute else "error"))
    assert history.num_intervals <= 8
    assert history.sums("carryover", "compared").sum() == 100
    assert history.sums("carryover", "failures")[0] == 1
    assert history.sums("carryover", "rounds").sum() == 99 * 25
    assert history.interval_s == 1280
    assert history.times_s()[0] == history.start_s + 640
    assert history.at_most(3).sums("carryover", "compared").sum() == 100
    assert history.num_intervals > 3, "at_most makes a copy"


def test_the_history_gives_means_with_intervals_where_there_are_enough():
    history = History(interval_s=10)
    for rounds, accepted, tpot in ((10, 20, 0.02), (30, 120, 0.08)):
        history.add(replace(PLAIN, rounds=rounds, accepted=accepted, tpot_s=tpot))
    history.add(replace(PLAIN, time_s=T0 + 10))
    mean, low, high = history.acceptance("carryover")
    assert mean[0] == pytest.approx(1 + 140 / 40)
    assert low[0] < mean[0] < high[0] and math.isnan(low[1])
    mean, low, high = history.latency("carryover", "tpot")
    assert mean[0] == pytest.approx(0.04) and mean[1] == pytest.approx(0.02)
    assert math.log(high[0] / 0.04) == pytest.approx(1.96 * math.log(4) / 2, rel=0.01)
    assert np.isnan(history.acceptance("baseline")[0]).all()


def test_kinds_are_kept_apart_in_the_history():
    history = History()
    for change in ({}, {"shadow": True}, {"reason": "header"}, {"outcome": "disconnected"}):
        history.add(replace(PLAIN, **change))
    row = {name: float(history.sums("carryover", name)[0]) for name in FIELDS}
    assert (row["compared"], row["others"], row["shadows"]) == (2, 1, 1)
    assert row["num_tpot"] == row["num_rounds"] == 1


def test_an_old_or_odd_history_is_refused():
    values = History().to_json()
    with pytest.raises(ValueError, match="the history holds"):
        History.from_json({**values, "fields": ["compared"]})
    with pytest.raises(ValueError, match="must be even"):
        History(max_intervals=7)


def test_the_trail_is_thinned_and_keeps_its_span():
    control, treatment = arm_pair(400)
    compared = compare_all(control, {"carryover": treatment})
    trail = Trail(max_points=16)
    for number in range(1000):
        trail.note(T0 + number, compared)
    points = trail.points["carryover/tpot_s"]
    assert 8 <= len(points) <= 16
    assert points[0][0] == T0 and points[-1][0] > T0 + 900
    gaps = {round(second[0] - first[0]) for first, second in pairwise(points)}
    assert len(gaps) == 1
    assert points[0][1:] == [
        compared["carryover"]["tpot_s"].relative,
        compared["carryover"]["tpot_s"].relative_low,
        compared["carryover"]["tpot_s"].relative_high,
    ]
    assert Trail.from_json(json.loads(json.dumps(trail.to_json()))).points == trail.points
