"""The ingress replicas as the controller sees them: alive, up to date, and counted once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

# Replicas come and go for months; of those that are gone only the last ones matter.
MAX_REMEMBERED = 1000


@dataclass
class Replica:
    """One ingress replica.

    Attributes:
        version: of the split that it follows.
        seen_s: time of its last call, seconds since the epoch.
        sequence: number of its last batch.
        dropped: observations that did not fit its buffer, ever.
        down: arms that do not answer it.
    """

    version: int
    seen_s: float
    sequence: int = 0
    dropped: int = 0
    down: set[str] = field(default_factory=set)


class Replicas:
    """All replicas that ever called, the latest callers last.

    Args:
        clock: seconds since the epoch.
        timeout_s: a replica silent for longer is gone.

    Attributes:
        logged_down: arms that are down as far as the audit log says.
    """

    def __init__(self, *, clock: Callable[[], float], timeout_s: float) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._known: OrderedDict[str, Replica] = OrderedDict()
        self._dropped_by_gone = 0
        self.logged_down: set[str] = set()
        self._called = asyncio.Event()

    def note(self, name: str, *, version: int, sequence: int, dropped: int) -> bool:
        """Take note of a call; returns whether its batch is new (not delivered before)."""
        replica = self._known.setdefault(name, Replica(version, self._clock()))
        is_new = sequence == 0 or sequence > replica.sequence
        replica.version, replica.seen_s, replica.dropped = version, self._clock(), dropped
        replica.sequence = max(replica.sequence, sequence)
        self._known.move_to_end(name)
        while len(self._known) > MAX_REMEMBERED:
            _, gone = self._known.popitem(last=False)
            self._dropped_by_gone += gone.dropped
        self._called.set()
        return is_new

    def live(self) -> dict[str, Replica]:
        """Replicas that called lately."""
        oldest = self._clock() - self._timeout_s
        return {name: found for name, found in self._known.items() if found.seen_s >= oldest}

    @property
    def dropped(self) -> int:
        """Observations that did not fit a buffer, of all replicas."""
        return self._dropped_by_gone + sum(found.dropped for found in self._known.values())

    def note_arm(self, name: str, arm: str, *, is_down: bool) -> None:
        """Take note that an arm stopped, or began, to answer a replica that has called."""
        down = self._known[name].down
        (down.add if is_down else down.discard)(arm)

    def down(self) -> set[str]:
        """Arms that do not answer some live replica."""
        return set().union(*(found.down for found in self.live().values()))

    async def wait_for(self, version: int, *, timeout_s: float) -> list[str]:
        """Wait until every live replica follows a version, or a later one.

        Returns:
            Names of those that do not by then.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            self._called.clear()
            late = sorted(n for n, found in self.live().items() if found.version < version)
            left = deadline - loop.time()
            if not late or left <= 0:
                return late
            try:
                # A replica that died is no longer waited for, so look again after a while.
                await asyncio.wait_for(self._called.wait(), min(left, 0.5))
            except TimeoutError:
                continue

    def to_json(self) -> dict:
        """What must survive a restart: which batches were counted, and what is down."""
        return {
            "dropped_by_gone": self._dropped_by_gone,
            "logged_down": sorted(self.logged_down),
            "known": {
                name: {**asdict(found), "down": sorted(found.down)}
                for name, found in self._known.items()
            },
        }

    def restore(self, values: dict) -> None:
        """Inverse of `to_json`."""
        self._dropped_by_gone = values["dropped_by_gone"]
        self.logged_down = set(values["logged_down"])
        for name, found in values["known"].items():
            self._known[name] = Replica(**{**found, "down": set(found["down"])})
