"""From the requests of a bench to figures per arm and comparisons between arms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from carryover.bench import statistics
from carryover.bench.client import Response
from carryover.bench.statistics import Interval

PERCENTILES = (50, 95)


@dataclass(frozen=True)
class Request:
    """One prompt on one arm.

    Attributes:
        arm: which arm answered.
        prompt_id: unique in the workload; the same on every arm.
        category: of the prompt.
        source: of the prompt.
        block: in which block it was sent.
        wall_s: its share of the time in which its block was measured; NaN if it failed.
        response: what came back.
    """

    arm: str
    prompt_id: int
    category: str
    source: str
    block: int
    wall_s: float
    response: Response

    @property
    def ok(self) -> bool:
        """Whether it got a whole response."""
        return self.response.error is None

    @property
    def tpot_s(self) -> float | None:
        """TPOT; None if it failed or has fewer than two tokens."""
        if not self.ok:
            return None
        answer = self.response
        return statistics.time_per_output_token(
            answer.ttft_s, answer.latency_s, answer.output_tokens
        )


@dataclass(frozen=True)
class ArmSummary:
    """Figures of one arm; definitions are those of `bench.statistics`, times in milliseconds.

    Attributes:
        arm: its name.
        requests: sent, failed ones included.
        failed: without a whole response.
        cut: responses that ended at the token limit.
        output_tokens: of all whole responses.
        measured_s: time in which this arm was being measured.
        output_tokens_per_s: throughput.
        ttft_ms: percentiles 50 and 95.
        tpot_ms: percentiles 50 and 95.
        tpot_mean_ms: mean over requests.
        latency_ms: percentiles 50 and 95, end to end.
        acceptance_length: None on an arm without speculation.
        position_rates: acceptance rate at each position; empty without speculation.
        num_drafts: rounds.
        num_draft_tokens: proposals.
        num_accepted_tokens: proposals accepted.
    """

    arm: str
    requests: int
    failed: int
    cut: int
    output_tokens: int
    measured_s: float
    output_tokens_per_s: Interval
    ttft_ms: tuple[float, float]
    tpot_ms: tuple[float, float]
    tpot_mean_ms: Interval
    latency_ms: tuple[float, float]
    acceptance_length: Interval | None
    position_rates: list[float]
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int

    def metrics(self) -> dict[str, float]:
        """Flat figures for MLflow, the same keys for every arm; what is not finite is left out."""
        flat = {
            "requests": self.requests, "failed": self.failed, "cut": self.cut,
            "output_tokens": self.output_tokens, "measured_s": self.measured_s,
            "num_drafts": self.num_drafts, "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
        }  # fmt: skip
        flat |= _flat_interval("output_tokens_per_s", self.output_tokens_per_s)
        flat |= _flat_interval("tpot_mean_ms", self.tpot_mean_ms)
        if self.acceptance_length is not None:
            flat |= _flat_interval("acceptance_length", self.acceptance_length)
        for name in ("ttft_ms", "tpot_ms", "latency_ms"):
            for rank, value in zip(PERCENTILES, getattr(self, name), strict=True):
                flat[f"{name}.p{rank}"] = value
        for position, rate in enumerate(self.position_rates, 1):
            flat[f"acceptance_rate.{position}"] = rate
        return {name: value for name, value in flat.items() if isfinite(value)}


@dataclass(frozen=True)
class Comparison:
    """One arm against the baseline arm, over the prompts that both answered.

    Attributes:
        arm: its name.
        baseline: the arm that it is divided by.
        prompts: how many both answered.
        speedup: ratio of output tokens/s.
        tpot_ratio: ratio of mean TPOT; below 1 is faster.
        differing: prompts whose text differs; None where texts were sampled.
    """

    arm: str
    baseline: str
    prompts: int
    speedup: Interval
    tpot_ratio: Interval
    differing: int | None

    def metrics(self) -> dict[str, float]:
        """Flat figures for MLflow."""
        flat = _flat_interval("speedup", self.speedup)
        flat |= _flat_interval("tpot_ratio", self.tpot_ratio)
        flat["compared_prompts"] = self.prompts
        if self.differing is not None:
            flat["differing_texts"] = self.differing
        return {name: value for name, value in flat.items() if isfinite(value)}


def summarise_arm(arm: str, requests: Sequence[Request], *, measured_s: float) -> ArmSummary:
    """Compute the figures of one arm.

    Args:
        arm: its name.
        requests: its requests, in any order.
        measured_s: time in which it was being measured.
    """
    whole = [request for request in requests if request.ok]
    answers = [request.response for request in whole]
    tokens = [answer.output_tokens for answer in answers]
    tpots_ms = [1000 * value for request in whole if (value := request.tpot_s) is not None]
    drafts = [answer.num_drafts for answer in answers]
    accepted = [answer.num_accepted_tokens for answer in answers]
    length = None
    if sum(drafts):
        pooled = statistics.ratio_of_sums(
            [a + d for a, d in zip(accepted, drafts, strict=True)], drafts
        )
        length = pooled
    return ArmSummary(
        arm=arm,
        requests=len(requests),
        failed=len(requests) - len(whole),
        cut=sum(answer.finish == "length" for answer in answers),
        output_tokens=sum(tokens),
        measured_s=measured_s,
        output_tokens_per_s=statistics.ratio_of_sums(tokens, [r.wall_s for r in whole]),
        ttft_ms=_milliseconds([answer.ttft_s for answer in answers]),
        tpot_ms=tuple(statistics.percentiles(tpots_ms, PERCENTILES)),
        tpot_mean_ms=statistics.mean(tpots_ms),
        latency_ms=_milliseconds([answer.latency_s for answer in answers]),
        acceptance_length=length,
        position_rates=statistics.position_rates(
            statistics.pool_histograms([answer.accepted_histogram for answer in answers])
        ),
        num_drafts=sum(drafts),
        num_draft_tokens=sum(answer.num_draft_tokens for answer in answers),
        num_accepted_tokens=sum(accepted),
    )


def compare_arms(
    arm: Sequence[Request], baseline: Sequence[Request], *, same_text: bool
) -> Comparison:
    """Compare an arm with the baseline arm over the prompts that both answered.

    Args:
        arm: requests of the arm.
        baseline: requests of the baseline arm.
        same_text: whether equal texts are expected (temperature 0), so that they are compared.
    """
    by_prompt = {request.prompt_id: request for request in baseline if request.ok}
    pairs = [
        (request, by_prompt[request.prompt_id])
        for request in arm
        if request.ok and request.prompt_id in by_prompt
    ]
    timed = [
        (ours, theirs)
        for ours, theirs in pairs
        if ours.tpot_s is not None and theirs.tpot_s is not None
    ]
    ones = [1.0] * len(timed)
    return Comparison(
        arm=arm[0].arm,
        baseline=baseline[0].arm,
        prompts=len(pairs),
        speedup=statistics.ratio_between(
            _throughput(o for o, _ in pairs), _throughput(t for _, t in pairs)
        ),
        tpot_ratio=statistics.ratio_between(
            ([ours.tpot_s for ours, _ in timed], ones),
            ([theirs.tpot_s for _, theirs in timed], ones),
        ),
        differing=sum(o.response.text != t.response.text for o, t in pairs) if same_text else None,
    )


def write_requests(requests: Sequence[Request], path: Path) -> None:
    """Write one row per request, failed ones included, as Parquet."""
    rows = []
    for request in requests:
        values = asdict(request)
        answer = values.pop("response")
        rows.append({**values, "tpot_s": request.tpot_s, **answer})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=REQUESTS), path)


REQUESTS = pa.schema(
    [
        pa.field("arm", pa.string(), nullable=False),
        pa.field("prompt_id", pa.int64(), nullable=False),
        pa.field("category", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("block", pa.int32(), nullable=False),
        ("wall_s", pa.float64()),
        ("started_s", pa.float64()),
        ("ttft_s", pa.float64()),
        ("latency_s", pa.float64()),
        ("tpot_s", pa.float64()),
        ("prompt_tokens", pa.int32()),
        ("output_tokens", pa.int32()),
        ("finish", pa.string()),
        ("text", pa.string()),
        ("num_drafts", pa.int32()),
        ("num_draft_tokens", pa.int32()),
        ("num_accepted_tokens", pa.int32()),
        ("accepted_histogram", pa.list_(pa.int32())),
        ("status", pa.int32()),
        ("error", pa.string()),
    ]
)


def _throughput(requests) -> tuple[list[float], list[float]]:
    requests = list(requests)
    return [r.response.output_tokens for r in requests], [r.wall_s for r in requests]


def _milliseconds(seconds: Sequence[float]) -> tuple[float, float]:
    return tuple(statistics.percentiles([1000 * value for value in seconds], PERCENTILES))


def _flat_interval(name: str, interval: Interval) -> Mapping[str, float]:
    return {name: interval.value, f"{name}.low": interval.low, f"{name}.high": interval.high}
