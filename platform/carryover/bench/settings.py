"""Settings that every bench shares."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, PlainSerializer

from carryover.bench.objective import Objective
from carryover.config import Config

Value = TypeVar("Value")


def one_or_many(value: Any) -> Any:
    """Let a list setting be given as its one value."""
    return value if isinstance(value, list | tuple) else [value]


def parse_duration(value: Any) -> Any:
    """Seconds of a duration such as `90`, `90s`, `10m` or `1.5h`; other values as they are."""
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|h)?", value.strip())
    if found is None:
        raise ValueError("a duration is a number with s, m or h behind it, such as 10m")
    return float(found[1]) * {None: 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def shortest(values: tuple[Any, ...]) -> Any:
    """One value as itself, several as a list: as a person would write it."""
    return values[0] if len(values) == 1 else list(values)


Many = Annotated[
    tuple[Value, ...], BeforeValidator(one_or_many), PlainSerializer(shortest, return_type=Any)
]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Duration = Annotated[float, BeforeValidator(parse_duration)]


class BenchConfig(Config):
    """Settings of both kinds of bench."""

    prompts: str = Field(
        description="JSON lines, Parquet, folder, Hugging Face data set, speculator-benchmarks, "
        "or paper-844"
    )
    prompts_folder: Path | None = Field(
        default=None, description="local copy of the sets that a named workload takes from the hub"
    )
    num_prompts: int | None = Field(default=None, ge=1, description="null takes all")
    temperature: Many[NotNegative] = Field(default=(0.0,), min_length=1, description="one or more")
    max_tokens: int = Field(default=128, ge=1)
    ignore_eos: bool = Field(default=False, description="generate max_tokens always")
    thinking: bool | None = Field(
        default=None, description="enable_thinking of the chat template; null: the template's own"
    )
    reference: str | None = Field(
        default=None, description="arm of speed-ups; null: the autoregressive one, or the first"
    )
    baseline: str | None = Field(
        default=None, description="arm of gains; null: `baseline`, or the first with a drafter"
    )
    block_size: int | None = Field(
        default=None,
        ge=1,
        description="prompts per block; null: 4 per client, 20 s of arrivals, at least 8",
    )
    num_warmup: int | None = Field(
        default=None, ge=0, description="requests per arm that are not measured; null: 1 per client"
    )
    max_failure_share: float = Field(
        default=0.02, ge=0, le=1, description="the run fails when more of an arm's requests fail"
    )
    budget_s: Duration | None = Field(
        default=None, gt=0, description="time to spend, as 600 or 10m; takes fewer prompts to fit"
    )
    goodput: Objective | None = Field(default=None, description="what makes a request a good one")
    near_tie_nats: float | None = Field(
        default=None, ge=0,
        description="texts that part where two tokens' log probabilities are this close are a "
        "near-tie; null: 0.01 in float32, 0.25 in 16 bits",
    )  # fmt: skip
    max_ties: int = Field(
        default=32, ge=0, description="differing texts per arm and condition that are looked into"
    )
    report: bool = Field(default=True, description="write report.html and its figures")
    seed: int = Field(default=0, description="of the choice and order of prompts and arms")
    out: Path = Field(default=Path("runs/bench"), description="folder for the results")
