"""No process outlives the command that started it, however that command ends.

vLLM's engine and worker processes survive a killed parent, and Ray's daemons start sessions of
their own, so neither process groups nor exit handlers are enough. `guard()` therefore puts two
small processes above the one that works:

    caller (the pid the user sees) -> reaper -> worker (the same command again)

Caller and reaper are Linux *child subreapers*: an orphan at any depth becomes a child of the
reaper (or, if that one is killed, of the caller) instead of escaping to init. When the worker
ends, the reaper ends whatever is left below it; when the caller is killed, the reaper notices
through a pipe, and ends everything; when the reaper is killed, the worker dies with it and the
caller ends the rest. Where all of them were killed at once, the next guarded command finds what
is left by a mark in its environment.

Reaper and worker have a session of their own, without a terminal. Ctrl-C thus reaches the worker
alone and once, which then stops its engines in order, and a closed terminal or Ctrl-Z nothing but
the caller. Ctrl-C once asks; a second time interrupts the cleaning up; a third time kills.

The worker starts by `exec`, which also lets its environment (thread counts, LD_PRELOAD) be chosen.
`python -m carryover.guardian COMMAND ...` runs any command like this, in the engine's environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import psutil

GUARD_VARIABLE = "CARRYOVER_GUARDED_BY"
# within the 30 s that Kubernetes gives: the worker's own time, then that of what it leaves behind
GRACE_S = 20.0
ORPHAN_GRACE_S = 5.0
INTERRUPTS_TO_KILL = 3
_POLL_S = 0.1
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ENGINE_TITLE = "VLLM::"


def guard(
    *, environment: Mapping[str, str] | None = None, argv: Sequence[str] | None = None
) -> None:
    """Continue in a worker process whose whole process tree ends with this command.

    Returns at once in the worker. In the process that the user started it never returns: it
    waits, forwards signals, and exits with the worker's status (143 after SIGTERM, 129 after
    SIGHUP, unless the worker still ended well). Call it before heavy imports, while there is one
    thread. Where Linux's means are absent it only sets the environment.

    Args:
        environment: variables to set for the worker and all that it starts.
        argv: command line of the worker; default: this command's own.
    """
    guardian, _, _ = os.environ.get(GUARD_VARIABLE, "").partition(":")
    if guardian == str(os.getppid()):
        signal.signal(signal.SIGTERM, _terminate)
        return
    if not sys.platform.startswith("linux"):
        os.environ.update(environment or {})
        return
    command = list(argv or [sys.executable, "-P", "-m", "carryover", *sys.argv[1:]])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_supervise(command, {**os.environ, **(environment or {})}))


def identity(pid: int) -> str:
    """`pid:start`, which no other process of this machine's pid space will ever have.

    Raises:
        ProcessLookupError: no such process, or one that has ended.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            # the name before the last parenthesis may hold anything
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        raise ProcessLookupError(pid) from None
    if fields[0] in "ZX":
        raise ProcessLookupError(pid)
    return f"{pid}:{fields[19]}"


def is_running(process: str) -> bool:
    """Whether the process that an `identity()` names is still there."""
    try:
        return identity(int(process.partition(":")[0])) == process
    except (ValueError, ProcessLookupError):
        return False


def leftovers(*, marked_only: bool = False) -> list[psutil.Process]:
    """Processes that earlier commands of this user left behind, because their guardians are gone.

    Args:
        marked_only: leave out engines that no command of ours is known to have started.
    """
    import psutil

    if not sys.platform.startswith("linux"):
        return []
    found = []
    space = os.stat("/proc/self/ns/pid").st_ino
    for process in psutil.process_iter():
        try:
            if os.stat(f"/proc/{process.pid}/ns/pid").st_ino != space:
                continue  # in a container, where the guardian's number is another process's
            mark = process.environ().get(GUARD_VARIABLE)
            stray = not is_running(mark) if mark else _is_stray_engine(process)
            if stray and (mark or not marked_only):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def _is_stray_engine(process: psutil.Process) -> bool:
    return process.ppid() == 1 and process.name().startswith(_ENGINE_TITLE)


def end_processes(
    processes: Sequence[psutil.Process], *, grace_s: float = ORPHAN_GRACE_S
) -> list[psutil.Process]:
    """End these processes and all below them: SIGTERM, and SIGKILL after `grace_s`.

    Returns those that are still there, which only the kernel can cause.
    """
    import psutil

    targets = list(processes)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            targets += process.children(recursive=True)
    for process in targets:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(targets, timeout=grace_s)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return psutil.wait_procs(alive, timeout=ORPHAN_GRACE_S)[1]


def _supervise(command: list[str], environment: dict[str, str]) -> int:
    """Body of the caller: start the reaper, forward signals, return the exit status."""
    # what the shell told this command to ignore (nohup, a background job) stays ignored
    forwarded = [n for n in _FORWARDED if signal.getsignal(n) is not signal.SIG_IGN]
    # until both sides have their handlers, signals wait
    signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    alive_read, alive_write = os.pipe()
    reaper = os.fork()
    if reaper == 0:
        os.close(alive_write)
        os._exit(_reap(alive_read, command, environment, forwarded))
    os.close(alive_read)
    received: list[int] = []

    def forward(number: int, _: object) -> None:
        received.append(number)
        _signal(reaper, number)

    for number in forwarded:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, forwarded)
    _, waited = os.waitpid(reaper, 0)
    status = _exit_code(waited)
    _end_descendants(grace_s=ORPHAN_GRACE_S / 2)
    asked = [number for number in received if number != signal.SIGINT]
    return 128 + asked[0] if asked and status != 0 else status


