"""An arm that fails as it is told to, for tests of what the ingress makes of it."""

import asyncio
import os

from carryover.bench.stub_engine import StubServer


class FaultyServer(StubServer):
    """Answers like the stub, or hangs, breaks, or dies.

    `mode` is "well", "hang" (no first token until it is well again), "break" (raises before it),
    "break midway", "die" (the process ends before the first token) or "die midway".
    """

    def __init__(self, arm, **settings):
        super().__init__(arm, **settings)
        self.mode = "well"
        self.answered = 0

    async def behave(self, mode="well", token_s=0.0):
        """Change how it fails; returns the process id."""
        self.mode, self.token_s = mode, token_s
        return os.getpid()

    async def state(self):
        """Requests under way, and answered ever."""
        return {"running": self.running, "answered": self.answered, "pid": os.getpid()}

    async def _answer(self, request, tokens, *, chat):
        self.answered += 1
        if self.mode == "hang":
            self.running += 1
            try:
                while self.mode == "hang":
                    await asyncio.sleep(0.1)
            finally:
                self.running -= 1
        if self.mode == "break":
            raise TypeError("broken as told")
        if self.mode == "die":
            os._exit(1)
        sent = 0
        async for item in super()._answer(request, tokens, chat=chat):
            yield item
            sent += 1
            if sent == 3 and self.mode == "break midway":
                raise TypeError("broken as told")
            if sent == 3 and self.mode == "die midway":
                # what was sent must have left the process
                await asyncio.sleep(0.3)
                os._exit(1)
