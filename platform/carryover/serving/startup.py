"""Watch the arms of an application while they start."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from ray import serve

from carryover.errors import ServingError
from carryover.serving.arms import deployment_name
from carryover.serving.config import ServeConfig
from carryover.serving.failure import find_cause, read_tail
from carryover.serving.server import read_cause

POLL_S = 0.5


@dataclass(frozen=True)
class ArmState:
    """How far one arm is.

    Attributes:
        arm: its name.
        stage: `waiting for resources`, `starting a replica`, `starting the engine`, or `ready`.
        seconds: since the start.
    """

    arm: str
    stage: str
    seconds: float

    @property
    def ready(self) -> bool:
        """Whether the arm takes requests."""
        return self.stage == "ready"


Report = Callable[[list[ArmState]], None]


@dataclass
class _Watched:
    """What is known about an arm; logs are remembered because a failed replica is gone."""

    name: str
    logs: set[Path] = field(default_factory=set)
    ready_s: float | None = None


def wait_until_running(config: ServeConfig, *, report: Report | None = None) -> None:
    """Wait until every arm takes requests.

    Args:
        config: of the application that was just deployed.
        report: called about twice a second with the state of every arm.

    Raises:
        ServingError: an arm failed; gives the engine's own error and what to do.
    """
    started = time.monotonic()
    watched = [_Watched(arm.name) for arm in config.arms]
    while True:
        application = serve.status().applications[config.name]
        seconds = time.monotonic() - started
        states = []
        for arm in watched:
            overview = application.deployments.get(deployment_name(arm.name))
            replicas = list(_replicas(config.name, arm.name))
            for process in replicas:
                arm.logs |= _log_files(process)
            stage = _stage(overview, replicas)
            if stage == "ready" and arm.ready_s is None:
                arm.ready_s = seconds
            states.append(ArmState(arm.name, stage, arm.ready_s or seconds))
            if overview is not None and "failed to start" in overview.message:
                raise _failure(arm, overview.message)
        if report is not None:
            report(states)
        status = application.status.value
        if status == "RUNNING":
            return
        if status in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise ServingError(f"the application did not start: {application.message.strip()}")
        time.sleep(POLL_S)


def _stage(overview: object | None, replicas: list[psutil.Process]) -> str:
    """The stage of an arm, from Serve's view and, on this machine, from its processes."""
    if overview is not None and overview.status.value == "HEALTHY":
        return "ready"
    if any(title.startswith("VLLM::") for process in replicas for title in _child_titles(process)):
        return "starting the engine"
    return "starting a replica" if replicas else "waiting for resources"


def _replicas(application: str, arm: str) -> Iterator[psutil.Process]:
    """Replica processes of an arm on this machine."""
    title = re.compile(
        re.escape(f"ray::ServeReplica:{application}:{deployment_name(arm)}") + r"\b(?!-)"
    )
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"]
        if command and title.match(command[0]):
            yield process


def _child_titles(process: psutil.Process) -> list[str]:
    try:
        return [(child.cmdline() or [""])[0] for child in process.children(recursive=True)]
    except psutil.Error:
        return []


def _log_files(process: psutil.Process) -> set[Path]:
    """Files that a replica, and the engine below it, writes its output to."""
    found = set()
    for descriptor in (1, 2):
        try:
            found.add(Path(os.readlink(f"/proc/{process.pid}/fd/{descriptor}")))
        except OSError:
            continue
    return {path for path in found if path.is_file()}


def _failure(arm: _Watched, message: str) -> ServingError:
    logs = sorted(arm.logs)
    # The replica reports the cause itself, unless it was killed; its log is still there then.
    cause = read_cause(message)
    for text in (*map(read_tail, logs), message):
        cause = cause or find_cause(text)
    lines = [f"arm {arm.name!r} did not start"]
    if cause is None:
        lines.append(message.strip()[-2000:])
    else:
        lines[0] += f": {cause.error}"
        if cause.fix is not None:
            lines.append(f"fix: {cause.fix}")
    lines += [f"log: {path}" for path in logs if path.stat().st_size]
    return ServingError("\n".join(lines))
