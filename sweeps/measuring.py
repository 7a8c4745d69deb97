"""Measure one engine setting at its loads: start it, let `bench` do the measuring, end it.

`SweepConfig.measure` names the function that does this, `serve_and_bench` unless told otherwise.
Another one gets the same arguments: the sweep's configuration, the setting, the loads that are
missing, and a function to call once its engine answers. It yields a Measurement for each load, in
order. An exception of `carryover.errors` says that the setting cannot be measured, and why.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from carryover.errors import ConfigError, ServingError
from carryover.serving.config import ServeConfig, check_drafters
from carryover.serving.keys import SecurityConfig
from sweeps.settings import Load, Measurement, Setting, SweepConfig

Measure = Callable[
    [SweepConfig, Setting, Sequence[Load], Callable[[], None]], Iterator[Measurement]
]

START_TIMEOUT_S = 1800.0
# for a former engine of this sweep, on the same device, to be gone
FREE_TIMEOUT_S = 120.0
END_TIMEOUT_S = 30.0
_POLL_S = 0.1
_LOG_LINES = 60
# of the trial's own Ray worker, which would make the engine's Ray join the sweep's cluster; thread
# counts are Ray's for the trial, and chosen anew for the engine
_OWN_VARIABLES = (
    "RAY_", "OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "CARRYOVER_GUARDED_BY", "PYTHONPATH",
)  # fmt: skip


def measure_function(name: str) -> Measure:
    """The function that `module:function` names.

    Raises:
        ConfigError: there is none.
    """
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"measure {name!r} cannot be imported ({error}); give module:function of an installed "
            "package"
        ) from None


def serve_and_bench(
    config: SweepConfig, setting: Setting, loads: Sequence[Load], ready: Callable[[], None]
) -> Iterator[Measurement]:
    """Serve a setting as `platform serve` would, and bench it as `platform bench online` would.

    Raises:
        ConfigError: the setting cannot be served, such as a proposal length above the checkpoint's.
        ServingError: its engine did not start, or requests failed.
    """
    from carryover.bench import online

    # bench sends no keys, and measures the engine
    application = setting.application(config.serve).model_copy(
        update={"security": SecurityConfig()}
    )
    check_drafters(application)
    log = config.out / "logs" / f"{setting.name}.log"
    # told how many cores a trial takes, Ray puts several on a node
    alone = config.serve.resources.device == "gpu" or config.resources.cpus is None
    with served(application, log=log, sweep=config.out, alone=alone) as endpoint:
        ready()
        for load in loads:
            began = time.monotonic()
            bench = online.OnlineConfig(
                url=endpoint.url,
                arms=[setting.name],
                prompts=config.prompts,
                num_prompts=config.num_prompts,
                concurrency=load.concurrency,
                max_tokens=config.max_tokens,
                temperature=load.temperature,
                seed=config.seed,
                out=config.out / "requests" / setting.name,
                report=False,  # a sweep has a report of its own
            )
            result = online.run(bench)
            stored = sum(f.stat().st_size for f in result.folder.rglob("*") if f.is_file())
            yield Measurement(
                setting.name, load, result.summaries[setting.name].metrics(),
                wall_s=time.monotonic() - began, stored_bytes=stored,
            )  # fmt: skip


@dataclass(frozen=True)
class Served:
    """An engine that answers at `url`."""

    url: str


@contextmanager
def served(
    application: ServeConfig, *, log: Path, sweep: Path, alone: bool = True
) -> Iterator[Served]:
    """An engine in a process tree of its own, which ends with the block or with this process.

    Args:
        application: with one arm.
        log: what its processes say.
        sweep: folder of the sweep.
        alone: let no two engines of the sweep be on one device at a time, whatever was killed.

    Raises:
        ServingError: it did not start; holds its reason and the end of its log.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "cpu") if alone else str(os.getpid())
    with (
        tempfile.TemporaryDirectory(prefix="carryover-trial-") as name,
        _held(sweep, device) as lock,
    ):
        folder = Path(name)
        free = application.model_copy(
            update={"http": application.http.model_copy(update={"port": 0})}
        )
        (folder / "application.json").write_text(free.model_dump_json())
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith(_OWN_VARIABLES)
        }
        with log.open("ab") as said:
            process = subprocess.Popen(
                [
                    sys.executable, "-P", "-m", "carryover.guardian",
                    sys.executable, "-P", "-m", "sweeps.host", name,
                ],
                cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=said, stderr=said,
                pass_fds=[lock], start_new_session=True,
            )  # fmt: skip
        try:
            yield Served(_wait(process, folder, log)["url"])
        finally:
            process.stdin.close()
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                # the guardian below it ends the rest
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_TIMEOUT_S)
                process.kill()
                process.wait()


@contextmanager
def _held(sweep: Path, device: str) -> Iterator[int]:
    """Hold the device: a lock that the engine's guardian inherits, so it lasts as long as that."""
    key = hashlib.sha256(f"{sweep} {device}".encode()).hexdigest()[:16]
    file = Path(tempfile.gettempdir()) / f"carryover-{os.getuid()}-{key}.lock"
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        deadline = time.monotonic() + FREE_TIMEOUT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise ServingError(
                        f"another engine of this sweep still holds {device!r} after "
                        f"{FREE_TIMEOUT_S:.0f} s; end it, then resume"
                    ) from None
                time.sleep(_POLL_S)
        yield descriptor
    finally:
        os.close(descriptor)


def _wait(process: subprocess.Popen, folder: Path, log: Path) -> dict[str, str]:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        if (folder / "ready.json").exists():
            return json.loads((folder / "ready.json").read_text())
        if (folder / "failed.json").exists():
            raise ServingError(json.loads((folder / "failed.json").read_text())["reason"])
        if ended:
            break
        time.sleep(_POLL_S)
    state = f"ended with status {process.returncode}" if process.poll() is not None else "hangs"
    raise ServingError(f"the engine's process {state}; the end of its log:\n{tail(log)}")


def tail(log: Path, lines: int = _LOG_LINES) -> str:
    """The last lines of a log; empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 64 * 1024))
            return b"\n".join(file.read().splitlines()[-lines:]).decode(errors="replace")
    except FileNotFoundError:
        return ""
