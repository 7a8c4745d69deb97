"""A comparison of two arms that may be looked at all the time: the mathematics. Pure arrays.

**What is estimated.** Each metric is a ratio of sums, y / x: failures per request, the mean of log
latency per answer, accepted proposals per round. Arms are compared within each split (period of
constant weights) and the differences d_s averaged with weights w_s = x0 x1 / (x0 + x1) (Mantel and
Haenszel), so neither a drift of traffic nor a change of weights can be mistaken for an effect.

**The process.** S = sum of w_s d_s is, up to terms that vanish, the sum over requests of (1 if the
request went to the treatment, else 0, less the treatment's share) times (the request's deviation).
Because chance alone decided the arm, S is a martingale when the arms do not differ: it starts at 0
and has no drift, however traffic changes meanwhile.

**Its variance** V is estimated from independent groups: G/(G-1) times the sum of squared group sums
of influence (Taylor linearisation of the ratio, the "delta method": Deng, Knoblich and Lu 2018).
Groups of sticky keys allow for all correlation of one key's requests. Blocks of time, which grow
with the experiment (see `time_blocks.py`), allow for what hits many keys of one arm at once: a
stall, a busy neighbour. The two are combined as in two-way clustering (Cameron, Gelbach and Miller
2011), units + blocks - requests, and never below the units' alone.

**The boundary.** |S - W effect| stays below sqrt((V + rho) log((V + rho) / (rho alpha^2))) at all
times at once, but for a chance of alpha (the normal mixture of Robbins 1970; Howard et al. 2021,
proposition 5). For sums that are only asymptotically normal this is an asymptotic confidence
sequence (Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas 2024): exact in the limit of many units.
When a key's requests are positively correlated and spread over time, S is smoother than the random
walk of the same variance, which by Slepian's inequality crosses even more rarely. rho says around
which V the boundary is tightest. It is a constant of the metric, not of the data: the boundary is
then never below sqrt(rho log(1 / alpha^2)), which makes early looks safe, when an estimate of V
from a few requests may be far too small.

**Few units.** V is enlarged by the ratio of Student's t quantile to the normal one at the
boundary's own level, with Kish's effective number of groups (or blocks) of the smaller arm less one
as degrees of freedom: a key that makes most of an arm's requests counts for little more than one
unit, and a minute of traffic for a few blocks.

**Rare failures.** A failure's arm is a coin toss with the treatment's share of requests as its
probability, so S is sub-Gaussian with a known factor (Kearns and Saul 1998), which V is never
below for error rates: the boundary then holds from the first failure on, without any limit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr, stdtrit

# A split counts once both arms have this many effective units in it.
MIN_UNITS_PER_SPLIT = 5.0
_TINY = 1e-300


@dataclass(frozen=True)
class Sums:
    """One metric of one arm, over splits: arrays [..., splits, groups] and [..., splits].

    `y` and `x` are numerators and denominators by group of sticky keys, `y_blocks` and `x_blocks`
    by block of time (the same blocks in both arms); `yy`, `xy` and `xx` are sums of products over
    single requests.
    """

    y: np.ndarray
    x: np.ndarray
    y_blocks: np.ndarray
    x_blocks: np.ndarray
    yy: np.ndarray
    xy: np.ndarray
    xx: np.ndarray


@dataclass(frozen=True)
class Effect:
    """Arrays [...]: the effect with its always-valid bounds; NaN where nothing can be said.

    On the scale of the metric's transform (log for acceptance length and latencies). `control` is
    the control arm's level on that scale, averaged over splits like the effect. `units` and
    `blocks` are the effective numbers of units and of blocks of time of the smaller arm.
    """

    value: np.ndarray
    half_width: np.ndarray
    control: np.ndarray
    units: np.ndarray
    blocks: np.ndarray


def effective_number(sizes: np.ndarray) -> np.ndarray:
    """Kish's effective number of units: (sum)^2 / sum of squares over the last axis; 0 if empty."""
    return sizes.sum(-1) ** 2 / np.maximum((sizes**2).sum(-1), _TINY)


def boundary(variance: np.ndarray, *, rho: float, alpha: float) -> np.ndarray:
    """What |S| exceeds at any time with a chance of at most alpha, S having this variance."""
    total = variance + rho
    return np.sqrt(total * np.log(total / (rho * alpha**2)))


