"""A running endpoint as `bench.measure` sees it: warmed up, asked at a load, counted."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import aiohttp
import httpx

from carryover.bench import counters
from carryover.bench.client import (
    Choice,
    Response,
    Sampling,
    ask,
    ask_choices,
    closed_loop,
    open_loop,
    open_session,
)
from carryover.bench.ledger import Ledger
from carryover.bench.measure import Answers
from carryover.bench.records import Condition
from carryover.bench.workload import Unit, poisson_arrivals
from carryover.data.prompts import Prompt
from carryover.errors import ServingError

if TYPE_CHECKING:
    from carryover.bench.online import OnlineConfig

# Sent before anything is measured; not among any workload's prompts, so they warm no prefix.
WARMUP_TEXTS = (
    "Warm-up. Write three sentences about the sea.",
    "Warm-up. Count from one to twenty in words.",
    "Warm-up. Explain in one paragraph what a river is.",
)
WARMUP_TOKENS = 32

logger = logging.getLogger(__name__)


@contextmanager
def connected(config: OnlineConfig) -> Iterator[OnlineBackend]:
    """An endpoint, ready to be measured, until the end of the block."""
    with asyncio.Runner() as runner:
        session = runner.run(_open_session(config))
        try:
            yield OnlineBackend(config, runner, session)
        finally:
            runner.run(session.close())


async def _open_session(config: OnlineConfig) -> aiohttp.ClientSession:
    return open_session(timeout_s=config.request_timeout_s)


class OnlineBackend:
    """An endpoint, seen by `bench.measure`."""

    def __init__(
        self, config: OnlineConfig, runner: asyncio.Runner, session: aiohttp.ClientSession
    ) -> None:
        self._config, self._runner, self._session = config, runner, session
        self._window = _open_window(config)
        self._warmed: set[str] = set()
        self._before: dict[str, int] = {}
        self._told: dict[str, int] = {}
        self._began = False
        self._sent = 0

    def prepare(self, arms: Sequence[str], conditions: Sequence[Condition]) -> None:
        """As `Backend`; raises ServingError if an arm answers none of the requests."""
        for arm in arms:
            if arm not in self._warmed:
                self._warm_up(arm, conditions)
                self._warmed.add(arm)

    def _warm_up(self, arm: str, conditions: Sequence[Condition]) -> None:
        config = self._config
        clients = max(condition.concurrency or 1 for condition in conditions)
        count = clients if config.num_warmup is None else config.num_warmup
        responses: list[Response] = []

        async def send(number: int, temperature: float) -> None:
            text = f"{WARMUP_TEXTS[number % len(WARMUP_TEXTS)]} ({number})"
            sampling = Sampling(
                min(WARMUP_TOKENS, config.max_tokens), temperature, thinking=config.thinking
            )
            message = [{"role": "user", "content": text}]
            responses.append(
                await ask(
                    self._session, config.base_url, model=arm, messages=message, sampling=sampling
                )
            )

        # sampling runs other code than greedy decoding
        for temperature in dict.fromkeys(condition.temperature for condition in conditions):
            tasks = [partial(send, number, temperature) for number in range(count)]
            self._runner.run(closed_loop(tasks, concurrency=clients))
        if responses and all(response.error for response in responses):
            raise ServingError(f"arm {arm!r} answers no request: {responses[0].error}")
        self._add_uncounted(arm, responses)

    def order(self, plan: Sequence[Unit]) -> list[Unit]:
        """As `Backend`."""
        return list(plan)

    def notes(self) -> list[str]:
        """As `Backend`."""
        return []

    def send(self, unit: Unit, advance: Callable[[], None]) -> Answers:
        """As `Backend`."""
        counted = unit.block >= 0
        if counted and not self._began:
            self._begin_window()
        self._sent += counted
        responses: dict[int, Response] = {}
        config, condition = self._config, unit.condition
        sampling = Sampling(
            config.max_tokens, condition.temperature, config.ignore_eos, config.thinking
        )

        async def send(index: int, prompt: Prompt) -> None:
            responses[index] = await ask(
                self._session, config.base_url, model=unit.arm, messages=prompt.messages(),
                sampling=sampling, cache_salt=uuid.uuid4().hex if config.cold_prefixes else None,
            )  # fmt: skip
            advance()

        tasks = [partial(send, index, prompt) for index, prompt in enumerate(unit.prompts)]
        if condition.rate is None:
            loop = closed_loop(tasks, concurrency=condition.concurrency)
        else:
            arrivals_s = poisson_arrivals(
                len(tasks), rate=condition.rate, seed=config.seed + unit.block
            )
            loop = open_loop(tasks, arrivals_s=arrivals_s)
        wall_s = self._runner.run(loop)
        ordered = [responses[index] for index in range(len(tasks))]
        if counted:
            told = sum(response.num_drafts for response in ordered)
            self._told[unit.arm] = self._told.get(unit.arm, 0) + told
        else:
            self._add_uncounted(unit.arm, ordered)
        return Answers(ordered, wall_s)

    def problem(self, arm: str) -> str | None:
        """As `Backend`."""
        message = [{"role": "user", "content": "ping"}]
        response = self._runner.run(
            ask(
                self._session, self._config.base_url, model=arm, messages=message,
                sampling=Sampling(1, 0.0),
            )
        )  # fmt: skip
        return response.error

    def end_window(self, units: Sequence[str], ledger: Ledger) -> None:
        """As `Backend`; counts are of no use if a unit was begun that is not in the ledger."""
        if self._window is None or not units or len(units) != self._sent:
            return
        try:
            counted = self._window.end(self._told)
        except httpx.HTTPError as error:
            logger.warning("vLLM's counters could not be read at the end: %s", error)
            return
        if any(self._told.values()) and not any(counted.values()):
            logger.warning("the metrics page holds no counters of speculation; going on without")
            return
        ledger.end_session({"units": list(units), "counted": counted})

    def choices(self, arm: str, prompt: Prompt, condition: Condition) -> list[Choice] | None:
        """As `Backend`."""
        config = self._config
        sampling = Sampling(
            config.max_tokens, condition.temperature, config.ignore_eos, config.thinking
        )
        return self._runner.run(
            ask_choices(
                self._session, config.base_url, model=arm, messages=prompt.messages(),
                sampling=sampling,
            )
        )  # fmt: skip

    def _add_uncounted(self, arm: str, responses: Sequence[Response]) -> None:
        """Rounds that belong to no unit; after the window began it must not expect them."""
        rounds = sum(response.num_drafts for response in responses)
        self._before[arm] = self._before.get(arm, 0) + rounds

    def _begin_window(self) -> None:
        """Start counting, after every arm has been warmed up."""
        self._began = True
        if self._window is not None:
            self._window.begin(self._before)


def _open_window(config: OnlineConfig) -> counters.Window | None:
    url = config.metrics_url or f"{config.base_url}/metrics"
    try:
        return counters.Window(url)
    except httpx.HTTPError as error:
        if config.metrics_url is not None:
            logger.warning("vLLM's counters at %s cannot be read: %s; going on without", url, error)
        return None
