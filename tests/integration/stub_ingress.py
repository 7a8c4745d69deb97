"""An ingress without a model: it calls the controller as the real one does, and makes up requests.

Every replica writes a line whenever it takes a split over, so that a test can compare them.
"""

import asyncio
import json
import os
import time
from pathlib import Path

from carryover.serving.observations import Observation, split_name
from carryover.serving.traffic import Traffic


class StubIngress:
    """Passes admins' requests on, and reports requests that never were.

    While the file `fail` lies in the folder, the requests of the arm that it names fail.
    """

    def __init__(self, controller, folder):
        self.controller, self.folder = controller, Path(folder)
        self.name = f"stub-{os.getpid()}"
        self.version = self.sequence = 0
        self.traffic = None
        self.count = 0
        self.batch = []
        asyncio.get_running_loop().create_task(self.beat())

    async def __call__(self, request):
        """POST /admin/traffic/{action}; anything else tells who answers."""
        action = request.url.path.rpartition("/")[2]
        if "/admin/traffic/" not in request.url.path:
            return {"replica": self.name, "count": self.count}
        return await self.controller.admin.remote(action, await request.json(), "test")

    async def beat(self):
        while True:
            await asyncio.sleep(0.1)
            self.make_up_requests()
            try:
                newer = await asyncio.wait_for(
                    self.controller.exchange.remote(
                        self.name, self.version, self.batch, 0, self.sequence, []
                    ),
                    5,
                )
            except Exception:
                # the controller is away: the same batch again, under the same number
                continue
            self.batch = []
            if newer is not None:
                asyncio.get_running_loop().create_task(self.take_over(Traffic(**newer)))

    async def take_over(self, traffic):
        if traffic.version <= self.version:
            return
        self.version = traffic.version
        await asyncio.sleep(max(0, traffic.effective_at - time.time()))
        self.traffic = traffic
        line = {
            "replica": self.name, "version": traffic.version, "at": time.time(),
            "effective_at": traffic.effective_at,
        }  # fmt: skip
        with open(self.folder / "taken_over.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")

    def make_up_requests(self):
        if self.traffic is None or self.batch:
            return
        self.sequence += 1
        broken = self.folder / "fail"
        failing = broken.read_text() if broken.exists() else None
        for arm, weight in self.traffic.weights.items():
            for index in range(round(20 * weight)):
                self.count += 1
                self.batch.append(
                    Observation(
                        time_s=time.time(), arm=arm, assigned=arm, reason="weighted",
                        split=split_name(self.traffic.weights),
                        outcome="error" if arm == failing else "ok",
                        ttft_s=0.1 + index / 100, tpot_s=0.02 + index / 1000, e2e_s=1 + index / 10,
                        output_tokens=40, rounds=20, accepted=20 + index % 3, proposed=60,
                    ).to_row()
                )  # fmt: skip