def small_sample_factor(variance: np.ndarray, degrees: np.ndarray, *, rho: float, alpha: float):
    """By what to multiply a variance that was estimated with so many degrees of freedom."""
    total = variance + rho
    level = np.sqrt(np.log(total / (rho * alpha**2)))
    quantile = -stdtrit(np.maximum(degrees, 0.5), ndtr(-level))
    return (quantile / level) ** 2


def sub_gaussian_factor(share: np.ndarray) -> np.ndarray:
    """Variance factor of a coin toss with this chance, less its mean (Kearns and Saul)."""
    share = np.clip(share, 1e-12, 1 - 1e-12)
    apart = np.abs(share - 0.5) > 1e-6
    safe = np.where(apart, share, 0.25)
    return np.where(apart, (1 - 2 * safe) / (2 * np.log((1 - safe) / safe)), 0.25)


def effect(
    control: Sums, treatment: Sums, *, rho: float, alpha: float,
    shifted_log: bool = False, coin: bool = False,
) -> Effect:  # fmt: skip
    """The effect of the treatment, valid whenever it is looked at.

    Args:
        control: over the same splits as `treatment`, in the same order.
        treatment: its sums.
        rho: where the boundary is tightest (see above).
        alpha: chance of the true effect ever lying outside the bounds.
        shifted_log: whether levels are log(1 + y / x) (acceptance length), else y / x.
        coin: whether y counts rare events, one a request at most (failures).
    """
    units = [effective_number(arm.x) for arm in (control, treatment)]
    used = np.minimum(*units) >= MIN_UNITS_PER_SPLIT
    levels, unit_parts, block_parts, singles = [], [], [], []
    sizes = [np.where(used, arm.x.sum(-1), 0.0) for arm in (control, treatment)]
    weight = sizes[0] * sizes[1] / np.maximum(sizes[0] + sizes[1], _TINY)
    for arm, size, count in zip((control, treatment), sizes, units, strict=True):
        safe = np.maximum(size, _TINY)
        ratio = np.where(used, arm.y.sum(-1) / safe, 0.0)
        levels.append(np.log1p(ratio) if shifted_log else ratio)
        scale = weight / safe / (1 + ratio if shifted_log else 1.0)
        # Residuals from an estimated ratio are a little too small.
        scale = scale * np.sqrt(count / np.maximum(count - 1, 0.5))
        unit_parts.append(scale[..., None] * (arm.y - ratio[..., None] * arm.x))
        block_parts.append(scale[..., None] * (arm.y_blocks - ratio[..., None] * arm.x_blocks))
        spread = arm.yy - 2 * ratio * arm.xy + ratio**2 * arm.xx
        singles.append(scale**2 * np.maximum(spread, 0.0))
    total = weight.sum(-1)
    # A key that changed arms between splits is in the same group in both.
    by_unit = ((unit_parts[1] - unit_parts[0]).sum(-2) ** 2).sum(-1)
    by_block = ((block_parts[1] - block_parts[0]).sum(-2) ** 2).sum(-1)
    joint = np.maximum(by_unit + by_block - (singles[0] + singles[1]).sum(-1), 0.0)
    smaller, smaller_blocks = (
        np.minimum(*(effective_number((x * used[..., None]).sum(-2)) for x in pair))
        for pair in ((control.x, treatment.x), (control.x_blocks, treatment.x_blocks))
    )
    variance = np.maximum(*(
        part * small_sample_factor(part, number - 1, rho=rho, alpha=alpha)
        for part, number in ((by_unit, smaller), (joint, smaller_blocks))
    ))  # fmt: skip
    if coin:
        share = sizes[1] / np.maximum(sizes[0] + sizes[1], _TINY)
        events = np.where(used, control.y.sum(-1) + treatment.y.sum(-1), 0.0)
        variance = np.maximum(variance, (events * sub_gaussian_factor(share)).sum(-1))
    nothing = total <= 0
    safe_total = np.where(nothing, np.nan, total)
    return Effect(
        value=(weight * (levels[1] - levels[0])).sum(-1) / safe_total,
        half_width=boundary(variance, rho=rho, alpha=alpha) / safe_total,
        control=(weight * levels[0]).sum(-1) / safe_total,
        units=np.where(nothing, 0.0, smaller),
        blocks=np.where(nothing, 0.0, smaller_blocks),
    )
