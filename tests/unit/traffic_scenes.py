"""A controller with a clock that tests move, replicas that call it, and requests to count."""

import asyncio
from contextlib import asynccontextmanager

from carryover.serving.controller import TrafficController
from carryover.serving.observations import Observation, split_name
from carryover.serving.timing import Timing
from carryover.serving.traffic import Traffic, TrafficConfig

ARMS = ("baseline", "carryover")
START = 1_800_000_000.0


class Clock:
    """Seconds since the epoch, as the test says."""

    def __init__(self, now=START):
        self.now = now

    def __call__(self):
        return self.now

    def pass_(self, seconds):
        self.now += seconds


def section(folder, **settings):
    """A `traffic:` section whose rules need few requests."""
    values = {
        "experiment": "may", "state": str(folder), "record": False,
        "guard": {"min_requests": 20}, **settings,
    }  # fmt: skip
    return TrafficConfig.parse(values)


def controller(folder, clock, *, arms=ARMS, described=None, recorder=None, timing=None, **settings):
    return TrafficController(
        section(folder, **settings).model_dump(mode="json"), arms=arms, described=described,
        clock=clock, recorder=recorder,
        timing=timing
        or Timing(lead_s=0.0, confirm_timeout_s=0.5, record_timeout_s=20, lock_timeout_s=0),
    )  # fmt: skip


class Replica:
    """An ingress replica without requests: it calls, and follows what it is told."""

    def __init__(self, owner, name="replica-1"):
        self.owner, self.name = owner, name
        self.version = self.sequence = 0
        self.traffic = None

    async def call(self, rows=(), *, dropped=0, events=(), again=False):
        self.sequence += not again
        newer = await self.owner.exchange(
            self.name, self.version, list(rows), dropped, self.sequence, list(events)
        )
        if newer is not None:
            self.traffic = Traffic.model_validate(newer)
            self.version = self.traffic.version
        return newer


@asynccontextmanager
async def calling(*replicas, every_s=0.01):
    """The replicas call in the background, and know the latest split at the end."""

    async def beat(replica):
        while True:
            await replica.call()
            await asyncio.sleep(every_s)

    tasks = [asyncio.create_task(beat(replica)) for replica in replicas]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for replica in replicas:
            await replica.call()


def requests(clock, arm, count, *, weights, outcome="ok", tpot_s=0.02, accepted=20):
    """Rows of requests that ended just now, all alike but for some jitter."""
    return [
        Observation(
            time_s=clock.now, arm=arm, assigned=arm, reason="weighted",
            split=split_name(weights), outcome=outcome, ttft_s=0.1 * (1 + index % 5 / 10),
            tpot_s=tpot_s * (1 + index % 7 / 20), e2e_s=1.0 + index % 3 / 10,
            prompt_tokens=10, output_tokens=50, rounds=20, accepted=accepted + index % 4,
            proposed=60,
        ).to_row()
        for index in range(count)
    ]  # fmt: skip
