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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from carryover.errors import ConfigError, ServingError, UserError
from carryover.serving import views
from carryover.serving.actions import Changing, Log, Report, Show, parse
from carryover.serving.audit import AuditEntry
from carryover.serving.changes import Change, next_step, renumber, roll_back
from carryover.serving.configured import adopt, begin, what_changed, wishes
from carryover.serving.evaluation import Evaluation, compare_arms, evaluate
from carryover.serving.replicas import Replicas
from carryover.serving.results import Results
from carryover.serving.state_folder import Saved, StateFolder
from carryover.serving.traffic import TrafficConfig

logger = logging.getLogger(__name__)

# Between two calls of an ingress replica.
HEARTBEAT_S = 0.5
_MAX_TEXT = 1000
_REPORT_ENTRIES = 500


@dataclass(frozen=True)
class Timing:
    """How long things take between controller and replicas, in seconds.

    Attributes:
        replica_timeout_s: a replica silent for longer is gone.
        lead_s: from a change to the instant at which replicas change over: two heartbeats, so
            that all know of it by then.
        confirm_timeout_s: how long a change waits for confirmations.
    """

    replica_timeout_s: float = 6 * HEARTBEAT_S
    lead_s: float = 2 * HEARTBEAT_S
    confirm_timeout_s: float = 5.0


