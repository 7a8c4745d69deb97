"""The engines of an offline bench: started, asked, and ended, all of them or one at a time."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from carryover.bench.client import Choice, Response
from carryover.bench.measure import Answers
from carryover.bench.records import Condition
from carryover.bench.workload import Unit, in_turns
from carryover.engine import free_memory
from carryover.errors import ServingError
from carryover.guardian import end_processes
from carryover.runtime import engine_environment

if TYPE_CHECKING:
    from carryover.bench.ledger import Ledger
    from carryover.bench.offline import OfflineConfig
    from carryover.data.prompts import Prompt
    from carryover.serving.config import Arm
    from carryover.targets import Target

WARMUP_TEXTS = ("Warm-up. Write three sentences about the sea.", "Warm-up. Count to twenty.")
WARMUP_TOKENS = 32
# an engine beside the first is expected to take as much memory, and this much more
_MEMORY_MARGIN = 1.25
_ENDING_S = 10.0

logger = logging.getLogger(__name__)


class EngineProcess:
    """One arm's engine in a process of its own, which begins to start at once.

    Args:
        arm: its name.
        start: what the engine is, as `offline_worker.Engine` takes it.
        log: file for what it prints.
    """

    def __init__(self, arm: str, start: dict[str, Any], log: Path) -> None:
        self.arm, self._log = arm, log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "carryover.bench.offline_worker"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                env={**os.environ, **engine_environment()},
            )  # fmt: skip
        self._write({"start": start})

    def wait_until_ready(self) -> None:
        """Return when the engine has started.

        Raises:
            ServingError: it does not start; with the end of what it printed.
        """
        self._read()

    @property
    def alive(self) -> bool:
        """Whether the process is there."""
        return self._process.poll() is None

    def memory_bytes(self) -> int:
        """What it and its children occupy."""
        process = psutil.Process(self._process.pid)
        tree = [process, *process.children(recursive=True)]
        return sum(each.memory_info().rss for each in tree)

    def send(
        self,
        conversations: Sequence[list[dict[str, str]]],
        sampling: dict[str, Any],
        advance: Callable[[], None],
    ) -> tuple[list[Response], dict[str, float]]:
        """Have conversations answered, one at a time; returns answers and vLLM's own counts."""
        self._write({"send": list(conversations), "sampling": sampling})
        responses = []
        while True:
            answer = self._read()
            if "counted" in answer:
                return responses, answer["counted"]
            responses.append(Response(**answer["response"]))
            advance()

    def choices(
        self, messages: list[dict[str, str]], sampling: dict[str, Any]
    ) -> list[Choice] | None:
        """The tokens of an answer with their probabilities."""
        self._write({"choices": messages, "sampling": sampling})
        found = self._read()["choices"]
        return None if found is None else [Choice(**each) for each in found]

    def close(self) -> None:
        """End it, and wait until its memory is free."""
        if self.alive:
            self._process.stdin.close()
            try:
                self._process.wait(_ENDING_S)
            except subprocess.TimeoutExpired:
                end_processes([psutil.Process(self._process.pid)])
                self._process.wait(_ENDING_S)
        self._process.stdout.close()

    def _write(self, message: dict[str, Any]) -> None:
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise self._died() from None

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise self._died()
        return json.loads(line)

    def _died(self) -> ServingError:
        code = self._process.wait(_ENDING_S)
        lines = self._log.read_text(errors="replace").strip().splitlines()
        said = next((line for line in reversed(lines) if "Error" in line), lines[-1:] or "nothing")
        return ServingError(
            f"the engine of arm {self.arm!r} ended (exit status {code}): {said}\n"
            f"all that it said is in {self._log}"
        )


