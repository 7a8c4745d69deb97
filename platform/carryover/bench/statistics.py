"""Figures of a bench from its requests. Pure: numbers in, numbers out.

Definitions, once:

- **TTFT**: from sending a request to its first token.
- **TPOT**: (last token's time - first token's time) / (output tokens - 1), for requests with at
  least two. Not the time between chunks: a speculative round's chunk carries several tokens.
- **end to end**: from sending a request to its last token.
- **output tokens/s**: all output tokens / all time in which the arm was being measured.
- **acceptance length**: 1 + accepted proposals / rounds, both summed over all requests (a micro
  average over rounds): the tokens that one verification yields.
- **acceptance rate at position k**: share of rounds that accepted at least k proposals. They never
  rise with k, and their sum is the acceptance length - 1.
- **micro average**: sums over all prompts, then one division. **macro average**: the same per set,
  then the plain mean of the sets.
- **interval**: 95%, percentile bootstrap over prompts; of a ratio or difference between arms over
  prompts that both answered, resampled in pairs; of a macro average within each set.
- **goodput**: requests per second of those that met every latency objective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan

import numpy as np
from scipy.stats import bootstrap

LEVEL = 0.95
RESAMPLES = 2000

Statistic = Callable[..., np.ndarray]


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95% interval; the bounds are NaN where fewer than two prompts speak."""

    value: float
    low: float = nan
    high: float = nan

    @property
    def bounded(self) -> bool:
        """Whether there is an interval at all."""
        return isfinite(self.low) and isfinite(self.high)

    @property
    def as_gain(self) -> str:
        """This ratio as a gain in percent, with its interval if there is one: `+6.5% [+1, +9]`."""
        text = f"{100 * (self.value - 1):+.1f}%"
        if self.bounded:
            text += f" [{100 * (self.low - 1):+.1f}, {100 * (self.high - 1):+.1f}]"
        return text


def time_per_output_token(ttft_s: float, latency_s: float, output_tokens: int) -> float | None:
    """TPOT in seconds; None for a response of fewer than two tokens."""
    if output_tokens < 2:
        return None
    return (latency_s - ttft_s) / (output_tokens - 1)


def acceptance_length(num_accepted: int, num_drafts: int) -> float:
    """Mean tokens per round, the correction or bonus token included; NaN without rounds."""
    return 1 + num_accepted / num_drafts if num_drafts else nan


def position_rates(histogram: Sequence[int]) -> list[float]:
    """Acceptance rate at each position from the number of rounds that accepted 0, 1, .. B.

    Args:
        histogram: entry j counts rounds with exactly j accepted; B + 1 entries.

    Returns:
        B rates; empty without rounds.
    """
    counts = np.asarray(histogram, dtype=float)
    if counts.sum() == 0:
        return []
    at_least = counts[::-1].cumsum()[::-1]
    return (at_least[1:] / counts.sum()).tolist()


def pool_histograms(histograms: Sequence[Sequence[int]]) -> list[int]:
    """Sum histograms of possibly different lengths."""
    longest = max(map(len, histograms), default=0)
    pooled = np.zeros(longest, dtype=int)
    for histogram in histograms:
        pooled[: len(histogram)] += np.asarray(histogram, dtype=int)
    return pooled.tolist()


def percentiles(values: Sequence[float], ranks: Sequence[float]) -> list[float]:
    """Percentiles (0..100, linear between neighbours); NaN without values."""
    if len(values) == 0:
        return [nan for _ in ranks]
    return [float(value) for value in np.percentile(np.asarray(values, dtype=float), ranks)]


def share_of_wall(latencies_s: Sequence[float], wall_s: float) -> list[float]:
    """Divide the time in which a block was measured over its requests, by their latencies.

    The shares add up to the wall time, so tokens over shares is the measured throughput, and a
    prompt carries its own part of it when prompts are resampled. At concurrency 1 a share is the
    latency itself but for the client's pauses.
    """
    total = float(np.sum(latencies_s))
    return [latency / total * wall_s for latency in latencies_s] if total else []


def ratio_of_sums(
    numerators: Sequence[float], denominators: Sequence[float], *, seed: int = 0
) -> Interval:
    """sum(numerators) / sum(denominators), with an interval over the pairs.

    Args:
        numerators: one a prompt.
        denominators: one a prompt, in the same order.
        seed: of the resampling.
    """
    return _interval(_ratio, (numerators, denominators), seed)