def _reap(alive: int, command: list[str], environment: dict[str, str], forwarded: list[int]) -> int:
    """Body of the reaper: start the worker, wait for it or for the caller's death, clean up."""
    os.setsid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _end_leftovers()
    reaper = os.getpid()
    mark = identity(reaper)
    worker = os.fork()
    if worker == 0:
        os.close(alive)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != reaper:
            os._exit(1)
        # SIGINT too where the caller ignores it: here it comes from the reaper alone
        for number in {*forwarded, signal.SIGINT}:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, forwarded)
        # process titles must not overwrite the mark that leftovers are known by
        _exec(command, {**environment, GUARD_VARIABLE: mark, "SPT_NOENV": "1"})
    received: list[int] = []
    for number in forwarded:
        signal.signal(number, lambda number, _: received.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, forwarded)
    status = _watch(worker, alive, received)
    stubborn = _end_descendants(grace_s=ORPHAN_GRACE_S)
    if stubborn:
        _say(f"processes {stubborn} cannot be ended; the kernel holds them")
    return status


def _watch(worker: int, alive: int, received: list[int]) -> int:
    """Pass signals on to the worker until it ends; return its exit status.

    SIGTERM reaches the worker as SIGINT: Ray replaces a driver's handler of SIGTERM by one that
    kills the cluster under it, while Ctrl-C always unwinds it in order.
    """
    watched, interrupts, deadline = [alive], 0, inf
    while True:
        status = _collect(worker)
        if status is not None:
            break
        readable, _, _ = select.select(watched, [], [], _POLL_S)
        if readable:  # the pipe's other end closed: the caller was killed
            watched.clear()
            received.append(signal.SIGTERM)
            deadline = min(deadline, time.monotonic() + ORPHAN_GRACE_S)
        while received:
            if received.pop(0) == signal.SIGINT:
                interrupts += 1
                patient = interrupts < INTERRUPTS_TO_KILL
                _signal(worker, signal.SIGINT if patient else signal.SIGKILL)
            else:
                deadline = min(deadline, time.monotonic() + GRACE_S)
                if not interrupts:
                    interrupts = 1
                    _signal(worker, signal.SIGINT)
        if time.monotonic() > deadline:
            _say("the command did not stop in time and is killed")
            _signal(worker, signal.SIGKILL)
            deadline = time.monotonic() + GRACE_S
    if status == 128 + signal.SIGKILL and deadline == inf and not interrupts:
        _say("the command was killed (SIGKILL); most often the machine ran out of memory")
    if status >= 128 and os.isatty(2):
        os.write(2, b"\x1b[?25h")  # a progress bar that was killed leaves the cursor hidden
    return status


def _end_leftovers() -> None:
    stray = leftovers(marked_only=True)
    if stray:
        _say(f"ending {len(stray)} processes that an earlier command left behind")
        end_processes(stray, grace_s=ORPHAN_GRACE_S)


def _end_descendants(*, grace_s: float) -> list[int]:
    """End all that is below this subreaper; returns the pids that could not be ended.

    Having no child is proof that nothing is left, since every orphan becomes a child here.
    """
    import psutil

    me = psutil.Process()
    deadline = time.monotonic() + grace_s
    asked: set[int] = set()
    while _collect_all():
        below = [process.pid for process in me.children(recursive=True)]
        overdue_s = time.monotonic() - deadline
        if overdue_s > GRACE_S:
            return below
        for pid in below:
            if overdue_s > 0:
                _signal(pid, signal.SIGKILL)
            elif pid not in asked:
                asked.add(pid)
                _signal(pid, signal.SIGTERM)
                _signal(pid, signal.SIGCONT)
        time.sleep(_POLL_S / 5)
    return []


def _collect(worker: int) -> int | None:
    """Wait for ended children, adopted ones included; the worker's exit status once it ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return 1
        if pid == 0:
            return None
        if pid == worker:
            return _exit_code(status)


def _collect_all() -> bool:
    """Wait for ended children; whether any other is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return False
    return True


def _exec(command: list[str], environment: dict[str, str]) -> NoReturn:
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        _say(f"cannot start {command[0]}: {error.strerror}")
    os._exit(127)


def _terminate(*_: object) -> NoReturn:
    """SIGTERM unwinds the worker like Ctrl-C does, so that `finally` blocks run; but only once."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    raise KeyboardInterrupt


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _say(message: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{message}\n".encode())


def main() -> None:
    """Run the command line that follows, guarded, in the engine's environment."""
    from carryover.runtime import engine_environment

    if len(sys.argv) < 2:
        sys.exit("usage: python -m carryover.guardian COMMAND [ARGUMENT ...]")
    os._exit(_supervise(sys.argv[1:], {**os.environ, **engine_environment()}))


if __name__ == "__main__":
    main()
