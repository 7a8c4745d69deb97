"""Bench vLLM engines of our own: one request at a time, every arm a checkpoint folder.

The arms' engines stand side by side, each in a process of its own, and take turns block by block
(see `bench.workload`); the ones that wait sleep. Where they do not fit into memory together, one
engine runs at a time: each arm then measures its blocks in a few turns, in an order reversed from
turn to turn, and the result says so.

A request's time is that of the engine alone: rendering the prompt and emptying the prefix cache
happen between requests. So these figures are never averaged with those of a server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import Field

from carryover.bench.arms import check_roles
from carryover.bench.ledger import load_settings
from carryover.bench.measure import Progress
from carryover.bench.offline_engines import OfflineBackend
from carryover.bench.records import Condition
from carryover.bench.result import BenchResult
from carryover.bench.session import Bench, run_bench
from carryover.bench.sets import read_workload
from carryover.bench.settings import BenchConfig
from carryover.bench.workload import select_prompts
from carryover.data.prompts import Prompt
from carryover.data.regeneration import render_chat
from carryover.engine import (
    GIB,
    EngineConfig,
    cpu_kv_cache_bytes,
    drafter_config,
    free_memory,
)
from carryover.errors import ConfigError
from carryover.runtime import has_gpu
from carryover.serving.config import Arm, ServeConfig, check_drafters, check_target
from carryover.targets import EMBEDDED, Target, resolve
from carryover.tracking import Tracker

__all__ = ["OfflineConfig", "run"]


class OfflineConfig(BenchConfig):
    """Settings of an offline bench."""

    target: str = Field(default=EMBEDDED, description="'embedded', a folder, or a hub name")
    arms: list[Arm] = Field(
        default=[Arm(name="autoregressive")], min_length=1,
        description="name, and drafter (checkpoint folder) unless it decodes autoregressively",
    )  # fmt: skip
    engine: EngineConfig = Field(
        default=EngineConfig(max_num_seqs=1), description="of every arm's engine"
    )
    engines_at_once: int | None = Field(
        default=None, ge=1, description="null: all arms on CPU if they fit into memory, else 1; "
        "on a GPU 1. More than 1 shares the GPU's memory out between them",
    )  # fmt: skip
    turns: int = Field(
        default=2, ge=1, description="turns of each arm where one engine runs at a time"
    )

    @property
    def conditions(self) -> list[Condition]:
        """One for each temperature."""
        return [Condition("offline", degree, concurrency=1) for degree in self.temperature]


def run(
    config: OfflineConfig | None = None,
    *,
    tracker: Tracker | None = None,
    on_progress: Progress | None = None,
    on_partial: Callable[[BenchResult], None] | None = None,
    resume: Path | None = None,
) -> BenchResult:
    """Measure arms in engines of our own.

    Start the process with `carryover.runtime.engine_environment()` and under the guardian, as the
    command does.

    Args:
        config: what to measure; None with `resume`.
        tracker: where to record it: a parent run and a child for each arm and condition; None
            records nothing.
        on_progress: called after every request with requests done, requests in all, and the arm.
        on_partial: given what is finished when Ctrl-C or an error ends the bench.
        resume: folder of a bench that was cut short, to go on with under its own settings.

    Raises:
        ConfigError: a drafter is missing or does not fit the target, or more prompts than may
            fail are too long for the engines.
        DataError: the prompts cannot be read.
        TargetError: there is no such target.
        ServingError: an engine does not start or dies, or too many requests failed.
    """
    if config is None:
        if resume is None:
            raise ConfigError("an offline bench needs settings, or a folder to resume")
        config = load_settings(resume, OfflineConfig)
    target = resolve(config.target)
    config, arms = _describe(config, target)
    check_roles(arms, reference=config.reference, baseline=config.baseline)
    prompts = read_workload(config.prompts, folder=config.prompts_folder)
    if resume is None:
        chosen = select_prompts(prompts, config.num_prompts, seed=config.seed)
        _check_lengths(config, target, chosen)
    bench = Bench(
        config=config,
        mode="offline",
        arms=arms,
        prompts=prompts,
        conditions=config.conditions,
        connect=lambda folder: _connected(config, target, folder),
    )
    return run_bench(
        bench, tracker=tracker, on_progress=on_progress, on_partial=on_partial, resume=resume
    )


@contextmanager
def _connected(config: OfflineConfig, target: Target, folder: Path) -> Iterator[OfflineBackend]:
    backend = OfflineBackend(config, target, folder)
    try:
        yield backend
    finally:
        backend.close()


def _describe(
    config: OfflineConfig, target: Target
) -> tuple[OfflineConfig, dict[str, dict[str, Any]]]:
    """Check drafters as the server does, settle what is open, and describe the arms."""
    served = check_drafters(
        ServeConfig(
            name="offline", model="offline-bench", target=config.target, engine=config.engine,
            arms=config.arms,
        )
    )  # fmt: skip
    check_target(served, target)
    gpu = has_gpu()
    engine = config.engine
    if not gpu and engine.kv_cache_gib is None:
        # the same for all arms, whatever each would take for itself
        size = cpu_kv_cache_bytes(
            target.load_config(), engine,
            dtype="float32" if engine.dtype == "auto" else engine.dtype,
            free_bytes=free_memory() // len(config.arms), speculative=True,
        )  # fmt: skip
        engine = engine.model_copy(update={"kv_cache_gib": size / GIB})
    at_once = config.engines_at_once or (1 if gpu else None)
    if gpu and at_once > 1:
        share = engine.gpu_memory_utilization / at_once
        engine = engine.model_copy(update={"gpu_memory_utilization": share})
    resolved = config.model_copy(
        update={"engine": engine, "arms": served.arms, "engines_at_once": at_once}
    )
    dtype = "float32" if engine.dtype == "auto" and not gpu else engine.dtype
    arms = {
        arm.name: {
            "target": config.target,
            "drafter": None if arm.drafter is None else str(arm.drafter),
            "num_speculative_tokens": arm.num_speculative_tokens,
            "method": _method(arm),
            # sized by what is free just now, and of no influence on one request at a time
            "engine": engine.model_dump(mode="json", exclude={"kv_cache_gib"}),
            "dtype": dtype,
        }
        for arm in served.arms
    }
    return resolved, arms


def _check_lengths(config: OfflineConfig, target: Target, prompts: Sequence[Prompt]) -> None:
    """Refuse before an engine starts what would fail after all is measured."""
    tokenizer, room = target.load_tokenizer(), config.engine.max_model_len
    thinking = {} if config.thinking is None else {"enable_thinking": config.thinking}
    lengths = [len(render_chat(tokenizer, prompt.messages(), **thinking)) for prompt in prompts]
    too_long = sum(length >= room for length in lengths)
    if too_long > config.max_failure_share * len(prompts):
        raise ConfigError(
            f"{too_long} of {len(prompts)} prompts do not fit into engine.max_model_len {room}, "
            f"more than the {config.max_failure_share:.0%} of requests that may fail; the longest "
            f"has {max(lengths):,} tokens, and an answer takes {config.max_tokens}. Set "
            f"engine.max_model_len={max(lengths) + config.max_tokens}, leave those prompts out, or "
            "raise max_failure_share"
        )


def _method(arm: Arm) -> str | None:
    if arm.drafter is None:
        return None
    proposals = arm.num_speculative_tokens
    return drafter_config(arm.drafter, num_speculative_tokens=proposals)["method"]
