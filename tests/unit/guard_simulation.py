"""Many experiments at once, looked at again and again: what the guard's mathematics is tried on.

An experiment is a stream of requests at 2 a second; a kind of traffic makes, for all experiments
and the next requests, the arm, the group of the sticky key, the split, and the metric's numerator
and denominator. Between two looks sums grow exactly as `GroupSums` lets them.
"""

from dataclasses import dataclass

import numpy as np

from carryover.serving.arm_statistics import NUM_GROUPS
from carryover.serving.guard import METRICS, MIN_BLOCKS, MIN_UNITS
from carryover.serving.sequential import Sums, effect
from carryover.serving.time_blocks import FIRST_BLOCK_S, MAX_BLOCKS

RATE = 2.0
PER_BLOCK = int(FIRST_BLOCK_S * RATE)


@dataclass
class Requests:
    """Arrays [experiments, requests]."""

    arm: np.ndarray
    group: np.ndarray
    y: np.ndarray
    x: np.ndarray
    split: np.ndarray | None = None


@dataclass
class Outcome:
    """By experiment: request number of the first verdict (0: none), its sign, naive first alarm."""

    found_at: np.ndarray
    sign: np.ndarray
    naive: np.ndarray


def looks(last):
    """Request counts at which to look: after every 4 requests at first, then ever more rarely."""
    points = [20]
    while points[-1] < last:
        points.append(points[-1] + max(4, points[-1] // 40 // 4 * 4))
    return points


def simulate(traffic, metric, *, experiments=1000, last=2000, alpha=0.05, seed=0, splits=1):
    """Run experiments and look at each all the time.

    Args:
        traffic: traffic(rng, experiments, first, last) makes `Requests` number first .. last - 1.
        metric: which one of the guard's metrics `y` and `x` stand for.
        experiments: how many.
        last: requests in each.
        alpha: of the comparison.
        seed: of the random numbers.
        splits: how many splits `Requests.split` names.
    """
    rng, rule = np.random.default_rng(seed), METRICS[metric]
    num_blocks = -(-looks(last)[-1] // PER_BLOCK)
    shape = (2, experiments, splits)
    units = np.zeros((2, *shape, NUM_GROUPS))
    blocks = np.zeros((2, *shape, num_blocks))
    products = np.zeros((3, *shape))
    found_at = np.zeros(experiments, int)
    sign, naive = np.zeros(experiments), np.zeros(experiments, bool)
    row, begin = np.arange(experiments)[:, None], 0
    for end in looks(last):
        new = traffic(rng, experiments, begin, end)
        cell = (new.arm * experiments + row) * splits
        cell = cell + (0 if new.split is None else new.split)
        block = np.broadcast_to(np.arange(begin, end) // PER_BLOCK, cell.shape)
        for kept, place in ((units, new.group), (blocks, block)):
            flat = (cell * kept.shape[-1] + place).ravel()
            for into, values in zip(kept, (new.y, new.x), strict=True):
                into += np.bincount(flat, values.ravel(), into.size).reshape(into.shape)
        pairs = ((new.y, new.y), (new.y, new.x), (new.x, new.x))
        for into, (left, right) in zip(products, pairs, strict=True):
            into += np.bincount(
                cell.ravel(), (left * right).ravel(), into.size
            ).reshape(into.shape)  # fmt: skip
        grown = _grow(blocks, -(-end // PER_BLOCK))
        arms = [
            Sums(*units[:, arm], *grown[:, arm], *products[:, arm]) for arm in (0, 1)
        ]  # fmt: skip
        found = effect(
            *arms, rho=rule.rho, alpha=alpha, shifted_log=rule.shifted_log,
            coin=metric == "error_rate",
        )  # fmt: skip
        enough = (found.units >= MIN_UNITS) & (found.blocks >= MIN_BLOCKS)
        alarm = enough & (np.abs(found.value) > found.half_width)
        first = alarm & (found_at == 0)
        found_at[first], sign[first] = end, np.sign(found.value[first])
        naive |= enough & (np.abs(found.value) > 1.96 * _plain_error(arms))
        begin = end
    return Outcome(found_at, sign, naive)


def _grow(blocks, used):
    """The blocks as `TimeBlocks` has them by now."""
    length = 1
    while -(-used // length) > MAX_BLOCKS:
        length *= 2
    padded = np.zeros((*blocks.shape[:-1], -(-used // length) * length))
    padded[..., :used] = blocks[..., :used]
    return padded.reshape(*blocks.shape[:-1], -1, length).sum(-1)


def _plain_error(arms):
    """The usual standard error of a difference of means of requests, splits and keys ignored."""
    total = 0.0
    for arm in arms:
        n, y, yy = np.maximum(arm.xx.sum(-1), 1), arm.y.sum((-1, -2)), arm.yy.sum(-1)
        total = total + (yy / n - (y / n) ** 2) / n
    return np.sqrt(total)


def no_keys(rng, shape):
    """Requests without a sticky key."""
    return rng.integers(0, NUM_GROUPS, shape)


class Latencies:
    """Log-normal latencies of which some are 30 times as long; optionally slower in treatment."""

    def __init__(self, *, share=0.5, spread=0.6, stragglers=0.01, change=0.0):
        self.share, self.spread = share, spread
        self.stragglers, self.change = stragglers, change

    def __call__(self, rng, experiments, first, last):
        shape = (experiments, last - first)
        arm = (rng.random(shape) < self.share).astype(int)
        y = rng.standard_normal(shape) * self.spread + arm * np.log1p(self.change)
        y += np.log(30) * (rng.random(shape) < self.stragglers)
        return Requests(arm, no_keys(rng, shape), y, np.ones(shape))


class Sessions:
    """Every request belongs to a user who stays on an arm, and users differ more than requests.

    With `ramp`, the treatment's share goes 5, 10, 25, 50% by quarters of the experiment, while
    latencies swing and rise for everybody.
    """

    def __init__(self, *, users=400, between=0.5, within=0.4, skew=0.3, ramp=0):
        size = 1 / np.arange(1, users + 1) ** skew
        self.users, self.chance = users, size / size.sum()
        self.between, self.within, self.ramp = between, within, ramp
        self.level = None

    def __call__(self, rng, experiments, first, last):
        if self.level is None:
            shape = (experiments, self.users)
            self.level = rng.standard_normal(shape) * self.between
            self.place, self.group = rng.random(shape), no_keys(rng, shape)
        shape = (experiments, last - first)
        row, who = np.arange(experiments)[:, None], rng.choice(self.users, shape, p=self.chance)
        number = np.arange(first, last)
        y = self.level[row, who] + rng.standard_normal(shape) * self.within
        split, share = None, 0.5
        if self.ramp:
            stage = np.minimum(number // (self.ramp // 4), 3)
            share = np.array([0.05, 0.1, 0.25, 0.5])[stage]
            split = np.broadcast_to(stage, shape)
            y = y + 0.5 * np.sin(number / 300) + number / self.ramp
        arm = (self.place[row, who] < share).astype(int)
        return Requests(arm, self.group[row, who], y, np.ones(shape), split)


class Stalls:
    """In a third of all stretches of 10 s an arm's replica is slower or faster, for everybody."""

    def __init__(self, *, size=0.6, within=0.4):
        self.size, self.within, self.levels = size, within, {}

    def __call__(self, rng, experiments, first, last):
        shape, stretch = (experiments, last - first), np.arange(first, last) // PER_BLOCK
        for number in np.unique(stretch):
            if number not in self.levels:
                hit = rng.random((2, experiments)) < 0.3
                self.levels[number] = rng.standard_normal((2, experiments)) * self.size * hit
        arm = rng.integers(0, 2, shape)
        level = np.stack([self.levels[number] for number in stretch], axis=-1)
        y = np.where(arm == 1, level[1], level[0]) + rng.standard_normal(shape) * self.within
        return Requests(arm, no_keys(rng, shape), y, np.ones(shape))


class Failures:
    """Rare failures."""

    def __init__(self, *, chance=0.01, share=0.5, times=1.0):
        self.chance, self.share, self.times = chance, share, times

    def __call__(self, rng, experiments, first, last):
        shape = (experiments, last - first)
        arm = (rng.random(shape) < self.share).astype(int)
        chance = self.chance * np.where(arm == 1, self.times, 1.0)
        y = (rng.random(shape) < chance).astype(float)
        return Requests(arm, no_keys(rng, shape), y, np.ones(shape))


class Rounds:
    """Accepted proposals over rounds: answers of 30 rounds on average, some easy and some hard."""

    def __init__(self, *, share=0.5, control=4.33, lift=0.0, proposals=15, between=0.25):
        self.share, self.control, self.lift = share, control, lift
        self.proposals, self.between = proposals, between

    def __call__(self, rng, experiments, first, last):
        shape = (experiments, last - first)
        arm = (rng.random(shape) < self.share).astype(int)
        x = rng.geometric(1 / 30, shape).astype(float)
        mean = self.control * (1 + self.lift * arm) - 1
        mean = mean * rng.lognormal(-(self.between**2) / 2, self.between, shape)
        y = np.minimum(rng.negative_binomial(x, 1 / (1 + mean)), self.proposals * x)
        return Requests(arm, no_keys(rng, shape), y.astype(float), x)
