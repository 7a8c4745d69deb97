"""Peak memory of this process, from Linux's own counters."""

from __future__ import annotations

from pathlib import Path


def reset_peak() -> int:
    """Forget this process's peak and return its resident set, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def status_bytes(name: str) -> int:
    """A field of `/proc/self/status`, such as VmHWM (the peak) or VmRSS.

    Raises:
        RuntimeError: not on Linux.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}; this benchmark needs Linux")
