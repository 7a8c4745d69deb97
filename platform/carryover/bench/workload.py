"""What is asked, and in which order: blocks of prompts, in each all conditions and arms shuffled.

Drift of the machine (heat, other load) then falls on all arms alike, block by block, instead of on
the arm that happens to be measured last. All conditions see the same prompts, and what has been
measured at any moment is a balanced choice of them: a bench that stops early is a smaller bench.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from carryover.bench.records import Condition
from carryover.data.prompts import Prompt
from carryover.errors import ConfigError


@dataclass(frozen=True)
class Unit:
    """What is measured in one go: a block of prompts on one arm, under one condition.

    Attributes:
        block: number of the block, from 0.
        condition: what is asked besides the prompts.
        arm: who answers.
        prompts: in the order in which they are sent.
    """

    block: int
    condition: Condition
    arm: str
    prompts: tuple[Prompt, ...]

    @property
    def key(self) -> str:
        """Unique in a bench."""
        return f"{self.condition.title} block={self.block} arm={self.arm}"


def select_prompts(prompts: Sequence[Prompt], count: int | None, *, seed: int) -> list[Prompt]:
    """Choose `count` prompts, as evenly over the categories as their sizes allow.

    They come in random order in which every beginning is balanced likewise: the n-th prompt of
    a category comes before the (n + 1)-th of any.

    Args:
        prompts: to choose from.
        count: how many; None takes all.
        seed: of the choice and the order.

    Raises:
        ConfigError: there are fewer than `count`.
    """
    if count is not None and count > len(prompts):
        raise ConfigError(
            f"num_prompts {count} exceeds the {len(prompts)} prompts there are; lower it, or "
            "leave it out to take all"
        )
    shuffled = list(prompts)
    random.Random(seed).shuffle(shuffled)
    seen: Counter[str] = Counter()
    ranked = []
    for prompt in shuffled:
        ranked.append((seen[prompt.category], len(ranked), prompt))
        seen[prompt.category] += 1
    return [prompt for _, _, prompt in sorted(ranked, key=lambda entry: entry[:2])][:count]


def make_plan(
    prompts: Sequence[Prompt],
    arms: Sequence[str],
    conditions: Sequence[Condition],
    *,
    block_size: int,
    seed: int,
) -> list[Unit]:
    """Cut the prompts into blocks (the last may be smaller) and put everything in order.

    Args:
        prompts: in their order.
        arms: all of them answer a block under one condition before anything else happens.
        conditions: all of them are measured on a block before the next.
        block_size: prompts in a block.
        seed: of the orders.
    """
    draw = random.Random(seed)
    plan = []
    for number, start in enumerate(range(0, len(prompts), block_size)):
        part = tuple(prompts[start : start + block_size])
        for condition in draw.sample(list(conditions), len(conditions)):
            plan += [
                Unit(number, condition, arm, part) for arm in draw.sample(list(arms), len(arms))
            ]
    return plan


def in_turns(plan: Sequence[Unit], *, turns: int) -> list[Unit]:
    """Reorder a plan so that an arm's engine is started `turns` times, not in every block.

    The blocks are dealt out to the turns; in each turn an arm measures its blocks in one go, and
    the arms' order is reversed from turn to turn, so that a steady drift cancels out.

    Args:
        plan: of `make_plan`.
        turns: how often each arm has its turn; no more than there are blocks.
    """
    arms = list(dict.fromkeys(unit.arm for unit in plan))
    groups: dict[tuple[int, str], list[Unit]] = defaultdict(list)
    for unit in plan:
        groups[unit.block % turns, unit.arm].append(unit)
    return [
        unit
        for turn in range(turns)
        for arm in (arms if turn % 2 == 0 else arms[::-1])
        for unit in groups[turn, arm]
    ]


def poisson_arrivals(count: int, *, rate: float, seed: int) -> list[float]:
    """Times of `count` arrivals at `rate` per second, from 0; the same for the same seed."""
    draw, now_s, arrivals = random.Random(seed), 0.0, []
    for _ in range(count):
        arrivals.append(now_s)
        now_s += draw.expovariate(rate)
    return arrivals


def count_categories(prompts: Sequence[Prompt]) -> dict[str, int]:
    """Prompts per category, most first."""
    return dict(Counter(prompt.category for prompt in prompts).most_common())


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """A digest of what is asked: categories and first turns, in any order."""
    lines = sorted(json.dumps([p.category, p.system, p.turns[0]]) for p in prompts)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
