"""Choice and order of prompts."""

import pytest

from carryover.bench.workload import count_categories, make_blocks, select_prompts
from carryover.data.prompts import Prompt
from carryover.errors import ConfigError


def prompts(*categories):
    return [Prompt(number, "s", name, ("x",)) for number, name in enumerate(categories)]


def test_more_prompts_than_there_are_is_refused():
    with pytest.raises(ConfigError, match="num_prompts 3 exceeds the 2 prompts"):
        select_prompts(prompts("a", "a"), 3, seed=0)


def test_all_prompts_are_taken_without_a_count():
    assert len(select_prompts(prompts("a", "b", "a"), None, seed=0)) == 3


def test_the_arms_order_varies_over_blocks():
    orders = {
        block.arms for block in make_blocks(prompts(*"a" * 40), ("x", "y"), block_size=2, seed=0)
    }
    assert orders == {("x", "y"), ("y", "x")}


def test_categories_are_counted():
    assert count_categories(prompts("a", "b", "b")) == {"b": 2, "a": 1}