class TrafficController:
    """Decides the split of one application.

    Args:
        config: the resolved `traffic:` section, as a mapping (it crosses processes).
        arms: names of all arms, the control first.
        described: by arm, what it is; statistics begin anew when that changes.
        clock: seconds since the epoch.
        timing: between controller and replicas.
        recorder: keeps the experiment elsewhere (`ExperimentRecorder`); None: nowhere.
        publish: gets the overview after each evaluation, for metrics; None: nobody.

    Raises:
        ConfigError: the section does not fit the arms.
        ServingError: another controller uses the state folder, or it is damaged.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        arms: Sequence[str],
        described: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.time,
        timing: Timing = Timing(),
        recorder: Any = None,
        publish: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._arms, self._described = tuple(arms), dict(described or {})
        self._config = self._parse(config)
        self._clock, self._timing = clock, timing
        self._recorder, self._publish = recorder, publish
        self._replicas = Replicas(clock=clock, timeout_s=timing.replica_timeout_s)
        self._results = Results(self._arms)
        self._down: set[str] = set()
        self._last: Evaluation | None = None
        self._failed = self._unrecorded = ""
        self._left_open: list[tuple[dict[str, Any], str | None]] = []
        self._changing, self._recording = asyncio.Lock(), asyncio.Lock()
        self._loop: asyncio.Task | None = None
        self._folder = StateFolder(self._config.state)
        try:
            self._restore()
        except BaseException:
            self._folder.close()
            raise

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
            self._results.add(observations)
        for event in events:
            await self._note_event(*event)
        if version > self._saved.state.traffic.version:
            await self._outnumber(version)
        traffic = self._saved.state.traffic
        return None if traffic.version == version else traffic.model_dump(mode="json")

    async def _outnumber(self, version: int) -> None:
        """The state folder was lost, or is a backup: number on from what replicas follow."""
        async with self._changing:
            if version > self._saved.state.traffic.version:
                change = renumber(self._saved.state, version + 1)
                why = f"replicas follow split {version}, which the state folder does not know"
                await self._apply(change, who="controller", why=why)

    async def _note_event(self, time_s: float, arm: str, kind: str, text: str) -> None:
        """Log that an arm went down or came up: once, however many replicas notice it."""
        if arm not in self._arms or (kind == "down") == (arm in self._down):
            return
        self._down ^= {arm}
        change = Change(self._saved.state, f"arm {kind}", {}, {"arm": arm})
        entry = change.entry(time_s=time_s, who="ingress", why=text)
        try:
            await asyncio.to_thread(self._folder.audit.append, entry)
        except OSError as error:
            logger.error("the audit log lacks that arm %s went %s: %s", arm, kind, error)

    # Admins

    async def admin(
        self, action: str, arguments: Mapping[str, Any], who: str
    ) -> dict[str, Any]:
        """Answer an admin's request; raises nothing.

        Args:
            action: one of `actions.ACTIONS`.
            arguments: of the action.
            who: for the audit log.

        Returns:
            The action's answer, or `{"error": {"message": ..., "type": ..., "code": status}}`,
            where `code` is the HTTP status.
        """
        self._ensure_running()
        try:
            return views.without_nan(await self._answer(parse(action, arguments), who))
        except UserError as error:
            return _error(str(error), 400)
        except OSError as error:
            logger.exception("admin action %s", action)
            return _error(
                f"nothing was changed: cannot write the state folder {self._folder.path}: "
                f"{error.strerror or error}; make room there", 500,
            )  # fmt: skip
        except Exception as error:
            logger.exception("admin action %s", action)
            return _error(f"{action} failed: {type(error).__name__}: {error}", 500)

    async def reconfigure_traffic(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Take a changed `traffic:` section that came with Serve's `user_config`.

        Experiment, salt, weights, shadow and guard are taken; the rest needs a restart. The same
        section again changes nothing, so every ingress replica may pass it on, and it does not
        undo what people set since.

        Returns:
            The overview, or an error as from `admin`.
        """
        try:
            section = self._parse({**self._config.model_dump(mode="json"), **config})
            new = wishes(section, self._arms, self._described)
            async with self._changing:
                change = self._adoption(section, new)
                if change is not None:
                    why = what_changed(self._saved.configured, new)
                    await self._apply(change, who="serve user_config", why=why, configured=new)
                self._config = section
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
        async with self._changing:
            now = self._clock()
            change = asked.change(
                self._saved.state, arms=self._arms, now=now, at=now + self._timing.lead_s
            )
            await self._apply(change, who=_printable(who), why=_printable(asked.why))
        late = await self._replicas.wait_for(
            change.state.traffic.version, timeout_s=self._timing.confirm_timeout_s
        )
        if change.action == "stop":
            await self._record(final=True)
        return {**self._overview(), "late": late}

    def _overview(self) -> dict[str, Any]:
        state, rules, now = self._saved.state, self._config.guard, self._clock()
        compared = compare_arms(self._results.arms, arms=self._arms, alpha=rules.alpha)
        view = views.overview(
            state, self._results.arms, compared, arms=self._arms, rules=rules, now=now
        )
        evaluated = views.evaluation_view(
            self._last, failed=self._failed, count=self._results.evaluations
        )
        return {
            **view,
            "evaluation": {**evaluated, "period_s": self._config.evaluation_period_s},
            "down": sorted(self._down),
            "replicas": views.replica_views(self._replicas.live(), now=now),
            "dropped": self._replicas.dropped,
            "unknown": self._results.unknown,
            "run_id": self._saved.run_id,
            "unrecorded": self._unrecorded,
        }

    async def _log(self, last: int) -> dict[str, Any]:
        entries, unreadable = await asyncio.to_thread(self._folder.audit.read, last)
        dumped = [entry.model_dump(mode="json") for entry in entries]
        return {"entries": dumped, "unreadable": unreadable}

    async def _report(self) -> dict[str, Any]:
        statistics = self._results.statistics.to_json()
        log = await self._log(_REPORT_ENTRIES)
        return {**self._overview(), "statistics": statistics, "log": log["entries"]}

    # Evaluation

    async def evaluate(self) -> None:
        """Evaluate the guard once: roll back, go on with a ramp, or leave everything."""
        async with self._changing:
            now, state = self._clock(), self._saved.state
            self._results.evaluations += 1
            try:
                found = evaluate(
                    state, self._results.arms, self._config.guard, arms=self._arms, now=now,
                    number=self._results.evaluations,
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
                change = next_step(state, arms=self._arms, now=now, effective_at=at)
                await self._apply(change, who="ramp", why=found.why)

    async def save(self) -> None:
        """Write the statistics to the state folder."""
        await asyncio.to_thread(self._folder.save_results, self._results_json())

    async def check_health(self) -> None:
        """Called by Ray Serve, which replaces a controller that raises."""
        self._ensure_running()

    def _ensure_running(self) -> None:
        """Start the evaluation, which needs the event loop that calls come in on."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop().create_task(self._run())
        elif self._loop.done() and not self._loop.cancelled():
            raise RuntimeError("the split is no longer evaluated") from self._loop.exception()

    async def _run(self) -> None:
        recorded, recording = self._clock(), None
        while True:
            await asyncio.sleep(self._config.evaluation_period_s)
            try:
                await self.evaluate()
                await self.save()
                if self._publish is not None:
                    self._publish(self._overview())
            except Exception:
                logger.exception("the split was not evaluated or saved; trying again")
            is_due = self._clock() - recorded >= self._config.record_period_s
            if (is_due or self._left_open) and (recording is None or recording.done()):
                recorded = self._clock()
                recording = asyncio.create_task(self._record(final=False))

    async def _record(self, *, final: bool) -> None:
        """Record the experiment; what fails is shown, and tried again the next time."""
        if self._recorder is None:
            return
        async with self._recording:
            try:
                while self._left_open:
                    report, run_id = self._left_open[0]
                    await asyncio.to_thread(self._recorder.record, report, run_id, True)
                    del self._left_open[0]
                if self._saved.state.ended and not final:
                    return
                began, report = self._saved.state.began, await self._report()
                report = views.without_nan(report)
                run_id = await asyncio.to_thread(
                    self._recorder.record, report, self._saved.run_id, final
                )
                async with self._changing:
                    if self._saved.state.began == began and run_id != self._saved.run_id:
                        saved = self._saved.model_copy(update={"run_id": run_id})
                        await asyncio.to_thread(self._folder.save, saved, is_change=False)
                        self._saved = saved
                self._unrecorded = ""
            except Exception as error:
                logger.exception("the experiment was not recorded")
                self._unrecorded = str(error) or type(error).__name__

    # State

    def _parse(self, config: Mapping[str, Any]) -> TrafficConfig:
        section = TrafficConfig.parse(config, source="traffic")
        return section.resolve(arms=self._arms, application=section.experiment or "carryover")

    def _restore(self) -> None:
        """Go on where the last controller ended, or begin; called once, before anything else."""
        now, new = self._clock(), wishes(self._config, self._arms, self._described)
        saved = self._folder.load()
        if saved is None:
            change = begin(self._config, now=now)
            entry = change.entry(time_s=now, who="configuration", why="first start")
            self._saved = Saved(state=change.state, entry=entry, configured=new)
            self._folder.save(self._saved)
            return
        self._saved = saved
        self._load_results()
        try:
            change = self._adoption(self._config, new)
        except ConfigError as error:
            # The application must start: everything goes to the control arm meanwhile.
            logger.error("the configuration's split is not taken: %s", error)
            return
        if change is not None:
            why = what_changed(saved.configured, new)
            entry = change.entry(time_s=now, who="configuration", why=why)
            following = self._following(change, entry, configured=new)
            self._folder.save(following)
            self._install(following)

    def _load_results(self) -> None:
        values = self._folder.load_results()
        if values is None or values.get("began_s") != self._saved.state.began:
            return
        try:
            self._results = Results.from_json(values["results"])
            self._replicas.restore(values["replicas"])
        except (KeyError, TypeError, ValueError) as error:
            raise ServingError(
                f"{self._folder.path / 'results.json'} is damaged ({error}); move it away to begin "
                "with empty statistics"
            ) from None

    def _results_json(self) -> dict[str, Any]:
        return {
            "experiment": self._saved.state.traffic.experiment,
            "began_s": self._saved.state.began,
            "results": self._results.to_json(),
            "replicas": self._replicas.to_json(),
        }

    def _adoption(self, section: TrafficConfig, new: dict[str, Any]) -> Change | None:
        now = self._clock()
        return adopt(
            self._saved.state, section, old=self._saved.configured, new=new, arms=self._arms,
            now=now, effective_at=now + self._timing.lead_s,
        )  # fmt: skip

    async def _apply(
        self, change: Change, *, who: str, why: str, configured: dict[str, Any] | None = None
    ) -> None:
        """Write a change, then follow it; whoever asked may go away meanwhile."""
        entry = change.entry(time_s=self._clock(), who=who, why=why)
        following = self._following(change, entry, configured=configured)

        async def write_and_follow() -> None:
            await asyncio.to_thread(self._folder.save, following)
            self._install(following)

        await asyncio.shield(asyncio.create_task(write_and_follow()))
        logger.info("split %d: %s by %s: %s", entry.version, entry.action, who, why)

    def _following(
        self, change: Change, entry: AuditEntry, *, configured: dict[str, Any] | None
    ) -> Saved:
        begins = change.state.began != self._saved.state.began
        return Saved(
            state=change.state,
            entry=entry,
            configured=self._saved.configured if configured is None else configured,
            run_id=None if begins else self._saved.run_id,
        )

    def _install(self, saved: Saved) -> None:
        """Follow a state that is on disk; an experiment that begins starts with no results."""
        before = self._saved
        if saved.state.began != before.state.began:
            self._folder.archive_results(self._results_json())
            if not before.state.ended:
                report = {**self._overview(), "statistics": self._results.statistics.to_json()}
                self._left_open.append((views.without_nan({**report, "log": []}), before.run_id))
            self._results, self._last = Results(self._arms), None
        self._saved = saved

    def close(self) -> None:
        """Save the statistics, close the record, and give the state folder back."""
        if self._loop is not None:
            self._loop.cancel()
        if self._folder.is_open:
            try:
                self._folder.save_results(self._results_json())
            finally:
                self._folder.close()
        if self._recorder is not None:
            self._recorder.close()


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

    deployed = serve.deployment(
        DeployedController,
        name=TrafficController.__name__,
        num_replicas=1,
        max_ongoing_requests=1000,
        ray_actor_options={"num_cpus": 0.1},
    )
    return deployed.bind(config.model_dump(mode="json"), list(arms), dict(described or {}))


class DeployedController(TrafficController):
    """The controller with what a deployment has besides: MLflow, metrics, an orderly end."""

    def __init__(self, config: dict[str, Any], arms: list[str], described: dict[str, Any]) -> None:
        from carryover.serving.controller_metrics import SplitMetrics
        from carryover.serving.experiment_record import ExperimentRecorder

        recorder = ExperimentRecorder(config["tracking_uri"]) if config["record"] else None
        super().__init__(
            config, arms=arms, described=described, recorder=recorder, publish=SplitMetrics()
        )

    def __del__(self) -> None:
        self.close()


def _error(message: str, code: int) -> dict[str, Any]:
    kind = "invalid_request_error" if code < 500 else "internal_error"
    return {"error": {"message": message, "type": kind, "code": code}}


def _printable(text: str) -> str:
    """Without what could forge a line or steer a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)[:_MAX_TEXT]
