"""Responses of a target to prompts, with vLLM on Ray: `platform data regenerate`."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from carryover.data.prompts import read_prompt_sources
from carryover.data.regeneration import Counts, RegenerateConfig, Regeneration, expected_length
from carryover.data.responses import open_responses
from carryover.engine_worker import Request
from carryover.errors import EnvironmentProblem
from carryover.provenance import package_versions
from carryover.targets import resolve
from jobs.engine_pool import EnginePool, drain, engines_for

WARM_UP_S = 10.0
# Token ids are int32; Parquet makes them smaller.
_BYTES_PER_TOKEN = 4
_BYTES_PER_ROW = 64


@dataclass(frozen=True)
class Estimate:
    """What is still to come, from a measured warm-up.

    Attributes:
        rows: responses to come.
        tokens_per_response: expected length.
        tokens_per_s: generated per second by all engines.
        seconds: time left.
        disk_bytes: size of the rows to come, at most.
        free_bytes: space left where they go.
    """

    rows: int
    tokens_per_response: float
    tokens_per_s: float
    seconds: float
    disk_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class RegenerationProgress:
    """How far a regeneration is; `seconds_left` is None before the warm-up ends."""

    rows: int
    total: int
    tokens_per_s: float
    seconds_left: float | None


@dataclass(frozen=True)
class RegenerationSummary:
    """What a regeneration did.

    Attributes:
        path: folder with the responses.
        rows: responses in it.
        counts: what became of the prompts in this run.
        seconds: time of generating, without starting engines.
        tokens_per_s: generated tokens over that time.
        restarts: engines that died and were replaced.
        first_refusal: why the engine refused a request, if it did.
    """

    path: str
    rows: int
    counts: Counts
    seconds: float
    tokens_per_s: float
    restarts: int
    first_refusal: str


def regenerate(
    config: RegenerateConfig,
    *,
    pool: EnginePool | None = None,
    report: Callable[[str | Estimate | RegenerationProgress], None] = lambda event: None,
) -> RegenerationSummary:
    """Fill `config.out` with responses; rows that are there already are kept and not asked again.

    Args:
        config: settings.
        pool: started engines of the same target to use; None starts and stops them here.
        report: called with remarks, once with the estimate, and about every second with the
            progress.

    Raises:
        DataError: prompts cannot be read, or the folder was made with another target, other
            settings or other prompts.
        EnvironmentProblem: the disk will be full before the end.
    """
    target = resolve(config.target)
    prompts = read_prompt_sources(config.prompts)
    tokenizer = target.load_tokenizer()
    store = open_responses(
        config.out,
        target=target.identity(),
        sampling=config.sampling(),
        details={"versions": package_versions()},
    )
    with store:
        work = Regeneration(config, prompts, tokenizer, store)
        report(_describe(config, work))
        requests = work.requests()
        first = next(requests, None)
        if first is None:
            return _summary(config, work, seconds=0.0, generated=0, restarts=0)
        with engines_for(
            target, config.engine, config.pool, borrowed=pool, report=report
        ) as engines:
            store.metadata["engine"] = engines.details
            return _run(config, work, chain([first], requests), engines, report)


def _run(
    config: RegenerateConfig,
    work: Regeneration,
    requests: Iterable[Request],
    engines: EnginePool,
    report: Callable[[str | Estimate | RegenerationProgress], None],
) -> RegenerationSummary:
    start, before, restarts = time.monotonic(), engines.generated_tokens, engines.restarts
    limit, estimated = config.max_new_tokens, False
    for _ in drain(engines, requests, work.handle):
        counts = work.counts
        generated = engines.generated_tokens - before
        stopped = counts.done - counts.cut
        expected = expected_length(limit=limit, stopped=stopped, generated=generated)
        # What is being written goes on from its age; the chance of ending is taken as constant.
        running = min(engines.in_flight, work.left)
        age = engines.pending_tokens / max(1, running)
        rest = expected_length(limit=limit - age, stopped=stopped, generated=generated)
        tokens_left = (work.left - running) * expected + running * rest
        speed = engines.tokens_per_s
        warm = speed > 0 and (estimated or engines.measured_s >= WARM_UP_S)
        seconds_left = tokens_left / speed if warm else None
        if warm and not estimated:
            estimated = True
            estimate = Estimate(
                rows=work.left,
                tokens_per_response=expected,
                tokens_per_s=speed,
                seconds=tokens_left / speed,
                disk_bytes=_disk_bytes(work, expected),
                free_bytes=shutil.disk_usage(config.out).free,
            )
            report(estimate)
            _check_disk(estimate, config.out)
        report(RegenerationProgress(counts.stored + counts.done, work.total, speed, seconds_left))
    return _summary(
        config,
        work,
        seconds=time.monotonic() - start,
        generated=engines.generated_tokens - before,
        restarts=engines.restarts - restarts,
    )


def _disk_bytes(work: Regeneration, expected: float) -> int:
    tokens = work.mean_prompt_tokens + expected
    return int(work.left * (_BYTES_PER_TOKEN * tokens + _BYTES_PER_ROW))


def _check_disk(estimate: Estimate, out: str) -> None:
    if estimate.disk_bytes > estimate.free_bytes:
        raise EnvironmentProblem(
            f"the responses need about {estimate.disk_bytes / 1e9:.1f} GB and {out} has "
            f"{estimate.free_bytes / 1e9:.1f} GB free; rows so far are kept: free some space and "
            "run again, or name another folder"
        )


def _describe(config: RegenerateConfig, work: Regeneration) -> str:
    counts = work.counts
    parts = [f"{work.total:,} responses wanted"]
    if counts.stored:
        parts.append(f"{counts.stored:,} of them in {config.out} already")
    if counts.excluded:
        parts.append(f"{counts.excluded:,} prompts left out because they are excluded")
    return "; ".join(parts)


def _summary(
    config: RegenerateConfig, work: Regeneration, *, seconds: float, generated: int, restarts: int
) -> RegenerationSummary:
    return RegenerationSummary(
        path=str(Path(config.out)),
        rows=work.counts.stored + work.counts.done,
        counts=work.counts,
        seconds=seconds,
        tokens_per_s=generated / seconds if seconds else 0.0,
        restarts=restarts,
        first_refusal=work.first_refusal,
    )
