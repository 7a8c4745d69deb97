"""Measuring functions without an engine, which sweeps in tests call by import name."""

import os
import time
import zlib
from pathlib import Path

from sweeps.settings import Measurement


def figures_of(setting, load):
    """Figures as an engine might give: long proposals pay at few clients, and cost at many."""
    length = setting.num_speculative_tokens or 0
    skill = 0.7 if setting.arm == "carryover" else 0.6
    accepted = 1 + skill / (1 + 0.3 * load.temperature) * length**0.5 if length else 1.0
    gain = accepted / (1 + 0.01 * length * load.concurrency)
    rate = 20.0 * load.concurrency**0.8 * gain
    found = {
        "output_tokens_per_s": rate, "output_tokens_per_s.low": 0.95 * rate,
        "output_tokens_per_s.high": 1.05 * rate, "tpot_ms.p95": 1000 * load.concurrency / rate,
        "requests": 8.0, "failed": 0.0, "output_tokens": 512.0, "measured_s": 512.0 / rate,
    }  # fmt: skip
    return found | ({"acceptance_length": accepted} if length else {})


def measure(config, setting, loads, ready):
    """Instant."""
    ready()
    for load in loads:
        yield Measurement(setting.name, load, figures_of(setting, load), 0.5, 1000)


def slow(config, setting, loads, ready):
    """A second for each load, which leaves time to kill; its process can be found by a file."""
    mark = Path(config.out) / "pids" / str(os.getpid())
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.write_text(setting.name)
    ready()
    for load in loads:
        time.sleep(1.0)
        yield Measurement(setting.name, load, figures_of(setting, load), 1.0, 1000)


def mortal(config, setting, loads, ready):
    """Every fiftieth setting dies in its first attempt, after its first load."""
    ready()
    for number, load in enumerate(loads):
        mark = Path(config.out) / "died" / setting.name
        if number == 1 and zlib.crc32(setting.name.encode()) % 50 == 0 and not mark.exists():
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
            os._exit(1)
        yield Measurement(setting.name, load, figures_of(setting, load), 0.01, 1000)