def ratio_between(
    first: tuple[Sequence[float], Sequence[float]],
    second: tuple[Sequence[float], Sequence[float]],
    *,
    seed: int = 0,
) -> Interval:
    """Ratio of two ratios of sums over the same prompts, with a paired interval.

    Args:
        first: numerators and denominators, one a prompt.
        second: the same of the arm that is divided by, in the same order of prompts.
        seed: of the resampling.
    """
    return _interval(_ratio_of_ratios, (*first, *second), seed)


def difference_between(
    first: tuple[Sequence[float], Sequence[float]],
    second: tuple[Sequence[float], Sequence[float]],
    *,
    seed: int = 0,
) -> Interval:
    """Difference of two ratios of sums over the same prompts, with a paired interval.

    Args:
        first: numerators and denominators, one a prompt.
        second: the same of the arm that is subtracted, in the same order of prompts.
        seed: of the resampling.
    """
    return _interval(_difference_of_ratios, (*first, *second), seed)


def macro_average(
    sets: Sequence[tuple[Sequence[float], ...]], statistic: Statistic, *, seed: int = 0
) -> Interval:
    """Mean over sets of a statistic of each set, with an interval over prompts within the sets.

    Args:
        sets: columns of each set, one value a prompt: what `statistic` takes.
        statistic: `ratio`, or `ratio_of_ratios`.
        seed: of the resampling.
    """
    if not sets:
        return Interval(nan)
    draw = np.random.default_rng(seed)
    values, resampled, small = [], [], False
    with np.errstate(divide="ignore", invalid="ignore"):
        for columns in sets:
            arrays = [np.asarray(column, dtype=float) for column in columns]
            count = len(arrays[0])
            if count == 0:
                return Interval(nan)
            values.append(float(statistic(*(array.sum() for array in arrays))))
            # how often each prompt is drawn: the sums of all resamples are one product
            weights = draw.multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
            resampled.append(statistic(*(weights @ array for array in arrays)))
            small = small or count < 2
    value = float(np.mean(values))
    if small or not isfinite(value):
        return Interval(value if isfinite(value) else nan)
    edge = 50 * (1 - LEVEL)
    low, high = np.percentile(np.mean(resampled, axis=0), (edge, 100 - edge))
    return Interval(value, float(low), float(high))


def ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Statistic of `macro_average`: one sum over another."""
    return numerator / denominator


def ratio_of_ratios(
    first: np.ndarray, per: np.ndarray, second: np.ndarray, per_second: np.ndarray
) -> np.ndarray:
    """Statistic of `macro_average`: one ratio of sums over another."""
    return (first / per) / (second / per_second)


def mean(values: Sequence[float], *, seed: int = 0) -> Interval:
    """Mean with its interval."""
    return _interval(_mean, (values,), seed)


def _interval(statistic, data: tuple[Sequence[float], ...], seed: int) -> Interval:
    samples = tuple(np.asarray(values, dtype=float) for values in data)
    if len({len(sample) for sample in samples}) != 1:
        raise ValueError("samples of a pair must have equal length")
    if len(samples[0]) == 0:
        return Interval(nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(*samples, axis=-1))
        if len(samples[0]) < 2 or not isfinite(value):
            return Interval(nan if value == inf else value)
        found = bootstrap(
            samples, statistic, paired=True, vectorized=True, n_resamples=RESAMPLES,
            confidence_level=LEVEL, method="percentile", rng=np.random.default_rng(seed),
        ).confidence_interval  # fmt: skip
    return Interval(value, float(found.low), float(found.high))


def _mean(values: np.ndarray, axis: int) -> np.ndarray:
    return values.mean(axis=axis)


def _ratio(numerators: np.ndarray, denominators: np.ndarray, axis: int) -> np.ndarray:
    return numerators.sum(axis=axis) / denominators.sum(axis=axis)


def _ratio_of_ratios(
    first: np.ndarray, per: np.ndarray, second: np.ndarray, per_second: np.ndarray, axis: int
) -> np.ndarray:
    return _ratio(first, per, axis) / _ratio(second, per_second, axis)


def _difference_of_ratios(
    first: np.ndarray, per: np.ndarray, second: np.ndarray, per_second: np.ndarray, axis: int
) -> np.ndarray:
    return _ratio(first, per, axis) - _ratio(second, per_second, axis)
