"""Makes every change of the split, one after the other, whoever asks for it.

People ask, a changed configuration does, the guard and a ramp do after an evaluation. A change is
on disk with its audit entry before anybody hears of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from carryover.serving.actions import Changing
from carryover.serving.changes import Change, next_step, renumber, roll_back
from carryover.serving.configured import overlaid
from carryover.serving.evaluation import Comparisons, Evaluation, compare_arms, evaluate
from carryover.serving.kept_split import KeptSplit
from carryover.serving.replicas import Replicas
from carryover.serving.results import Results
from carryover.serving.traffic import TrafficConfig

_MAX_TEXT = 1000
_MOST_WAITING = 50_000

logger = logging.getLogger(__name__)


class Steering:
    """Holds the split and changes it.

    Args:
        config: the resolved `traffic:` section.
        arms: names of all arms, the control first.
        described: by arm, what it is.
        replicas: whose delivered batches are kept with the results.
        clock: seconds since the epoch.
        lead_s: from a change to the instant at which replicas change over.
        lock_timeout_s: how long to wait for an earlier controller before standing by.

    Attributes:
        split: in force, with its results.
        last: evaluation; None before the first.
        failed: why the last evaluation failed; empty if it did not.

    Raises:
        ServingError: the state folder cannot be used, or is damaged.
    """

    def __init__(
        self,
        config: TrafficConfig,
        *,
        arms: Sequence[str],
        described: Mapping[str, Any],
        replicas: Replicas,
        clock: Callable[[], float],
        lead_s: float,
        lock_timeout_s: float,
    ) -> None:
        self._arms, self._described, self._replicas = tuple(arms), dict(described), replicas
        self._clock, self._lead_s = clock, lead_s
        self.last: Evaluation | None = None
        self.failed = ""
        self._changing = asyncio.Lock()
        self._unfinished: set[asyncio.Task] = set()
        # For the time of standing by: what replicas saw, and what Serve's `user_config` asked.
        self._waiting: deque[Sequence[Any]] = deque(maxlen=_MOST_WAITING)
        self._asked: Mapping[str, Any] | None = None
        self.split = self._open(config, lock_timeout_s=lock_timeout_s)

    def add(self, observations: Sequence[Sequence[Any]]) -> None:
        """Count what a replica saw."""
        self.split.results.add(observations)
        if self.split.is_standby:
            self._waiting.extend(observations)

    def compare(self, results: Results) -> Comparisons:
        """Every arm against the control, on every metric."""
        arms = tuple(results.arms)
        return compare_arms(results.arms, arms=arms, alpha=self.split.config.guard.alpha)

    async def change(self, asked: Changing, who: str) -> Change:
        """Make a change that a person asks for; it goes on to its end if the person hangs up.

        Raises:
            ConfigError: it cannot be made.
            ServingError: another application has the state folder.
            OSError: it cannot be written.
        """
        return await self._finish(self._change(asked, who))

    async def adopt(self, user_config: Mapping[str, Any]) -> None:
        """Take a changed section from Serve's `user_config`; standing by, keep it for later.

        Raises:
            ConfigError: it cannot be taken.
            OSError: it cannot be written.
        """
        section = overlaid(self.split.arguments, user_config, self._arms)
        if self.split.is_standby:
            self._asked = user_config
        else:
            await self._finish(self._adopt(section, user_config))

    async def outnumber(self, version: int) -> None:
        """The state folder was lost, or is a backup: number on from what replicas follow."""
        async with self._changing:
            if not self.split.is_standby and version > self.split.state.traffic.version:
                change = renumber(self.split.state, version + 1)
                why = f"replicas follow split {version}, which the state folder does not know"
                await self._apply(change, who="controller", why=why)

    async def evaluate(self) -> None:
        """Evaluate the guard once: roll back, go on with a ramp, or leave everything."""
        async with self._changing:
            now, state, results = self._clock(), self.split.state, self.split.results
            results.evaluations += 1
            try:
                compared = self.compare(results)
                results.statistics.trail.note(now, compared)
                config = self.split.config
                found = evaluate(
                    state, results.arms, compared, config.guard, arms=self._arms, now=now,
                    number=results.evaluations, period_s=config.evaluation_period_s,
                )  # fmt: skip
            except Exception as error:
                # A ramp goes on after a successful evaluation only, and this is none.
                logger.exception("the guard's evaluation failed")
                self.failed = f"{type(error).__name__}: {error}"
                return
            self.last, self.failed = found, ""
            if found.decision == "roll back":
                change = roll_back(state, arms=self._arms, now=now)
                await self._apply(change, who="guard", why=found.why)
            elif found.decision == "step":
                at = now + self._lead_s
                change = next_step(state, arms=self._arms, effective_at=at)
                await self._apply(change, who="ramp", why=found.why)

    async def take_over(self) -> bool:
        """Take the place of a controller that has gone; returns whether it has."""
        async with self._changing:
            split = self._open(self.split.arguments, lock_timeout_s=0.0)
            self.split.close()
            if split.is_standby:
                # The other may have changed its split; what was seen here stays.
                split.results = self.split.results
                self.split = split
                return False
            split.results.add(self._waiting)
            self.split = split
            self._waiting.clear()
        logger.info("the state folder is free: no longer standing by")
        if self._asked is not None:
            await self.adopt(self._asked)
        return True

    def _open(self, config: TrafficConfig, *, lock_timeout_s: float) -> KeptSplit:
        now = self._clock()
        return KeptSplit(
            config, arms=self._arms, described=self._described, replicas=self._replicas, now=now,
            effective_at=now + self._lead_s, lock_timeout_s=lock_timeout_s,
        )  # fmt: skip

    async def name_run(self, run_id: str, *, began: float) -> None:
        """Remember the MLflow run of the experiment that began then, if it is still the one."""
        async with self._changing:
            if self.split.state.began == began:
                named = self.split.with_run(run_id)
                await asyncio.to_thread(self.split.write, named)
                self.split.install(named)

    async def save(self) -> None:
        """Write the statistics to the state folder, and a roll-back that found the disk full."""
        async with self._changing:
            if not self.split.is_written:
                await asyncio.to_thread(self.split.write, self.split.saved)
        await asyncio.to_thread(self.split.write_results, self.split.results_json())

    async def _apply(
        self, change: Change, *, who: str, why: str, user_config: Mapping[str, Any] | None = None
    ) -> None:
        """Write a change, then follow it; call it with `_changing` held."""
        entry = change.entry(time_s=self._clock(), who=who, why=why)
        following = self.split.following(change, entry, user_config=user_config)
        try:
            await asyncio.to_thread(self.split.write, following)
        except OSError as error:
            if change.action != "rollback":
                raise
            # A full disk must not keep users on a broken arm; `save` writes it when it can.
            logger.error("split %d is followed, but not on disk: %s", entry.version, error)
        if following.state.began != self.split.state.began:
            self.last = None
        self.split.install(following)
        logger.info("split %d: %s by %s: %s", entry.version, entry.action, who, why)

    async def _finish(self, change: Coroutine[Any, Any, Any]) -> Any:
        """Await a change that goes on to its end even if whoever asked for it hangs up."""
        task = asyncio.create_task(change)
        self._unfinished.add(task)
        task.add_done_callback(self._unfinished.discard)
        return await asyncio.shield(task)

    async def _change(self, asked: Changing, who: str) -> Change:
        async with self._changing:
            now = self._clock()
            change = asked.change(
                self.split.state, arms=self._arms, now=now, at=now + self._lead_s
            )
            person = _printable(f"{asked.who} (key {who})" if asked.who else f"key {who}")
            await self._apply(change, who=person, why=_printable(asked.why))
            return change

    async def _adopt(self, section: TrafficConfig, user_config: Mapping[str, Any]) -> None:
        async with self._changing:
            now = self._clock()
            adoption = self.split.adoption(section, now=now, effective_at=now + self._lead_s)
            if adoption is not None:
                change, why = adoption
                await self._apply(
                    change, who="serve user_config", why=why, user_config=user_config
                )
            self.split.config = section


def _printable(text: str) -> str:
    """Without what could forge a line or steer a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)[:_MAX_TEXT]
