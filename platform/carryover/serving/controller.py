"""The one owner of the split: takes changes, gathers what replicas saw, and evaluates the guard.

A plain class with a clock that a test can replace; `controller_deployment` puts it on Ray Serve.
Ingress replicas talk to it by `exchange`, people by `admin`, through any ingress replica. It never
stands in the way of a request: replicas keep the split they have when it is away.

A change is on disk with its audit entry before anybody hears of it; then replicas get it with the
instant at which all of them change over, and it is answered once every live one has confirmed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from carryover.errors import UserError
from carryover.serving import views
from carryover.serving.actions import Changing, Log, Report, Show, parse
from carryover.serving.changes import Change
from carryover.serving.kept_split import KeptSplit
from carryover.serving.recording import Recorder, Recording
from carryover.serving.replicas import Replicas
from carryover.serving.steering import Steering
from carryover.serving.timing import Timing
from carryover.serving.traffic import TrafficConfig

logger = logging.getLogger(__name__)

_REPORT_ENTRIES = 500


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
        self._loop: asyncio.Task | None = None
        self._steering = Steering(
            resolved, arms=self._arms, described=described or {}, replicas=self._replicas,
            clock=clock, lead_s=timing.lead_s, lock_timeout_s=timing.lock_timeout_s,
        )  # fmt: skip

    @property
    def _split(self) -> KeptSplit:
        return self._steering.split

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
            self._steering.add(observations)
        for time_s, arm, kind, text in events:
            if arm in self._arms:
                self._replicas.note_arm(replica, arm, is_down=kind == "down")
                await self._log_arms(time_s, text)
        if version > self._split.state.traffic.version:
            await self._steering.outnumber(version)
        traffic = self._split.state.traffic
        return None if traffic.version == version else traffic.model_dump(mode="json")

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
            await self._steering.adopt(config)
        except UserError as error:
            return _error(str(error), 400)
        return views.without_nan(self._overview())

    async def _answer(self, asked: Any, who: str) -> dict[str, Any]:
        if isinstance(asked, Show):
            return self._overview()
        if isinstance(asked, Log):
            return await self._log(asked.last)
        if isinstance(asked, Report):
            return await self._report()
        assert isinstance(asked, Changing)
        change = await self._steering.change(asked, who)
        late = await self._replicas.wait_for(
            change.state.traffic.version, timeout_s=self._timing.confirm_timeout_s
        )
        if change.action == "stop":
            # A slow store does not keep the person waiting: it is written all the same.
            record = self._record(await self._report(), final=True)
            await asyncio.wait({record}, timeout=self._timing.record_timeout_s)
        return {**self._overview(), "late": late}

    def _overview(self) -> dict[str, Any]:
        results, now = self._split.results, self._clock()
        evaluated = views.evaluation_view(
            self._steering.last, failed=self._steering.failed, count=results.evaluations
        )
        return {
            **views.overview(
                self._split.state, results.arms, self._steering.compare(results), arms=self._arms,
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

    async def _log(self, last: int) -> dict[str, Any]:
        entries, unreadable = await asyncio.to_thread(self._split.audit.read, last)
        dumped = [entry.model_dump(mode="json") for entry in entries]
        return {"entries": dumped, "unreadable": unreadable}

    async def _report(self) -> dict[str, Any]:
        log = await self._log(_REPORT_ENTRIES)
        statistics = self._split.results.statistics.to_json()
        return {**self._overview(), "statistics": statistics, "log": log["entries"]}

    # Life

    async def evaluate(self) -> None:
        """Evaluate the guard once: roll back, go on with a ramp, or leave everything."""
        await self._steering.evaluate()

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
                if self._split.is_standby and not await self._steering.take_over():
                    continue
                await self._steering.evaluate()
                # Replicas that are gone no longer miss an arm.
                await self._log_arms(self._clock(), "no replica misses it any more")
                await self._steering.save()
                if self._publish is not None:
                    self._publish(self._overview())
                await self._record_left_open()
                is_due = self._clock() - recorded >= self._split.config.record_period_s
                if is_due and self._recording.is_idle and not self._split.state.ended:
                    recorded = self._clock()
                    self._record(await self._report(), final=False)
            except Exception:
                logger.exception("the split was not evaluated or saved; trying again")

    # Records

    def _record(self, report: dict[str, Any], *, final: bool) -> asyncio.Task:
        """Record the running experiment in the background."""
        began = self._split.state.began

        async def started(run_id: str) -> None:
            await self._steering.name_run(run_id, began=began)

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
                left.state, left.results.arms, self._steering.compare(left.results),
                arms=tuple(left.results.arms), rules=self._split.config.guard, now=self._clock(),
            )  # fmt: skip
            report = {**view, "statistics": left.results.statistics.to_json(), "log": []}
            self._recording.begin(
                views.without_nan(report), left.run_id, final=True, started=started
            )


def _error(message: str, code: int) -> dict[str, Any]:
    kind = "invalid_request_error" if code < 500 else "internal_error"
    return {"error": {"message": message, "type": kind, "code": code}}


