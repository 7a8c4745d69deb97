"""No process outlives the command that started it, however that command ends.

vLLM's engine and worker processes survive a killed parent, and Ray's daemons start sessions of
their own, so neither process groups nor exit handlers are enough. `guard()` therefore puts two
small processes above the one that works:

    caller (the pid the user sees) -> reaper -> worker (the same command line again)

All three are Linux *child subreapers* or descend from one, so that an orphan at any depth becomes
a child of the reaper (or, if that one is killed, of the caller) instead of escaping to init. When
the worker ends, the reaper ends whatever is left below it; when the caller is killed, the reaper
notices through a pipe, and ends everything; when the reaper is killed, the caller does.

The worker starts by `exec`, which also lets its environment (thread counts, LD_PRELOAD) be chosen.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

WORKER_MARK = "CARRYOVER_GUARDED_BY"
GRACE_S = 20.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def guard(
    *, environment: Mapping[str, str] | None = None, argv: Sequence[str] | None = None
) -> None:
    """Continue in a worker process whose whole process tree ends with this command.

    Returns at once in the worker. In the process that the user started it never returns: it
    waits, forwards SIGTERM, and exits with the worker's status. Call it before heavy imports.

    Args:
        environment: variables to set for the worker and all that it starts.
        argv: command line of the worker; default: this command's own.
    """
    if os.environ.get(WORKER_MARK) == str(os.getppid()):
        signal.signal(signal.SIGTERM, _terminate)
        return
    if not sys.platform.startswith("linux"):
        os.environ.update(environment or {})
        return
    sys.stdout.flush()
    sys.stderr.flush()
    command = list(argv or [sys.executable, "-m", "carryover", *sys.argv[1:]])
    os._exit(_supervise(command, {**os.environ, **(environment or {})}))


def leftovers() -> list[tuple[int, str]]:
    """Engine processes whose parent is gone: (pid, title) of what an unguarded run left behind."""
    import psutil

    found = []
    for process in psutil.process_iter(["pid", "ppid", "name", "cmdline"]):
        title = " ".join(process.info["cmdline"] or []) or process.info["name"] or ""
        if process.info["ppid"] == 1 and (
            "VLLM::" in title or "VLLM::" in (process.info["name"] or "")
        ):
            found.append((process.info["pid"], title))
    return found


def end_tree(root: int, *, grace_s: float = GRACE_S) -> None:
    """End every descendant of `root`: SIGTERM, then SIGKILL to what is left after `grace_s`."""
    import psutil

    deadline = time.monotonic() + grace_s
    asked: set[int] = set()
    while True:
        _collect_zombies()
        try:
            alive = [
                process
                for process in psutil.Process(root).children(recursive=True)
                if process.status() != psutil.STATUS_ZOMBIE
            ]
        except psutil.NoSuchProcess:
            alive = []
        if not alive:
            return
        overdue = time.monotonic() > deadline
        for process in alive:
            try:
                if overdue:
                    process.kill()
                elif process.pid not in asked:
                    process.terminate()
                    asked.add(process.pid)
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.05)


def _supervise(command: list[str], environment: dict[str, str]) -> int:
    caller = os.getpid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    alive_read, alive_write = os.pipe()
    reaper = os.fork()
    if reaper == 0:
        os.close(alive_write)
        os._exit(_reap(caller, alive_read, command, environment))
    os.close(alive_read)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: _signal(reaper, signal.SIGTERM))
    status = _wait(reaper)
    end_tree(caller, grace_s=2.0)
    return status


def _reap(caller: int, alive: int, command: list[str], environment: dict[str, str]) -> int:
    """Body of the reaper: start the worker, wait for it or for the caller's death, clean up."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    reaper = os.getpid()
    worker = os.fork()
    if worker == 0:
        os.close(alive)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != reaper:
            os._exit(1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _exec(command, {**environment, WORKER_MARK: str(reaper)})
    asked_at: list[float] = []

    def ask(*_: object) -> None:
        asked_at.append(time.monotonic())
        _signal(worker, signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, ask)
    status = None
    while status is None:
        readable, _, _ = select.select([alive], [], [], 0.1)
        if readable and not asked_at:
            ask()
        if readable:
            time.sleep(0.1)
        if asked_at and time.monotonic() - asked_at[0] > GRACE_S:
            _signal(worker, signal.SIGKILL)
        status = _poll(worker)
    end_tree(reaper, grace_s=5.0)
    return status


def _exec(command: list[str], environment: dict[str, str]) -> NoReturn:
    try:
        os.execve(command[0], command, environment)
    except OSError as error:
        os.write(2, f"cannot start {command[0]}: {error}\n".encode())
    os._exit(1)


def _terminate(*_: object) -> NoReturn:
    """SIGTERM unwinds the worker like Ctrl-C does, so that `finally` blocks run."""
    raise KeyboardInterrupt


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _poll(pid: int) -> int | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    return None if done == 0 else _exit_code(status)


def _wait(pid: int) -> int:
    _, status = os.waitpid(pid, 0)
    return _exit_code(status)


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _collect_zombies() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return
