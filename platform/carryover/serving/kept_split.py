"""The split and its results, in memory and on disk, over restarts and experiments."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from carryover.errors import ConfigError, ServingError
from carryover.serving.audit import AuditEntry
from carryover.serving.changes import Change, State
from carryover.serving.configured import adopt, begin, overlaid, what_changed, wishes
from carryover.serving.replicas import Replicas
from carryover.serving.results import Results
from carryover.serving.state_folder import Saved, StateFolder
from carryover.serving.traffic import TrafficConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeftOpen:
    """An experiment that another took the place of before it was stopped."""

    state: State
    results: Results
    run_id: str | None


class KeptSplit:
    """Goes on where the last controller ended, or begins.

    While another process has the state folder (an application that this one is to take the place
    of), it stands by: it follows the other's split as far as the arms are the same, and writes
    nothing.

    Args:
        config: the resolved `traffic:` section.
        arms: names of all arms, the control first.
        described: by arm, what it is.
        replicas: whose delivered batches are kept with the results.
        now: seconds since the epoch.
        effective_at: when replicas change over, if the configuration changed.
        lock_timeout_s: how long to wait for an earlier controller before standing by.

    Attributes:
        arguments: the section that the application was built with.
        config: that section with what Serve's `user_config` changed in it.
        saved: what the state folder holds, or will once it can be written.
        state: in force.
        run_id: of the experiment in MLflow; None before its first record.
        results: of the experiment.
        audit: the audit log.
        left_open: experiments whose end nobody has recorded yet.

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
        now: float,
        effective_at: float,
        lock_timeout_s: float = 0.0,
    ) -> None:
        self._arms, self._described, self._replicas = tuple(arms), dict(described), replicas
        self.arguments = self.config = config
        self.results = Results(arms)
        self.left_open: list[LeftOpen] = []
        self._folder = StateFolder(config.state, lock_timeout_s=lock_timeout_s)
        self.audit = self._folder.audit
        try:
            self._restore(config, now=now, effective_at=effective_at)
        except BaseException:
            self._folder.close()
            raise

    @property
    def state(self) -> State:
        """The state in force."""
        return self.saved.state

    @property
    def is_standby(self) -> bool:
        """Whether another process has the state folder."""
        return not self._folder.is_owner

    @property
    def is_written(self) -> bool:
        """Whether the state folder holds what is in force."""
        return self._folder.saved == self.saved

    @property
    def run_id(self) -> str | None:
        """The experiment's run in MLflow."""
        return self.saved.run_id

    def adoption(
        self, config: TrafficConfig, *, now: float, effective_at: float
    ) -> tuple[Change, str] | None:
        """What another section changes, and that in words; None: nothing.

        Raises:
            ConfigError: the change cannot be made.
        """
        old, new = self._wishes(self.config), self._wishes(config)
        change = adopt(
            self.state, config, old=old, new=new, arms=self._arms, now=now,
            effective_at=effective_at,
        )  # fmt: skip
        return None if change is None else (change, what_changed(old, new))

    def following(
        self, change: Change, entry: AuditEntry, *, user_config: Mapping[str, Any] | None = None
    ) -> Saved:
        """What the state folder will hold after a change.

        Args:
            change: from the state in force.
            entry: its line of the audit log.
            user_config: what Serve's `user_config` asked for, if that made the change.
        """
        begins = change.state.began != self.state.began
        updates: dict[str, Any] = {"state": change.state, "entry": entry}
        if begins:
            updates["run_id"] = None
        if user_config is not None:
            updates["user_config"] = dict(user_config)
        return self.saved.model_copy(update=updates)

    def write(self, following: Saved) -> None:
        """Put a change on disk; waits for it.

        Raises:
            OSError: the disk is full or gone; nothing has changed.
        """
        self._folder.save(following)

    def install(self, following: Saved) -> None:
        """Follow what is on disk now; an experiment that begins starts without results."""
        if following.state.began != self.state.began:
            self._folder.archive_results(self.results_json())
            if not self.state.ended:
                self.left_open.append(LeftOpen(self.state, self.results, self.run_id))
            self.results = Results(self._arms)
        self.saved = following

    def with_run(self, run_id: str) -> Saved:
        """What the state folder will hold once it names the experiment's run in MLflow."""
        return self.saved.model_copy(update={"run_id": run_id})

    def results_json(self) -> dict[str, Any]:
        """The results as they are now, for `write_results`."""
        return {
            "experiment": self.state.traffic.experiment,
            "began_s": self.state.began,
            "results": self.results.to_json(),
            "replicas": self._replicas.to_json(),
        }

    def write_results(self, results: dict[str, Any]) -> None:
        """Put results on disk; waits for it."""
        self._folder.save_results(results)

    def close(self) -> None:
        """Write the results and give the state folder back; does nothing the second time."""
        try:
            if self._folder.is_open and self._folder.is_owner:
                self._folder.save_results(self.results_json())
        finally:
            self._folder.close()

    def _restore(self, config: TrafficConfig, *, now: float, effective_at: float) -> None:
        saved = self._folder.load()
        if self.is_standby:
            self._stand_by(config, saved, now=now)
            return
        if saved is None:
            change = begin(config, now=now)
            entry = change.entry(time_s=now, who="configuration", why="first start")
            self.saved = Saved(
                state=change.state, entry=entry, configured=self._wishes(config)
            )
            self._folder.save(self.saved)
            return
        self.saved = saved
        self._load_results(now=now)
        old, new = saved.configured, self._wishes(config)
        if old == new:
            self.config = overlaid(config, saved.user_config, self._arms)
            return
        try:
            change = adopt(
                self.state, config, old=old, new=new, arms=self._arms, now=now,
                effective_at=effective_at,
            )  # fmt: skip
        except ConfigError as error:
            # The application must start; an experiment that has ended leaves all to the control.
            logger.error("the configuration's split is not taken: %s", error)
            return
        if change is not None:
            entry = change.entry(time_s=now, who="configuration", why=what_changed(old, new))
            following = self.following(change, entry, user_config={})
            following = following.model_copy(update={"configured": new})
            self.write(following)
            self.install(following)

    def _wishes(self, config: TrafficConfig) -> dict[str, Any]:
        return wishes(config, self._arms, self._described)

    def _stand_by(self, config: TrafficConfig, saved: Saved | None, *, now: float) -> None:
        """Follow the other's split if it is one of these arms, else what the configuration asks."""
        if saved is not None and tuple(saved.state.traffic.weights) == self._arms:
            self.saved = saved
            return
        change = begin(config, now=now)
        entry = change.entry(time_s=now, who="configuration", why="standing by")
        self.saved = Saved(state=change.state, entry=entry, configured=self._wishes(config))

    def _load_results(self, *, now: float) -> None:
        """Read the statistics; what cannot be read, as after an upgrade, is put aside and logged.

        Without a controller, replicas would begin with the configuration's weights, perhaps those
        of an arm that was rolled back: too much to pay for statistics.
        """
        try:
            values = self._folder.load_results()
            if values is None or values["began_s"] != self.state.began:
                return
            self.results = Results.from_json(values["results"])
            self._replicas.restore(values["replicas"])
        except (ServingError, KeyError, TypeError, ValueError, AttributeError) as error:
            self.results = Results(self._arms)
            kept = self._folder.put_results_aside(now)
            logger.error("the statistics cannot be read: %s; kept as %s", error, kept)
            change = Change(self.state, "statistics lost", {}, {"kept": kept.name})
            self.audit.append(change.entry(time_s=now, who="controller", why=str(error)))
