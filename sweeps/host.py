"""A process that serves one engine setting until the trial that started it is gone.

`python -m sweeps.host FOLDER` reads `application.json` there, and writes `ready.json` once the
engine answers, or `failed.json` with the reason. It runs a Ray cluster of its own inside what the
trial has reserved, exactly as `platform serve` does, so figures are those of `platform serve`, and
nothing of it can outlive the trial: it ends when its standard input is closed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from pathlib import Path

from carryover.durable import write_whole
from carryover.errors import UserError
from carryover.serving.config import ServeConfig


def main() -> None:
    """Serve until standard input ends."""
    folder = Path(sys.argv[1])
    over = threading.Event()
    serving = threading.Event()

    def watch() -> None:
        while sys.stdin.buffer.read(4096):
            continue
        over.set()
        if not serving.is_set():
            # nothing to unwind that the guardian above does not end
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        from carryover.serving.endpoint import running

        values = json.loads((folder / "application.json").read_text())
        # Arms are asked by name; a split of its own keeps two applications apart.
        values["traffic"] = {"state": str(folder / "traffic"), "record": False}
        application = ServeConfig.parse(values)
        with running(application) as endpoint:
            ready = {"url": endpoint.url, "metrics_url": endpoint.metrics_url}
            write_whole(folder / "ready.json", json.dumps(ready))
            serving.set()
            over.wait()
    except Exception as error:
        known = isinstance(error, UserError)
        reason = str(error) if known else traceback.format_exc()
        write_whole(folder / "failed.json", json.dumps({"reason": reason}))
        sys.exit(reason)


if __name__ == "__main__":
    main()
