"""The Ray cluster that a job runs on: one that is there, or one of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterable

import ray

from carryover.engine_worker import EngineProcess
from carryover.local_ray import start_local_ray

# Jobs pass token ids and small records; Ray would take a third of the memory.
_OBJECT_STORE_BYTES = 200 * 2**20
_END_S = 10.0

logger = logging.getLogger(__name__)


def start_ray(address: str | None = None) -> None:
    """Connect to a Ray cluster, or start one that lives as long as this process.

    Args:
        address: of a running cluster; None takes $RAY_ADDRESS, else starts a local one.
    """
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        start_local_ray(
            object_store_memory=_OBJECT_STORE_BYTES, include_dashboard=False, **quiet
        )
    else:
        ray.init(address=address, **quiet)


def wait_for_end(processes: Iterable[EngineProcess]) -> None:
    """Wait until those of the processes that run on this machine are gone, and warn if they stay.

    Ray reports an actor as killed before its process has given back its memory.
    """
    import psutil

    here = []
    for process in processes:
        if process.host == socket.gethostname():
            with contextlib.suppress(psutil.NoSuchProcess):
                here.append(psutil.Process(process.pid))
    for process in psutil.wait_procs(here, timeout=_END_S)[1]:
        logger.warning("engine process %d has not ended", process.pid)
