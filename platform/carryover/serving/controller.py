"""The one owner of the split: takes changes, gathers what replicas saw, and evaluates the guard.

A plain class with a clock that a test can replace; `deployment` makes the Ray Serve deployment.
Ingress replicas talk to it by `exchange`, people by `admin`, through any ingress replica. It never
stands in the way of a request: replicas keep the split they have when it is away.

A change is on disk with its audit entry before anybody hears of it; then replicas get it with the
instant at which all of them change over, and it is answered once every live one has confirmed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from carryover.errors import UserError
from carryover.serving import views
from carryover.serving.actions import Changing, Log, Report, Show, parse
from carryover.serving.changes import Change, next_step, renumber, roll_back
from carryover.serving.configured import overlaid
from carryover.serving.evaluation import Comparisons, Evaluation, compare_arms, evaluate
from carryover.serving.kept_split import KeptSplit
from carryover.serving.recording import Recorder, Recording
from carryover.serving.replicas import Replicas
from carryover.serving.results import Results
from carryover.serving.traffic import TrafficConfig

logger = logging.getLogger(__name__)

# Between two calls of an ingress replica.
HEARTBEAT_S = 0.5
_MAX_TEXT = 1000
_MOST_WAITING = 50_000
_REPORT_ENTRIES = 500


@dataclass(frozen=True)
class Timing:
    """How long things take between controller and replicas, in seconds.

    Attributes:
        replica_timeout_s: a replica silent for longer is gone.
        lead_s: from a change to the instant at which replicas change over: two heartbeats, so
            that all know of it by then.
        confirm_timeout_s: how long a change waits for confirmations.
        record_timeout_s: how long the end of an experiment waits for its record.
        lock_timeout_s: how long an earlier controller may take to give the state folder back,
            before this one stands by.
    """

    replica_timeout_s: float = 6 * HEARTBEAT_S
    lead_s: float = 2 * HEARTBEAT_S
    confirm_timeout_s: float = 5.0
    record_timeout_s: float = 30.0
    lock_timeout_s: float = 5.0


class TrafficController:
    """Decides the split of one application.

    Args:
        config: the resolved `traffic:` section, as a mapping (it crosses processes).
        arms: names of all arms, the control first.
        described: by arm, what it is; an experiment begins anew when that changes.
        clock: seconds since the epoch.
        timing: between controller and replicas.
        recorder: keeps experiments elsewhere; None: nowhere.
        publish: gets the overview after each evaluation, for metrics; None: nobody.

    Raises:
        ConfigError: the section does not fit the arms.
        ServingError: the state folder cannot be used, or is damaged.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        arms: Sequence[str],
        described: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.time,
        timing: Timing = Timing(),
        recorder: Recorder | None = None,
        publish: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._arms = tuple(arms)
        section = TrafficConfig.parse(config, source="traffic")
        resolved = section.resolve(arms=arms, application=section.experiment or "carryover")
        self._clock, self._timing, self._publish = clock, timing, publish
        self._replicas = Replicas(clock=clock, timeout_s=timing.replica_timeout_s)
        self._recording = Recording(recorder)
        self._changing = asyncio.Lock()
        self._last: Evaluation | None = None
        self._failed = ""
        self._loop: asyncio.Task | None = None
        self._unfinished: set[asyncio.Task] = set()
        # For the time of standing by: what replicas saw, and what Serve's `user_config` asked.
        self._waiting: deque[Sequence[Any]] = deque(maxlen=_MOST_WAITING)
        self._asked: Mapping[str, Any] | None = None
        self._described = dict(described or {})
        self._split = self._open(resolved, lock_timeout_s=timing.lock_timeout_s)

    # Replicas

    async def exchange(
        self,
        replica: str,
        version: int,
        observations: Sequence[Sequence[Any]],
        dropped: int,
        sequence: int = 0,
        events: Sequence[Sequence[Any]] = (),
    ) -> dict[str, Any] | None:
        """Take what an ingress replica saw since the last call, and give it a newer split.

        Args:
            replica: its unique id.
            version: of the split that it has taken over (that it will follow from
                `effective_at` on): the confirmation.
            observations: `Observation.to_row()` of finished requests.
            dropped: observations that did not fit its buffer, ever.
            sequence: number of this batch, growing by one from 1; a batch that is delivered again
                after a lost answer keeps its number and is counted once. 0: not numbered.
            events: (seconds since the epoch, arm, "down" or "up", text): arms that stopped or
                began to answer, for the audit log.

        Returns:
            `Traffic.model_dump(mode="json")` if it is another than `version`, else None.
        """
        self._ensure_running()
        if self._replicas.note(replica, version=version, sequence=sequence, dropped=dropped):
            self._split.results.add(observations)
            if self._split.is_standby:
                self._waiting.extend(observations)
        for time_s, arm, kind, text in events:
            if arm in self._arms:
                self._replicas.note_arm(replica, arm, is_down=kind == "down")
                await self._log_arms(time_s, text)
        if version > self._split.state.traffic.version:
            await self._outnumber(version)
        traffic = self._split.state.traffic
        return None if traffic.version == version else traffic.model_dump(mode="json")

    async def _outnumber(self, version: int) -> None:
        """The state folder was lost, or is a backup: number on from what replicas follow."""
        async with self._changing:
            if not self._split.is_standby and version > self._split.state.traffic.version:
                change = renumber(self._split.state, version + 1)
                why = f"replicas follow split {version}, which the state folder does not know"
                await self._apply(change, who="controller", why=why)

    async def _log_arms(self, time_s: float, why: str) -> None:
        """Log arms that went down or came up since: once, however many replicas noticed it."""
        if self._split.is_standby:
            return
        down = self._replicas.down()
        changed, self._replicas.logged_down = self._replicas.logged_down ^ down, down
        for arm in sorted(changed):
            kind = "down" if arm in down else "up"
            change = Change(self._split.state, f"arm {kind}", {}, {"arm": arm})
            entry = change.entry(time_s=time_s, who="ingress", why=why)
            try:
                await asyncio.to_thread(self._split.audit.append, entry)
            except OSError as error:
                logger.error("the audit log lacks that arm %s went %s: %s", arm, kind, error)

    # Admins

    async def admin(self, action: str, arguments: Mapping[str, Any], who: str) -> dict[str, Any]:
        """Answer an admin's request; raises nothing.

        Args:
            action: one of `actions.ACTIONS`.
            arguments: of the action.
            who: id of the key that was used, for the audit log.

        Returns:
            The action's answer, or `{"error": {"message": ..., "type": ..., "code": status}}`,
            where `code` is the HTTP status.
        """
        try:
            self._ensure_running()
            return views.without_nan(await self._answer(parse(action, arguments), who))
        except UserError as error:
            return _error(str(error), 400)
        except OSError as error:
            logger.exception("admin action %s", action)
            return _error(
                f"nothing was changed: cannot write to {self._split.config.state}: "
                f"{error.strerror or error}; make room there", 500,
            )  # fmt: skip
        except Exception as error:
            logger.exception("admin action %s", action)
            return _error(f"{action} failed: {type(error).__name__}: {error}", 500)

    async def reconfigure_traffic(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Take a changed `traffic:` section that came with Serve's `user_config`.

        The keys in `configured.LIVE` may change; others need another deployment. The same section
        again changes nothing, so every ingress replica may pass it on, and it does not undo what
        people set since.

        Returns:
            The overview, or an error as from `admin`.
        """
        try:
            section = overlaid(self._split.arguments, config, self._arms)
            if self._split.is_standby:
                self._asked = config
                return views.without_nan(self._overview())
            await self._finish(self._adopt(section, config))
        except UserError as error:
            return _error(str(error), 400)
        return views.without_nan(self._overview())

    async def _adopt(self, section: TrafficConfig, user_config: Mapping[str, Any]) -> None:
        async with self._changing:
            now = self._clock()
            adoption = self._split.adoption(
                section, now=now, effective_at=now + self._timing.lead_s
            )
            if adoption is not None:
                change, why = adoption
                await self._apply(
                    change, who="serve user_config", why=why, user_config=user_config
                )
            self._split.config = section

    async def _answer(self, asked: Any, who: str) -> dict[str, Any]:
        if isinstance(asked, Show):
            return self._overview()
        if isinstance(asked, Log):
            return await self._log(asked.last)
        if isinstance(asked, Report):
            return await self._report()
        assert isinstance(asked, Changing)
        change = await self._finish(self._change(asked, who))
        late = await self._replicas.wait_for(
            change.state.traffic.version, timeout_s=self._timing.confirm_timeout_s
        )
        if change.action == "stop":
            # A slow store does not keep the person waiting: it is written all the same.
            record = self._record(await self._report(), final=True)
            await asyncio.wait({record}, timeout=self._timing.record_timeout_s)
        return {**self._overview(), "late": late}

    async def _change(self, asked: Changing, who: str) -> Change:
        async with self._changing:
            now = self._clock()
            change = asked.change(
                self._split.state, arms=self._arms, now=now, at=now + self._timing.lead_s
            )
            person = _printable(f"{asked.who} (key {who})" if asked.who else f"key {who}")
            await self._apply(change, who=person, why=_printable(asked.why))
            return change

    def _overview(self) -> dict[str, Any]:
        results, now = self._split.results, self._clock()
        evaluated = views.evaluation_view(
            self._last, failed=self._failed, count=results.evaluations
        )
        return {
            **views.overview(
                self._split.state, results.arms, self._compare(results), arms=self._arms,
                rules=self._split.config.guard, now=now,
            ),
            "evaluation": {**evaluated, "period_s": self._split.config.evaluation_period_s},
            "standby": self._split.is_standby,
            "down": sorted(self._replicas.down()),
            "replicas": views.replica_views(self._replicas.live(), now=now),
            "dropped": self._replicas.dropped,
            "unknown": results.unknown,
            "run_id": self._split.run_id,
            "unrecorded": self._recording.failed,
        }  # fmt: skip

    def _compare(self, results: Results) -> Comparisons:
        return compare_arms(results.arms, arms=self._arms, alpha=self._split.config.guard.alpha)

    async def _log(self, last: int) -> dict[str, Any]:
        entries, unreadable = await asyncio.to_thread(self._split.audit.read, last)
        dumped = [entry.model_dump(mode="json") for entry in entries]
        return {"entries": dumped, "unreadable": unreadable}

    async def _report(self) -> dict[str, Any]:
        log = await self._log(_REPORT_ENTRIES)
        statistics = self._split.results.statistics.to_json()
        return {**self._overview(), "statistics": statistics, "log": log["entries"]}

    # Evaluation

    async def evaluate(self) -> None:
        """Evaluate the guard once: roll back, go on with a ramp, or leave everything."""
        async with self._changing:
            now, state, results = self._clock(), self._split.state, self._split.results
            results.evaluations += 1
            try:
                compared = self._compare(results)
                results.statistics.trail.note(now, compared)
                config = self._split.config
                found = evaluate(
                    state, results.arms, compared, config.guard, arms=self._arms, now=now,
                    number=results.evaluations, period_s=config.evaluation_period_s,
                )  # fmt: skip
            except Exception as error:
                # A ramp goes on after a successful evaluation only, and this is none.
                logger.exception("the guard's evaluation failed")
                self._failed = f"{type(error).__name__}: {error}"
                return
            self._last, self._failed = found, ""
            if found.decision == "roll back":
                change = roll_back(state, arms=self._arms, now=now)
                await self._apply(change, who="guard", why=found.why)
            elif found.decision == "step":
                at = now + self._timing.lead_s
                change = next_step(state, arms=self._arms, effective_at=at)
                await self._apply(change, who="ramp", why=found.why)

    async def take_over(self) -> bool:
        """Take the place of a controller that has gone; returns whether it has."""
        async with self._changing:
            split = self._open(self._split.arguments, lock_timeout_s=0.0)
            self._split.close()
            if split.is_standby:
                # The other may have changed its split; what was seen here stays.
                split.results = self._split.results
                self._split = split
                return False
            split.results.add(self._waiting)
            self._split = split
            self._waiting.clear()
        logger.info("the state folder is free: no longer standing by")
        if self._asked is not None:
            await self.reconfigure_traffic(self._asked)
        return True

    def _open(self, config: TrafficConfig, *, lock_timeout_s: float) -> KeptSplit:
        now = self._clock()
        return KeptSplit(
            config, arms=self._arms, described=self._described, replicas=self._replicas, now=now,
            effective_at=now + self._timing.lead_s, lock_timeout_s=lock_timeout_s,
        )  # fmt: skip

    async def save(self) -> None:
        """Write the statistics to the state folder, and a roll-back that found the disk full."""
        async with self._changing:
            if not self._split.is_written:
                await asyncio.to_thread(self._split.write, self._split.saved)
        await asyncio.to_thread(self._split.write_results, self._split.results_json())

    async def check_health(self) -> None:
        """Called by Ray Serve, which replaces a controller that raises."""
        self._ensure_running()

    def close(self) -> None:
        """Save the statistics, close the record, and give the state folder back."""
        if self._loop is not None:
            self._loop.cancel()
        self._split.close()
        self._recording.close()

    def _ensure_running(self) -> None:
        """Start the evaluation, which needs the event loop that calls come in on."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop().create_task(self._run())
        elif self._loop.done() and not self._loop.cancelled():
            raise RuntimeError("the split is no longer evaluated") from self._loop.exception()

    async def _run(self) -> None:
        recorded = self._clock()
        while True:
            await asyncio.sleep(self._split.config.evaluation_period_s)
            try:
                if self._split.is_standby and not await self.take_over():
                    continue
                await self.evaluate()
                # Replicas that are gone no longer miss an arm.
                await self._log_arms(self._clock(), "no replica misses it any more")
                await self.save()
                if self._publish is not None:
                    self._publish(self._overview())
                await self._record_left_open()
                is_due = self._clock() - recorded >= self._split.config.record_period_s
                if is_due and self._recording.is_idle and not self._split.state.ended:
                    recorded = self._clock()
                    self._record(await self._report(), final=False)
            except Exception:
                logger.exception("the split was not evaluated or saved; trying again")

    # Changes and records

    async def _apply(
        self, change: Change, *, who: str, why: str, user_config: Mapping[str, Any] | None = None
    ) -> None:
        """Write a change, then follow it; call it with `_changing` held."""
        entry = change.entry(time_s=self._clock(), who=who, why=why)
        following = self._split.following(change, entry, user_config=user_config)
        try:
            await asyncio.to_thread(self._split.write, following)
        except OSError as error:
            if change.action != "rollback":
                raise
            # A full disk must not keep users on a broken arm; `save` writes it when it can.
            logger.error("split %d is followed, but not on disk: %s", entry.version, error)
        self._split.install(following)
        logger.info("split %d: %s by %s: %s", entry.version, entry.action, who, why)

    async def _finish(self, change: Coroutine[Any, Any, Any]) -> Any:
        """Await a change that goes on to its end even if whoever asked for it hangs up."""
        task = asyncio.create_task(change)
        self._unfinished.add(task)
        task.add_done_callback(self._unfinished.discard)
        return await asyncio.shield(task)

    def _record(self, report: dict[str, Any], *, final: bool) -> asyncio.Task:
        """Record the running experiment in the background."""
        began = self._split.state.began

        async def started(run_id: str) -> None:
            async with self._changing:
                if self._split.state.began == began:
                    named = self._split.with_run(run_id)
                    await asyncio.to_thread(self._split.write, named)
                    self._split.install(named)

        return self._recording.begin(
            views.without_nan(report), self._split.run_id, final=final, started=started
        )

    async def _record_left_open(self) -> None:
        """Record the end of experiments that a configuration put an end to."""

        async def started(run_id: str) -> None:
            logger.info("the experiment before was recorded as run %s", run_id)

        while self._split.left_open:
            left = self._split.left_open.pop(0)
            view = views.overview(
                left.state, left.results.arms, self._compare(left.results),
                arms=tuple(left.results.arms), rules=self._split.config.guard, now=self._clock(),
            )  # fmt: skip
            report = {**view, "statistics": left.results.statistics.to_json(), "log": []}
            self._recording.begin(
                views.without_nan(report), left.run_id, final=True, started=started
            )


def deployment(
    config: TrafficConfig, *, arms: Sequence[str], described: Mapping[str, Any] | None = None
) -> Any:
    """Bind the controller as a Ray Serve deployment, for the ingress's init args.

    Args:
        config: the resolved section.
        arms: names of all arms, the control first.
        described: by arm, what it is, JSON-able.
    """
    from ray import serve

    from carryover.serving.controller_deployment import DeployedController

    deployed = serve.deployment(
        DeployedController,
        name=TrafficController.__name__,
        num_replicas=1,
        max_ongoing_requests=1000,
        # How soon a controller that died is replaced.
        health_check_period_s=2,
        health_check_timeout_s=30,
        ray_actor_options={"num_cpus": 0.1},
    )
    return deployed.bind(config.model_dump(mode="json"), list(arms), dict(described or {}))


def _error(message: str, code: int) -> dict[str, Any]:
    kind = "invalid_request_error" if code < 500 else "internal_error"
    return {"error": {"message": message, "type": kind, "code": code}}


def _printable(text: str) -> str:
    """Without what could forge a line or steer a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)[:_MAX_TEXT]
