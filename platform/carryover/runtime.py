"""Process environment in which vLLM's CPU engine is fast: thread counts and preloaded libraries.

vLLM's CPU backend wants one OpenMP thread per physical core, bound, Intel's OpenMP runtime
(installed by pip into the environment's `lib/`) and tcmalloc (a system package, optional). All
must be in place before the process starts, so commands pass `engine_environment()` to the
guardian. What the user has set is kept. Shells get the same with
`eval "$(python -m carryover.runtime)"`.
"""

from __future__ import annotations

import glob
import os
import shlex
import sys
from pathlib import Path

_LIBRARY_FOLDERS = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/lib/*-linux-gnu")


def engine_environment() -> dict[str, str]:
    """Variables to set for a process that starts vLLM engines; empty where a GPU is visible."""
    environment = {
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if not has_gpu():
        cores = usable_cores()
        environment["OMP_NUM_THREADS"] = str(len(cores))
        environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        preload = [str(path) for path in (find_libiomp(), find_tcmalloc()) if path is not None]
        # Otherwise Intel's runtime pins every forked child, all of Ray's included, to one core.
        environment["KMP_AFFINITY"] = "none"
        present = os.environ.get("LD_PRELOAD", "").split(":")
        environment["LD_PRELOAD"] = ":".join(dict.fromkeys(p for p in [*preload, *present] if p))
    return {
        name: value
        for name, value in environment.items()
        if name == "LD_PRELOAD" or name not in os.environ
    }


def has_gpu() -> bool:
    """Whether an NVIDIA device node is visible; looks at /dev alone, so it costs nothing."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and bool(glob.glob("/dev/nvidia[0-9]*") or glob.glob("/dev/dxg"))


def has_fast_bfloat16() -> bool:
    """Whether the CPU has matrix instructions for bfloat16 (AVX512-BF16 or AMX)."""
    try:
        flags = Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def usable_cores() -> list[int]:
    """One logical CPU per physical core among those that this process may run on.

    A container's CPU quota counts: threads beyond it would only wait for each other.
    """
    allowed = (
        sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else list(range(os.cpu_count() or 1))
    )
    first_of_core: dict[str, int] = {}
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        key = siblings.read_text().strip() if siblings.exists() else str(cpu)
        first_of_core.setdefault(key, cpu)
    cores = sorted(first_of_core.values())
    return cores[: max(1, int(_cpu_quota()))] if _cpu_quota() < len(cores) else cores


def _cpu_quota(file: Path = Path("/sys/fs/cgroup/cpu.max")) -> float:
    """CPUs that the container may use at once; infinite without a limit."""
    try:
        quota, period = file.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return float("inf")


def find_libiomp() -> Path | None:
    """Intel's OpenMP runtime in this environment, or None."""
    path = Path(sys.prefix) / "lib" / "libiomp5.so"
    return path if path.exists() else None


def find_tcmalloc() -> Path | None:
    """The system's tcmalloc, or None."""
    for folder in _LIBRARY_FOLDERS:
        for path in sorted(glob.glob(f"{folder}/libtcmalloc_minimal.so.4")):
            return Path(path)
    return None


if __name__ == "__main__":
    for _name, _value in engine_environment().items():
        print(f"export {_name}={shlex.quote(_value)}")
