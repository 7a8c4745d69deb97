"""Choice and order of prompts."""

from itertools import groupby, pairwise
from statistics import mean, stdev

import pytest

from carryover.bench.records import Condition
from carryover.bench.workload import (
    count_categories,
    fingerprint,
    in_turns,
    make_plan,
    poisson_arrivals,
    select_prompts,
)
from carryover.data.prompts import Prompt
from carryover.errors import ConfigError


def prompts(*categories):
    return [Prompt(number, "s", name, ("x",)) for number, name in enumerate(categories)]


def test_more_prompts_than_there_are_is_refused():
    with pytest.raises(ConfigError, match="num_prompts 3 exceeds the 2 prompts"):
        select_prompts(prompts("a", "a"), 3, seed=0)


def test_all_prompts_are_taken_without_a_count():
    assert len(select_prompts(prompts("a", "b", "a"), None, seed=0)) == 3


def test_the_order_of_arms_and_conditions_varies_over_blocks():
    conditions = [Condition(concurrency=1), Condition(concurrency=8)]
    plan = make_plan(prompts(*"a" * 40), ("x", "y"), conditions, block_size=2, seed=0)
    assert {tuple(u.arm for u in pair) for pair in zip(plan[::2], plan[1::2], strict=True)} == {
        ("x", "y"), ("y", "x"),
    }  # fmt: skip
    first = {plan[start].condition.concurrency for start in range(0, len(plan), 4)}
    assert first == {1, 8}
    assert len({unit.key for unit in plan}) == len(plan) == 20 * 4


def test_turns_keep_every_unit_and_start_each_arm_once_a_turn():
    plan = make_plan(prompts(*"a" * 10), ("x", "y", "z"), [Condition()], block_size=2, seed=0)
    order = in_turns(plan, turns=2)
    assert sorted(u.key for u in order) == sorted(u.key for u in plan)
    arms = [arm for arm, _ in groupby(u.arm for u in order)]
    # the last arm of a turn is the first of the next
    assert len(arms) == 5 and arms == arms[::-1]


def test_arrivals_are_the_same_for_every_arm_and_have_the_rate():
    arrivals = poisson_arrivals(2000, rate=4.0, seed=3)
    assert (
        arrivals
        == poisson_arrivals(2000, rate=4.0, seed=3)
        != poisson_arrivals(2000, rate=4.0, seed=4)
    )
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    assert arrivals[0] == 0 and min(gaps) >= 0
    # mean and deviation of an exponential distribution are alike
    assert mean(gaps) == pytest.approx(0.25, rel=0.1) and stdev(gaps) == pytest.approx(
        0.25, rel=0.1
    )


def test_a_fingerprint_is_of_the_content_not_the_order():
    one, two = prompts("a", "b"), prompts("a", "b")[::-1]
    assert fingerprint(one) == fingerprint(two) != fingerprint(prompts("a", "c"))


def test_categories_are_counted():
    assert count_categories(prompts("a", "b", "b")) == {"b": 2, "a": 1}
