"""Start Ray on this machine, also when it is too busy for Ray's own limit."""

from __future__ import annotations

import logging
from typing import Any

import psutil

from carryover.errors import EnvironmentProblem
from carryover.guardian import end_processes

ATTEMPTS = 3
# Ray waits 30 s for its own node to register, and nothing sets another limit.
_TOO_SLOW = "timed out during startup"

logger = logging.getLogger(__name__)


def start_local_ray(**settings: Any) -> None:
    """Start a cluster of this process's own.

    Args:
        settings: of `ray.init`, without an address.

    Raises:
        EnvironmentProblem: Ray did not start within its own limit, several times.
    """
    import ray

    for _ in range(ATTEMPTS):
        before = set(psutil.Process().children(recursive=True))
        try:
            ray.init(address="local", **settings)
            return
        except Exception as error:
            if _TOO_SLOW not in str(error):
                raise
            logger.warning("Ray did not start in time on a busy machine; trying again")
            ray.shutdown()
            # a node that is not there yet is not known to Ray either, so its processes would stay
            end_processes(list(set(psutil.Process().children(recursive=True)) - before))
    raise EnvironmentProblem(
        f"Ray did not start within its 30 s in {ATTEMPTS} attempts; this machine is too busy: end "
        "what runs on it, or use a running cluster (--address, resources.address)"
    )
