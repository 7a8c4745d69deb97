"""What must hold of the bench's figures and workloads whatever is measured."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carryover.bench import statistics
from carryover.bench.records import Condition
from carryover.bench.workload import make_plan, select_prompts
from carryover.data.prompts import Prompt

counts = st.lists(st.integers(0, 50), min_size=2, max_size=16).filter(sum)
times = st.floats(0.001, 100)


@given(counts)
def test_acceptance_rates_fall_and_add_up_to_the_acceptance_length(histogram):
    rates = statistics.position_rates(histogram)
    assert len(rates) == len(histogram) - 1
    assert all(first >= second for first, second in pairwise(rates))
    accepted = sum(number * rounds for number, rounds in enumerate(histogram))
    length = statistics.acceptance_length(accepted, sum(histogram))
    assert 1 + sum(rates) == pytest.approx(length)


@given(st.lists(counts, min_size=1, max_size=6))
def test_pooled_histograms_keep_every_round(histograms):
    assert sum(statistics.pool_histograms(histograms)) == sum(map(sum, histograms))


@given(st.lists(times, min_size=1, max_size=20), times)
def test_shares_of_the_wall_time_add_up(latencies, wall):
    assert sum(statistics.share_of_wall(latencies, wall)) == pytest.approx(wall)


@given(ttft=times, per_token=times, tokens=st.integers(2, 500))
def test_tpot_is_recovered_whatever_the_chunks(ttft, per_token, tokens):
    latency = ttft + per_token * (tokens - 1)
    found = statistics.time_per_output_token(ttft, latency, tokens)
    assert found == pytest.approx(per_token, rel=1e-6)


# each example draws 2,000 resamples
@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(times, times), min_size=1, max_size=12), st.floats(0.1, 10))
def test_a_ratio_between_an_arm_and_itself_scaled_is_the_scale(pairs, scale):
    tokens, seconds = zip(*pairs, strict=True)
    faster = [second / scale for second in seconds]
    found = statistics.ratio_between((tokens, faster), (tokens, seconds))
    assert found.value == pytest.approx(scale)


def prompts_of(categories):
    return [Prompt(number, "s", name, ("x",)) for number, name in enumerate(categories)]


@given(
    categories=st.lists(st.sampled_from("abc"), min_size=1, max_size=40),
    seed=st.integers(0, 5),
    data=st.data(),
)
def test_chosen_prompts_are_balanced_distinct_and_reproducible(categories, seed, data):
    prompts = prompts_of(categories)
    count = data.draw(st.integers(1, len(prompts)))
    chosen = select_prompts(prompts, count, seed=seed)
    assert len({prompt.id for prompt in chosen}) == len(chosen) == count
    assert chosen == select_prompts(prompts, count, seed=seed)
    present, taken = Counter(categories), Counter(prompt.category for prompt in chosen)
    most = max(taken.values())
    for name, number in present.items():
        assert taken[name] == number or taken[name] >= most - 1


@given(
    count=st.integers(1, 60),
    size=st.integers(1, 20),
    arms=st.integers(1, 4),
    loads=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_a_plan_asks_every_arm_every_prompt_once_under_every_condition(
    count, size, arms, loads, seed
):
    names = [f"arm{number}" for number in range(arms)]
    conditions = [Condition(concurrency=number + 1) for number in range(loads)]
    prompts = prompts_of("a" * count)
    plan = make_plan(prompts, names, conditions, block_size=size, seed=seed)
    for name in names:
        for condition in conditions:
            units = [u for u in plan if u.arm == name and u.condition == condition]
            assert [prompt for unit in units for prompt in unit.prompts] == prompts
            assert all(len(unit.prompts) == size for unit in units[:-1])
    assert [unit.block for unit in plan] == sorted(unit.block for unit in plan)


@given(categories=st.lists(st.sampled_from("abc"), min_size=1, max_size=40), cut=st.integers(1, 40))
def test_every_beginning_of_the_chosen_prompts_is_balanced(categories, cut):
    chosen = select_prompts(prompts_of(categories), None, seed=1)[:cut]
    present, taken = Counter(categories), Counter(prompt.category for prompt in chosen)
    most = max(taken.values())
    assert all(taken[name] in (present[name], most, most - 1) for name in present)


# each example draws thousands of resamples
@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(times, times), min_size=2, max_size=12))
def test_a_macro_average_of_equal_sets_is_the_micro_average_and_lies_in_its_interval(pairs):
    columns = tuple(zip(*pairs, strict=True))
    macro = statistics.macro_average([columns, columns], statistics.ratio)
    assert macro.value == pytest.approx(statistics.ratio_of_sums(*columns).value)
    assert macro.low <= macro.value * (1 + 1e-9) and macro.high >= macro.value * (1 - 1e-9)
