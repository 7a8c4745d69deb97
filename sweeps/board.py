"""Where trials ask whether to go on; an actor of its own file, so that its process is small."""

from __future__ import annotations

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


class Board:
    """Where trials ask whether to go on; an actor on the driver's node."""

    def __init__(self) -> None:
        self._stopped: set[str] = set()

    def stop(self, name: str) -> None:
        """Ask a trial to end after the part that it has just reported."""
        self._stopped.add(name)

    def is_stopped(self, name: str) -> bool:
        """Whether a trial was asked to; forgets the question once it was answered."""
        if name in self._stopped:
            self._stopped.remove(name)
            return True
        return False


def make_board() -> ray.actor.ActorHandle:
    """A board on the driver's node, where no other node's end can take it away."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(Board).options(num_cpus=0, scheduling_strategy=here).remote()
