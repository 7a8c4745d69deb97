"""vLLM engines in Ray actors, one engine an actor, kept full by one driver.

Why actors of our own and not Ray Data's LLM processors: those feed an engine batch by batch (its
last requests run alone until the batch ends), report neither tokens nor in-flight work, and hand
over whole blocks, so that a kill loses every row of a block. Here the driver tops an engine up
whenever requests end, gets each response as it ends, and restarts an actor that dies, giving it
its unfinished requests again.

With one CPU engine the order of work depends on step counts alone, so equal seeds give equal
responses.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import RayError, RayTaskError

from carryover.engine import EngineConfig, PoolConfig
from carryover.engine_worker import (
    Advance,
    Completion,
    EngineProcess,
    EngineWorker,
    Request,
)
from carryover.errors import ConfigError, UserError
from carryover.runtime import usable_cores
from carryover.targets import Target
from jobs.ray_cluster import start_ray, wait_for_end

MAX_RESTARTS = 3
SPEED_WINDOW_S = 20.0
# Reading the first prompts of all slots is not how an engine goes on; but wait no longer for it.
_FILLING_S = 30.0
_PATIENCE_S = 60.0

logger = logging.getLogger(__name__)


@dataclass
class _Engine:
    """The driver's view of one actor."""

    actor: Any
    number: int
    starting: Any = None
    process: EngineProcess | None = None
    requests: dict[int, Request] = field(default_factory=dict)
    call: Any = None
    pending_tokens: int = 0


