"""The state of this machine that moves a benchmark's figures: clock, governor, other work."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from carryover.runtime import has_gpu

BUSY_SHARE = 0.5
_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")


def machine_state() -> dict[str, Any]:
    """Clock, governor, GPUs and load of this machine; what cannot be read is left out."""
    found: dict[str, Any] = {"cores": len(psutil.Process().cpu_affinity() or [])}
    with suppress(OSError):
        found["governor"] = _GOVERNOR.read_text().strip()
    clock = psutil.cpu_freq()
    if clock is not None and clock.current:
        found["clock_mhz"] = round(clock.current)
    if has_gpu() and shutil.which("nvidia-smi"):
        found["gpus"] = _gpus()
    found["load_1_min"] = round(os.getloadavg()[0], 2)
    return found


def busy_note(state: dict[str, Any]) -> str | None:
    """A sentence if the machine was at work before the bench began."""
    load, cores = state["load_1_min"], state["cores"]
    if not cores or load <= BUSY_SHARE * cores:
        return None
    return (
        f"the machine was busy when the bench began (load {load:g} on {cores} cores); if servers "
        "or engines run on it, times are longer and intervals wider than they need be"
    )


def _gpus() -> list[str]:
    """Name and clock of each GPU, asked for without occupying any of its memory."""
    fields = "name,clocks.sm,clocks.max.sm"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []
