"""What is asked, and in which order: prompts in blocks, and the arms in random order in each.

Drift of the machine (heat, other load) then falls on all arms alike, block by block, instead of on
the arm that happens to be measured last.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from carryover.data.prompts import Prompt
from carryover.errors import ConfigError


@dataclass(frozen=True)
class Block:
    """Prompts that every arm answers before the next block begins.

    Attributes:
        number: from 0.
        prompts: in the order in which they are sent.
        arms: in the order in which they are measured.
    """

    number: int
    prompts: tuple[Prompt, ...]
    arms: tuple[str, ...]


def select_prompts(prompts: Sequence[Prompt], count: int | None, *, seed: int) -> list[Prompt]:
    """Choose `count` prompts, as evenly over the categories as their sizes allow, in random order.

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
    draw = random.Random(seed)
    shuffled = list(prompts)
    draw.shuffle(shuffled)
    if count is None or count == len(prompts):
        return shuffled
    # The n-th prompt of every category comes before the (n + 1)-th of any.
    seen: Counter[str] = Counter()
    ranked = []
    for prompt in shuffled:
        ranked.append((seen[prompt.category], len(ranked), prompt))
        seen[prompt.category] += 1
    chosen = [prompt for _, _, prompt in sorted(ranked, key=lambda entry: entry[:2])[:count]]
    draw.shuffle(chosen)
    return chosen


def make_blocks(
    prompts: Sequence[Prompt], arms: Sequence[str], *, block_size: int, seed: int
) -> list[Block]:
    """Cut the prompts into blocks of `block_size` (the last may be smaller) with shuffled arms."""
    draw = random.Random(seed)
    blocks = []
    for start in range(0, len(prompts), block_size):
        order = list(arms)
        draw.shuffle(order)
        part = tuple(prompts[start : start + block_size])
        blocks.append(Block(len(blocks), part, tuple(order)))
    return blocks


def count_categories(prompts: Sequence[Prompt]) -> dict[str, int]:
    """Prompts per category, most first."""
    return dict(Counter(prompt.category for prompt in prompts).most_common())
