"""Bench a running endpoint: the same prompts on every arm, at a fixed client concurrency.

The loop is closed: `concurrency` clients send a prompt each (the first user turn of its row), and
the next when they have their answer. Prompts go out in blocks; each block is answered by every arm,
one after the other, in an order drawn anew (see `bench.workload`). An arm is measured alone, as it
would run alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from math import nan
from pathlib import Path
from typing import Any

import aiohttp
import httpx
from pydantic import Field

from carryover.bench import counters
from carryover.bench.arms import choose_baseline, find_arms
from carryover.bench.client import Response, Sampling, ask, closed_loop, open_session
from carryover.bench.statistics import share_of_wall
from carryover.bench.summary import (
    ArmSummary,
    Comparison,
    Request,
    compare_arms,
    summarise_arm,
    write_requests,
)
from carryover.bench.workload import Block, count_categories, make_blocks, select_prompts
from carryover.config import Config
from carryover.data.prompts import Prompt, read_prompts
from carryover.errors import ServingError
from carryover.tracking import Run, Tracker

EXPERIMENT = "bench"
# Sent before anything is measured; not among any workload's prompts, so they warm no prefix.
WARMUP_TEXTS = (
    "Warm-up. Write three sentences about the sea.",
    "Warm-up. Count from one to twenty in words.",
    "Warm-up. Explain in one paragraph what a river is.",
)
WARMUP_TOKENS = 32

logger = logging.getLogger(__name__)

Progress = Callable[[int, int, str], None]


class OnlineConfig(Config):
    """Settings of an online bench."""

    url: str = Field(
        default="http://127.0.0.1:8000", description="of the endpoint, with or without /v1"
    )
    arms: list[str] | None = Field(default=None, description="model ids; null takes every arm")
    baseline: str | None = Field(
        default=None, description="arm that others are divided by; null: the autoregressive one"
    )
    prompts: str = Field(description="JSON lines, Parquet, folder, or Hugging Face data set")
    num_prompts: int | None = Field(default=None, ge=1, description="null takes all")
    concurrency: int = Field(default=1, ge=1, description="requests in flight")
    max_tokens: int = Field(default=128, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    ignore_eos: bool = Field(default=False, description="generate max_tokens always")
    block_size: int | None = Field(
        default=None, ge=1, description="prompts per block; null: 4 per client, at least 8"
    )
    num_warmup: int | None = Field(
        default=None, ge=0, description="requests per arm that are not measured; null: 1 per client"
    )
    request_timeout_s: float = Field(default=600.0, gt=0)
    max_failure_share: float = Field(
        default=0.02, ge=0, le=1, description="the run fails when more of an arm's requests fail"
    )
    metrics_url: str | None = Field(
        default=None, description="page with vLLM's counters, to check acceptance against"
    )
    seed: int = Field(default=0, description="of the choice and order of prompts and arms")
    out: Path = Field(default=Path("runs/bench"), description="folder for the results")

    @property
    def base_url(self) -> str:
        """The endpoint without `/v1`."""
        return self.url.rstrip("/").removesuffix("/v1").rstrip("/")


@dataclass(frozen=True)
class BenchResult:
    """What a bench found.

    Attributes:
        config: its settings.
        engine: engine settings of each arm, as far as the endpoint tells.
        summaries: by arm, in the endpoint's order.
        comparisons: by arm, without the baseline itself.
        baseline: the arm that others are divided by; None with one arm.
        requests: every request that was measured.
        counters: vLLM's own counts during the bench, by arm; None if they were not read.
        counters_agree: whether they are those of the responses; None if they were not read.
        folder: where the rows and the summary were written.
        run_id: of the MLflow parent run; None if nothing was recorded.
    """

    config: OnlineConfig
    engine: dict[str, dict[str, Any]]
    summaries: dict[str, ArmSummary]
    comparisons: dict[str, Comparison]
    baseline: str | None
    requests: list[Request]
    counters: counters.Counters | None
    counters_agree: bool | None
    folder: Path
    run_id: str | None = None


def run(
    config: OnlineConfig, *, tracker: Tracker | None = None, on_progress: Progress | None = None
) -> BenchResult:
    """Measure the arms of an endpoint.

    Args:
        config: what to measure.
        tracker: where to record it: a parent run and a child per arm; None records nothing.
        on_progress: called after every request with requests done, requests in all, and the arm.

    Raises:
        ConfigError: unknown arms, or settings of the arms that differ beyond the drafter.
        DataError: the prompts cannot be read.
        ServingError: the endpoint does not answer, or too many requests failed.
    """
    prompts = select_prompts(read_prompts(config.prompts), config.num_prompts, seed=config.seed)
    arms = find_arms(config.base_url, wanted=config.arms, baseline=config.baseline)
    folder = config.out / datetime.now().strftime("%Y%m%d-%H%M%S-%f-online")
    if tracker is None:
        result = _measure(config, arms, prompts, folder, on_progress)
        _check_failures(result)
        return result
    name = f"online c={config.concurrency} T={config.temperature:g}"
    tags = {"carryover.bench": "online", "carryover.url": config.base_url}
    with tracker.run(experiment=EXPERIMENT, name=name, tags=tags) as parent:
        parent.log_params(config.model_dump(mode="json"))
        parent.log_dict(count_categories(prompts), "categories.json")
        result = _measure(config, arms, prompts, folder, on_progress, run_id=parent.id)
        _record(result, parent)
        _check_failures(result)
    return result


def _measure(
    config: OnlineConfig,
    arms: dict[str, dict[str, Any]],
    prompts: Sequence[Prompt],
    folder: Path,
    on_progress: Progress | None,
    *,
    run_id: str | None = None,
) -> BenchResult:
    window = _open_window(config.metrics_url)
    requests, measured_s = asyncio.run(_send_all(config, list(arms), prompts, on_progress, window))
    by_arm = {arm: [r for r in requests if r.arm == arm] for arm in arms}
    summaries = {arm: summarise_arm(arm, by_arm[arm], measured_s=measured_s[arm]) for arm in arms}
    baseline = choose_baseline(arms, given=config.baseline)
    comparisons = {
        arm: compare_arms(by_arm[arm], by_arm[baseline], same_text=config.temperature == 0)
        for arm in arms
        if baseline is not None and arm != baseline
    }
    counted, agree = None, None
    if window is not None:
        counted = window.end({arm: summary.num_drafts for arm, summary in summaries.items()})
        agree = _agree(counted, summaries)
    write_requests(requests, folder / "requests.parquet")
    engine = {arm: about.get("engine", {}) for arm, about in arms.items()}
    return BenchResult(
        config, engine, summaries, comparisons, baseline, requests, counted, agree, folder, run_id
    )


async def _send_all(
    config: OnlineConfig,
    arms: list[str],
    prompts: Sequence[Prompt],
    on_progress: Progress | None,
    window: counters.Window | None,
) -> tuple[list[Request], dict[str, float]]:
    """Warm every arm up, then measure block by block."""
    sampling = Sampling(config.max_tokens, config.temperature, config.ignore_eos)
    size = config.block_size or max(8, 4 * config.concurrency)
    blocks = make_blocks(prompts, arms, block_size=size, seed=config.seed)
    total, done = len(prompts) * len(arms), 0
    measured_s = dict.fromkeys(arms, 0.0)
    requests: list[Request] = []

    def advance(arm: str) -> None:
        nonlocal done
        done += 1
        if on_progress is not None:
            on_progress(done, total, arm)

    async with open_session(timeout_s=config.request_timeout_s) as session:
        warmed = {arm: await _warm_up(session, config, arm) for arm in arms}
        if window is not None:
            await asyncio.to_thread(window.begin, warmed)
        for block in blocks:
            for arm in block.arms:
                found, wall_s = await _send_block(
                    session, config, block, arm, sampling, partial(advance, arm)
                )
                requests += found
                measured_s[arm] += wall_s
    return requests, measured_s


async def _send_block(
    session: aiohttp.ClientSession,
    config: OnlineConfig,
    block: Block,
    arm: str,
    sampling: Sampling,
    advance: Callable[[], None],
) -> tuple[list[Request], float]:
    responses: dict[int, Response] = {}

    async def send(prompt: Prompt) -> None:
        responses[prompt.id] = await ask(
            session, config.base_url, model=arm, messages=prompt.messages(), sampling=sampling
        )
        advance()

    wall_s = await closed_loop(
        [partial(send, prompt) for prompt in block.prompts], concurrency=config.concurrency
    )
    whole = [prompt.id for prompt in block.prompts if responses[prompt.id].error is None]
    shares = share_of_wall([responses[number].latency_s for number in whole], wall_s)
    walls = dict(zip(whole, shares, strict=True))
    found = [
        Request(
            arm=arm, prompt_id=prompt.id, category=prompt.category, source=prompt.source,
            block=block.number, wall_s=walls.get(prompt.id, nan), response=responses[prompt.id],
        )
        for prompt in block.prompts
    ]  # fmt: skip
    return found, wall_s


async def _warm_up(session: aiohttp.ClientSession, config: OnlineConfig, arm: str) -> int:
    """Let an arm answer a few requests that are not measured; returns the rounds they took.

    Raises:
        ServingError: none of them is answered.
    """
    count = config.concurrency if config.num_warmup is None else config.num_warmup
    responses: list[Response] = []

    async def send(text: str) -> None:
        message = [{"role": "user", "content": text}]
        sampling = Sampling(min(WARMUP_TOKENS, config.max_tokens), config.temperature)
        responses.append(
            await ask(session, config.base_url, model=arm, messages=message, sampling=sampling)
        )

    texts = [f"{WARMUP_TEXTS[n % len(WARMUP_TEXTS)]} ({n})" for n in range(count)]
    await closed_loop([partial(send, text) for text in texts], concurrency=config.concurrency)
    if responses and all(response.error for response in responses):
        raise ServingError(f"arm {arm!r} answers no request: {responses[0].error}")
    return sum(response.num_drafts for response in responses)


def _open_window(url: str | None) -> counters.Window | None:
    if url is None:
        return None
    try:
        return counters.Window(url)
    except httpx.HTTPError as error:
        logger.warning("vLLM's counters at %s cannot be read (%s); going on without", url, error)
        return None


def _agree(counted: counters.Counters, summaries: Mapping[str, ArmSummary]) -> bool:
    """Whether the engines counted the rounds and acceptances that the responses told of."""
    return all(
        counted.get(arm, {}).get("num_drafts", 0) == summary.num_drafts
        and counted.get(arm, {}).get("num_accepted_tokens", 0) == summary.num_accepted_tokens
        for arm, summary in summaries.items()
        if not summary.failed
    )


def _record(result: BenchResult, parent: Run) -> None:
    """Write the result into the parent run, and a child run per arm."""
    if result.counters_agree is not None:
        parent.set_tags({"carryover.counters_agree": result.counters_agree})
        parent.log_dict(result.counters, "counters.json")
    parent.log_file(result.folder / "requests.parquet")
    for arm, summary in result.summaries.items():
        with parent.child(arm, tags={"carryover.arm": arm}) as child:
            child.log_params(
                {
                    "arm": arm,
                    "concurrency": result.config.concurrency,
                    "temperature": result.config.temperature,
                    "max_tokens": result.config.max_tokens,
                    "engine": result.engine[arm],
                }
            )
            child.log_metrics(summary.metrics())
            if arm in result.comparisons:
                child.set_tags({"carryover.baseline": result.baseline})
                child.log_metrics(result.comparisons[arm].metrics())


def _check_failures(result: BenchResult) -> None:
    for arm, summary in result.summaries.items():
        share = summary.failed / summary.requests
        if share > result.config.max_failure_share:
            errors = [r.response.error for r in result.requests if r.arm == arm and not r.ok]
            raise ServingError(
                f"arm {arm!r}: {summary.failed} of {summary.requests} requests failed, more than "
                f"the {result.config.max_failure_share:.0%} allowed; the first: {errors[0]}\n"
                f"all are in {result.folder / 'requests.parquet'}"
            )