class OfflineBackend:
    """The engines, seen by `bench.measure`."""

    def __init__(self, config: OfflineConfig, target: Target, folder: Path) -> None:
        self._config, self._target, self._folder = config, target, folder
        self._arms: dict[str, Arm] = {arm.name: arm for arm in config.arms}
        self._engines: dict[str, EngineProcess] = {}
        self._at_once = config.engines_at_once
        self._conditions: Sequence[Condition] = ()

    @property
    def side_by_side(self) -> bool:
        """Whether the engines of all arms run together."""
        return self._at_once is None or self._at_once >= len(self._arms)

    def prepare(self, arms: Sequence[str], conditions: Sequence[Condition]) -> None:
        """As `Backend`: start what fits into memory together."""
        self._conditions = conditions
        if not self.side_by_side or not arms:
            return
        first, *others = arms
        self._engine(first)
        if self._at_once is None and not self._fits_more(arms):
            logger.warning("memory for one engine at a time; the arms take turns")
            self._at_once = 1
            return
        started = [self._start(arm) for arm in others if arm not in self._engines]
        for engine in started:
            engine.wait_until_ready()
        for engine in started:
            self._warm_up(engine)

    def order(self, plan: Sequence[Unit]) -> list[Unit]:
        """As `Backend`: block by block side by side, else in turns."""
        if self.side_by_side:
            return list(plan)
        blocks = len({unit.block for unit in plan})
        return in_turns(plan, turns=min(self._config.turns, blocks))

    def notes(self) -> list[str]:
        """As `Backend`."""
        if self.side_by_side:
            return []
        return [
            "one engine ran at a time, so the arms were not interleaved block by block but in "
            f"{self._config.turns} turns in reversed order; slow drift of the machine may remain"
        ]

    def send(self, unit: Unit, advance: Callable[[], None]) -> Answers:
        """As `Backend`; the time of a unit is the sum of its requests' times in the engine."""
        engine = self._engine(unit.arm)
        responses, counted = engine.send(
            [prompt.messages() for prompt in unit.prompts], self._sampling(unit.condition), advance
        )
        wall_s = sum(answer.latency_s for answer in responses if answer.error is None)
        return Answers(responses, wall_s, counted)

    def problem(self, arm: str) -> str | None:
        """As `Backend`: a dead engine raises by itself, a live one has only refused prompts."""
        return None if self._engine(arm).alive else "its engine ended"

    def end_window(self, units: Sequence[str], ledger: Ledger) -> None:
        """As `Backend`: each unit has its own counts already."""

    def choices(self, arm: str, prompt: Prompt, condition: Condition) -> list[Choice] | None:
        """As `Backend`."""
        return self._engine(arm).choices(prompt.messages(), self._sampling(condition))

    def close(self) -> None:
        """End all engines."""
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    def _engine(self, arm: str) -> EngineProcess:
        if arm in self._engines:
            return self._engines[arm]
        if self._at_once is not None and len(self._engines) >= self._at_once:
            oldest = next(iter(self._engines))
            self._engines.pop(oldest).close()
        engine = self._start(arm)
        engine.wait_until_ready()
        self._warm_up(engine)
        return engine

    def _start(self, arm: str) -> EngineProcess:
        wanted = self._arms[arm]
        start = {
            "target": self._target.name,
            "engine": self._config.engine.model_dump(mode="json"),
            "drafter": None if wanted.drafter is None else str(wanted.drafter),
            "num_speculative_tokens": wanted.num_speculative_tokens,
        }
        engine = EngineProcess(arm, start, self._folder / f"engine-{arm}.log")
        self._engines[arm] = engine
        return engine

    def _warm_up(self, engine: EngineProcess) -> None:
        count = self._config.num_warmup
        texts = WARMUP_TEXTS if count is None else (WARMUP_TEXTS * count)[:count]
        conversations = [[{"role": "user", "content": text}] for text in texts]
        # sampling runs other code than greedy decoding
        for condition in self._conditions:
            tokens = min(WARMUP_TOKENS, self._config.max_tokens)
            sampling = {**self._sampling(condition), "max_tokens": tokens}
            responses, _ = engine.send(conversations, sampling, lambda: None)
            if responses and all(response.error for response in responses):
                raise ServingError(f"arm {engine.arm!r} answers no request: {responses[0].error}")

    def _sampling(self, condition: Condition) -> dict[str, Any]:
        config = self._config
        return {
            "max_tokens": config.max_tokens, "temperature": condition.temperature,
            "ignore_eos": config.ignore_eos, "thinking": config.thinking,
        }  # fmt: skip

    def _fits_more(self, arms: Sequence[str]) -> bool:
        """Whether the engines that are still missing fit, judged by those that run."""
        largest = max(engine.memory_bytes() for engine in self._engines.values())
        missing = len(arms) - len(self._engines)
        return missing * largest * _MEMORY_MARGIN <= free_memory()
