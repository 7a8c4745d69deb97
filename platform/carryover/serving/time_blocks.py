"""Sums by block of time, in bounded memory: at most 64 blocks, which double as time goes on.

Blocks lie on one grid (block number = epoch time / length, lengths 10 s times powers of two), so
the blocks of different arms can be brought to the same length and set side by side. For ten minutes
a block lasts 10 s, after a day about half an hour: the longer an experiment, the longer the
disturbances that its variance allows for (batch means with growing batches).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

FIRST_BLOCK_S = 10.0
MAX_BLOCKS = 64


class TimeBlocks:
    """Rows of sums, one a block.

    Attributes:
        level: a block lasts `FIRST_BLOCK_S * 2**level` seconds.
        base: number on the grid of the first block.
        sums: [MAX_BLOCKS, columns].
    """

    def __init__(self, columns: int) -> None:
        self.level, self.base = 0, -1
        self.sums = np.zeros((MAX_BLOCKS, columns))

    def add(self, time_s: float, values: np.ndarray) -> None:
        """Add one request's values to its block; one older than the first goes to the first."""
        number = int(time_s // FIRST_BLOCK_S)
        if self.base < 0:
            self.base = number
        while (number >> self.level) - self.base >= MAX_BLOCKS:
            self._coarsen()
        self.sums[max((number >> self.level) - self.base, 0)] += values

    def merge(self, other: Self) -> None:
        """Add all that `other` counted."""
        level, base = common_grid([self, other])
        if base >= 0:
            merged = self.on(level, base) + other.on(level, base)
            self.level, self.base, self.sums = level, base, merged

    def on(self, level: int, base: int) -> np.ndarray:
        """[MAX_BLOCKS, columns]: the sums on a grid that `common_grid` found."""
        placed = np.zeros_like(self.sums)
        used = np.flatnonzero(self.sums.any(axis=1))
        if len(used):
            np.add.at(placed, ((self.base + used) >> (level - self.level)) - base, self.sums[used])
        return placed

    @property
    def span(self) -> tuple[int, int]:
        """Numbers of the first and the last block that hold anything; (-1, -1) if none does."""
        used = np.flatnonzero(self.sums.any(axis=1))
        return (self.base + int(used[0]), self.base + int(used[-1])) if len(used) else (-1, -1)

    def to_json(self) -> dict[str, Any]:
        """Without the sums."""
        return {"level": self.level, "base": self.base}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], sums: np.ndarray) -> Self:
        """Inverse of `to_json`, with the sums."""
        made = cls(sums.shape[1])
        made.level, made.base, made.sums = int(values["level"]), int(values["base"]), sums
        return made

    def _coarsen(self) -> None:
        level, base = self.level + 1, self.base >> 1
        self.sums = self.on(level, base)
        self.level, self.base = level, base


def common_grid(several: Sequence[TimeBlocks]) -> tuple[int, int]:
    """The finest level, and the first block on it, at which all fit `MAX_BLOCKS` blocks together.

    Returns:
        (level, base); (0, -1) if nothing was counted.
    """
    spans = [(blocks.level, *blocks.span) for blocks in several if blocks.span[0] >= 0]
    level = max((found for found, _, _ in spans), default=0)
    while spans:
        first = min(begin >> (level - found) for found, begin, _ in spans)
        last = max(end >> (level - found) for found, _, end in spans)
        if last - first < MAX_BLOCKS:
            return level, first
        level += 1
    return 0, -1
