"""Definitions of the bench's figures, on numbers that can be checked by hand."""

from math import isnan

import numpy as np
import pytest

from carryover.bench import statistics
from carryover.bench.statistics import Interval


def test_tpot_is_the_time_after_the_first_token_per_further_token():
    assert statistics.time_per_output_token(0.5, 2.5, 5) == pytest.approx(0.5)
    assert statistics.time_per_output_token(0.5, 0.5, 1) is None


def test_acceptance_length_counts_the_correction_token():
    assert statistics.acceptance_length(30, 10) == 4.0
    assert statistics.acceptance_length(0, 10) == 1.0
    assert isnan(statistics.acceptance_length(0, 0))


def test_position_rates_from_a_histogram():
    # 4 rounds: one accepted nothing, one 1, two 3
    assert statistics.position_rates([1, 1, 0, 2]) == [0.75, 0.5, 0.5]
    assert statistics.position_rates([]) == []
    assert statistics.position_rates([0, 0]) == []


def test_histograms_of_different_lengths_are_added():
    assert statistics.pool_histograms([[1, 2], [1, 0, 3]]) == [2, 2, 3]
    assert statistics.pool_histograms([]) == []


def test_percentiles_interpolate_and_survive_no_data():
    assert statistics.percentiles([1.0, 3.0], (50,)) == [2.0]
    assert isnan(statistics.percentiles([], (50, 95))[1])


def test_the_wall_time_is_shared_by_latency():
    assert statistics.share_of_wall([1.0, 3.0], 2.0) == pytest.approx([0.5, 1.5])
    assert statistics.share_of_wall([], 2.0) == []


def test_a_ratio_of_sums_is_no_mean_of_ratios():
    pooled = statistics.ratio_of_sums([10, 10], [1, 9])
    assert pooled.value == pytest.approx(2.0)
    assert pooled.low < 2.0 < pooled.high


def test_one_prompt_has_no_interval_and_none_has_no_value():
    single = statistics.ratio_of_sums([10], [2])
    assert single.value == 5.0 and not single.bounded
    assert isnan(statistics.ratio_of_sums([], []).value)
    assert isnan(statistics.ratio_of_sums([1, 2], [0, 0]).value)


def test_pairs_must_match():
    with pytest.raises(ValueError, match="equal length"):
        statistics.ratio_of_sums([1, 2], [1])


def test_intervals_are_reproducible():
    first = statistics.ratio_of_sums([1, 5, 2], [1, 2, 3], seed=4)
    assert first == statistics.ratio_of_sums([1, 5, 2], [1, 2, 3], seed=4)
    assert isinstance(first, Interval)


def test_a_paired_ratio_is_tighter_than_its_arms():
    """Prompts differ a hundredfold in length, arms by a factor: pairing must see only that."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(10, 1000, size=40)
    times = tokens * draw.uniform(0.5, 2.0, size=40)
    ratio = statistics.ratio_between((tokens, times / 1.5), (tokens, times))
    assert ratio.value == pytest.approx(1.5)
    assert ratio.low == pytest.approx(1.5) and ratio.high == pytest.approx(1.5)


def test_intervals_hold_the_truth_as_often_as_they_say():
    """Ratio of sums of a known population, 200 samples of 60 prompts: about 95% must cover it."""
    draw = np.random.default_rng(7)
    covered = 0
    for number in range(200):
        drafts = draw.integers(5, 60, size=60)
        accepted = draw.binomial(drafts * 3, 0.4)
        found = statistics.ratio_of_sums(accepted + drafts, drafts, seed=number)
        covered += found.low <= 1 + 3 * 0.4 <= found.high
    assert 0.88 <= covered / 200 <= 0.99