class EnginePool:
    """Engines that answer requests; a context manager that starts and stops them.

    `generated_tokens` and `read_tokens` count what the engines wrote and read so far; `details` is
    what the first engine says of itself.

    Args:
        target: who answers.
        engine: settings of each engine; the seed grows by one from engine to engine.
        pool: how many, and where.

    Raises:
        ConfigError: the cluster can never hold so many engines.
        UserError: an engine cannot start because of its settings.
    """

    def __init__(self, target: Target, engine: EngineConfig, pool: PoolConfig) -> None:
        self.target = target
        self.engine = engine
        self.pool = pool
        self.generated_tokens = 0
        self.read_tokens = 0
        self.restarts = 0
        self.details: dict[str, Any] = {}
        self._queue: deque[Request] = deque()
        self._engines: list[_Engine] = []
        self._speed: deque[tuple[float, int]] = deque()
        self._began: float | None = None
        self._filled = False
        self._owns_ray = False
        self._on_gpu = False
        self._capacity = engine.max_num_seqs + max(4, engine.max_num_seqs // 4)

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def check(self, target: Target, *, max_model_len: int) -> None:
        """Check that these engines can do a piece of work.

        Raises:
            ValueError: they serve another target or shorter sequences.
        """
        if target.path != self.target.path or max_model_len > self.engine.max_model_len:
            raise ValueError(
                f"the engines serve {self.target.path} up to {self.engine.max_model_len} tokens; "
                f"asked for {target.path} up to {max_model_len}"
            )

    def close(self) -> None:
        """End the engines, and Ray if this pool started it; their memory is free afterwards."""
        for engine in self._engines:
            ray.kill(engine.actor)
        wait_for_end([engine.process for engine in self._engines if engine.process])
        self._engines = []
        if self._owns_ray:
            ray.shutdown()
            self._owns_ray = False

    @property
    def in_flight(self) -> int:
        """Requests that are not finished."""
        return len(self._queue) + sum(len(engine.requests) for engine in self._engines)

    @property
    def pending_tokens(self) -> int:
        """Tokens already generated for requests that are not finished."""
        return sum(engine.pending_tokens for engine in self._engines)

    @property
    def wanted(self) -> int:
        """How many more requests keep all engines full."""
        return max(0, self._capacity * len(self._engines) - self.in_flight)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second, over the last seconds; 0 until it is known."""
        if len(self._speed) < 2:
            return 0.0
        (start, before), (end, after) = self._speed[0], self._speed[-1]
        return (after - before) / (end - start)

    @property
    def measured_s(self) -> float:
        """Seconds over which `tokens_per_s` was measured."""
        return self._speed[-1][0] - self._speed[0][0] if self._speed else 0.0

    def submit(self, request: Request) -> None:
        """Queue a request."""
        if not self.in_flight:
            self._speed.clear()
            self._began, self._filled = None, False
        self._queue.append(request)

    def collect(self) -> list[Completion]:
        """Let the engines work for a moment and return what has ended.

        Raises:
            RuntimeError: engines died more than `MAX_RESTARTS` times.
        """
        for engine in self._engines:
            if engine.call is None:
                self._call(engine)
        calls = {engine.call: engine for engine in self._engines if engine.call is not None}
        if not calls:
            return []
        read, generated = self.read_tokens, self.generated_tokens
        if self._began is None:
            self._began = time.monotonic()
            self._speed.append((self._began, generated))
        ready, _ = ray.wait(list(calls), num_returns=1)
        finished: list[Completion] = []
        for call in ready:
            finished += self._receive(calls[call])
        self._measure(filling=self.read_tokens - read > self.generated_tokens - generated)
        return finished

    def _measure(self, *, filling: bool) -> None:
        """Take a reading for the speed; while engines are being filled it starts over."""
        now = time.monotonic()
        if self._filled or not filling or now - self._began > _FILLING_S:
            self._filled = True
        else:
            self._speed.clear()
        self._speed.append((now, self.generated_tokens))
        while len(self._speed) > 2 and now - self._speed[0][0] > SPEED_WINDOW_S:
            self._speed.popleft()

    def drop(self) -> None:
        """Forget all unfinished requests; the engines stay."""
        self._queue.clear()
        for engine in self._engines:
            call, engine.call = engine.call, None
            engine.requests.clear()
            engine.pending_tokens = 0
            try:
                if call is not None:
                    ray.get(call)
                ray.get(engine.actor.drop.remote())
            except RayError as error:
                self._replace(engine, error)

    def _start(self) -> None:
        if not ray.is_initialized():
            start_ray(self.pool.ray_address)
            self._owns_ray = True
        self._check_resources()
        for number in range(self.pool.engines):
            engine = _Engine(self._actor(), number)
            self._engines.append(engine)
            self._begin(engine)
        starting = [engine.starting for engine in self._engines]
        while len(ray.wait(starting, num_returns=len(starting), timeout=_PATIENCE_S)[1]):
            free = ray.available_resources()
            if any(free.get(name, 0) < amount for name, amount in self._needs().items()):
                logger.info("engines are still starting; the Ray cluster has %s free", free)
        for engine in self._engines:
            self._await_start(engine)
        self.details = ray.get(starting[0])[1]

    def _needs(self) -> dict[str, float]:
        """Resources of one engine, by Ray's names for them."""
        if self._on_gpu:
            return {
                "CPU": self.pool.cpus_per_engine or 1,
                "GPU": self.engine.tensor_parallel_size,
            }
        share = max(1, len(usable_cores()) // self.pool.engines)
        return {"CPU": self.pool.cpus_per_engine or share}

    def _check_resources(self) -> None:
        found = ray.cluster_resources()
        self._on_gpu = found.get("GPU", 0) > 0
        for name, amount in self._needs().items():
            total = amount * self.pool.engines
            if total > found.get(name, 0):
                raise ConfigError(
                    f"{self.pool.engines} engines need {total:g} {name}s, and the Ray cluster has "
                    f"{found.get(name, 0):g}; lower pool.engines or pool.cpus_per_engine"
                )

    def _begin(self, engine: _Engine) -> None:
        # An engine that is started again must not sample what it sampled before.
        seed = self.engine.seed + engine.number + self.restarts * self.pool.engines
        config = self.engine.model_copy(update={"seed": seed})
        engine.process = None
        engine.starting = engine.actor.start.remote(self.target, config)

    def _await_start(self, engine: _Engine) -> None:
        try:
            engine.process, _ = ray.get(engine.starting)
        except RayError as error:
            raise _cause(error) from None

    def _actor(self) -> Any:
        variables = {}
        needs = self._needs()
        if not self._on_gpu and self.pool.engines > 1:
            # Engines that share a machine must not be bound to the same cores.
            threads = max(1, int(needs["CPU"]))
            variables = {
                "OMP_NUM_THREADS": str(threads),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            }
        worker = ray.remote(EngineWorker).options(
            num_cpus=needs["CPU"],
            num_gpus=needs.get("GPU", 0),
            max_restarts=0,
            runtime_env={"env_vars": variables},
        )
        return worker.remote()

    def _call(self, engine: _Engine) -> None:
        requests = []
        while self._queue and len(engine.requests) < self._capacity:
            request = self._queue.popleft()
            engine.requests[request.id] = request
            requests.append(request)
        if engine.requests:
            # A call should not cost more than the steps that it runs: a GPU's are short.
            steps = 16 if self._on_gpu else 4
            engine.call = engine.actor.advance.remote(requests, steps)

    def _receive(self, engine: _Engine) -> list[Completion]:
        call, engine.call = engine.call, None
        try:
            advance: Advance = ray.get(call)
        except RayError as error:
            self._replace(engine, error)
            return []
        if engine.process is None:
            self._await_start(engine)
        self.generated_tokens += advance.generated
        self.read_tokens += advance.read
        engine.pending_tokens = advance.pending_tokens
        for completion in advance.finished:
            del engine.requests[completion.id]
        return advance.finished

    def _replace(self, engine: _Engine, error: RayError) -> None:
        """Start a new actor for one that died; its unfinished requests go first."""
        self.restarts += 1
        reason = str(_cause(error)).strip().splitlines()
        summary = reason[-1] if reason else type(error).__name__
        if self.restarts > MAX_RESTARTS:
            raise RuntimeError(f"engines died {self.restarts} times, giving up: {summary}")
        logger.warning("engine %d died (%s); starting it again", engine.number, summary)
        self._queue.extendleft(reversed(engine.requests.values()))
        engine.requests, engine.pending_tokens = {}, 0
        ray.kill(engine.actor)
        engine.actor = self._actor()
        self._begin(engine)


@contextmanager
def engines_for(
    target: Target,
    engine: EngineConfig,
    config: PoolConfig,
    *,
    borrowed: EnginePool | None,
    report: Callable[[str], None],
) -> Iterator[EnginePool]:
    """The borrowed engines, or ones that are started for this piece of work and ended after it.

    Borrowed engines are given back without unfinished requests.

    Raises:
        ValueError: the borrowed ones serve another target or shorter sequences.
    """
    if borrowed is None:
        report(f"starting {config.engines} engine{'s' * (config.engines > 1)}")
        with EnginePool(target, engine, config) as started:
            yield started
        return
    borrowed.check(target, max_model_len=engine.max_model_len)
    try:
        yield borrowed
    finally:
        if borrowed.in_flight:
            borrowed.drop()


def drain(
    pool: EnginePool,
    requests: Iterable[Request],
    handle: Callable[[Completion], Iterable[Request]],
) -> Iterator[None]:
    """Run requests through a pool until all are done, never leaving an engine short of work.

    Yields now and then, after completions were handled, so that the caller can report or stop.

    Args:
        pool: started.
        requests: read lazily, as engines have room.
        handle: called with each completion; what it returns is asked next (follow-up turns).
    """
    source = iter(requests)
    exhausted = False
    while True:
        while not exhausted and pool.wanted:
            request = next(source, None)
            if request is None:
                exhausted = True
            else:
                pool.submit(request)
        if not pool.in_flight:
            return
        for completion in pool.collect():
            for follow_up in handle(completion):
                pool.submit(follow_up)
        yield


def _cause(error: RayError) -> Exception:
    """The exception that a user should see for a Ray error."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, UserError):
        return error.cause
    return RuntimeError(str(error))
