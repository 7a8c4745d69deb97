"""Real process trees, killed at every level: nothing may be left."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import textwrap
import time
import uuid

import psutil
import pytest

from carryover import guardian

# The worker starts a child, which starts a daemon; both leave for sessions of their own and
# ignore everything but SIGKILL, as engines and Ray's daemons do.
COMMAND = textwrap.dedent(
    """
    import os, signal, subprocess, sys, time
    from pathlib import Path
    from carryover import guardian

    guardian.ORPHAN_GRACE_S = 0.5
    guardian.GRACE_S = float(os.environ.get("GRACE_S", 5.0))
    guardian.guard(
        environment={"CHOSEN": "yes"}, argv=[sys.executable, __file__, *sys.argv[1:]]
    )
    folder, mode = Path(sys.argv[1]), sys.argv[2]

    STUBBORN = '''
    import os, signal, sys, time
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, lambda *_: open(sys.argv[1] + "/child-interrupted", "w"))
    open(sys.argv[1] + "/child", "w").write(str(os.getpid()))
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        open(sys.argv[1] + "/daemon.part", "w").write(str(os.getpid()))
        os.rename(sys.argv[1] + "/daemon.part", sys.argv[1] + "/daemon")
    while True:
        time.sleep(60)
    '''
    import textwrap
    subprocess.Popen([sys.executable, "-c", textwrap.dedent(STUBBORN), str(folder)])
    while not (folder / "daemon").exists():
        time.sleep(0.01)
    if mode.startswith("exit"):
        sys.exit(int(mode.removeprefix("exit")))
    if mode == "deaf":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode == "replaced":  # as Ray does with a driver's
        signal.signal(signal.SIGTERM, lambda *_: os._exit(99))
    (folder / "worker.part").write_text(f"{os.getpid()} {os.getppid()}")
    (folder / "worker.part").rename(folder / "worker")
    print("working", flush=True)
    try:
        if mode == "spawning":
            while True:
                subprocess.Popen(
                    [sys.executable, "-S", "-c", "import time; time.sleep(60)"],
                    start_new_session=True,
                )
                time.sleep(0.02)
        time.sleep(60)
    except KeyboardInterrupt:
        print("cleaning", flush=True)
        (folder / "cleaning").touch()
        time.sleep(0.4)
        (folder / "cleaned").touch()
        print("cleaned", flush=True)
        if mode == "finishes":
            sys.exit(0)
        raise SystemExit(130)
    """
)


class Tree:
    """A guarded command and all processes that descend from it, known by their environment."""

    def __init__(self, folder, mode="waits", **settings):
        self.folder = folder
        self.token = uuid.uuid4().hex
        script = folder / "command.py"
        script.write_text(COMMAND)
        environment = {**os.environ, "TREE_TOKEN": self.token, **settings.pop("env", {})}
        environment.pop(guardian.GUARD_VARIABLE, None)
        settings.setdefault("preexec_fn", _default_signals)
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(folder), mode],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **settings,
        )  # fmt: skip

    def wait_for(self, name):
        deadline = time.monotonic() + 30
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline, f"no {name}"
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)
        return (self.folder / name).read_text()

    def start(self):
        self.worker, self.reaper = map(int, self.wait_for("worker").split())
        assert len(self.alive()) >= 5
        return self

    def alive(self):
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get("TREE_TOKEN") == self.token:
                    found.append(process)
        return [process for process in found if process.is_running()]

    def gone(self, within_s=10.0):
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if not self.alive():
                return True
            time.sleep(0.05)
        return False

    def end(self):
        for process in self.alive():
            process.kill()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.communicate(timeout=30)


def _default_signals():
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def tree(tmp_path):
    started = []

    def start(mode="waits", **settings):
        started.append(Tree(tmp_path, mode, **settings))
        return started[-1]

    yield start
    for each in started:
        each.end()


@pytest.mark.parametrize("code", [0, 2, 7])
def test_the_status_passes_through_and_daemons_end(tree, code):
    running = tree(f"exit{code}")
    assert running.process.wait(30) == code
    assert not running.alive()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["TERM", "KILL"])
@pytest.mark.parametrize("victim", ["caller", "reaper", "worker"])
def test_whoever_is_killed_nothing_is_left(tree, victim, number):
    running = tree().start()
    pid = {"caller": running.process.pid, "reaper": running.reaper, "worker": running.worker}[
        victim
    ]
    os.kill(pid, number)
    assert running.process.wait(15) != 0
    assert running.gone()
    cleaned = (running.folder / "cleaned").exists()
    assert cleaned == (number == signal.SIGTERM or victim == "caller")


def test_a_worker_that_keeps_starting_daemons_leaves_none(tree):
    running = tree("spawning").start()
    running.process.kill()
    assert running.gone(20)


def test_a_killed_process_group_leaves_nothing(tree):
    """What a job runner does that gives up on its child: the whole group, at once."""
    running = tree(start_new_session=True).start()
    os.killpg(running.process.pid, signal.SIGKILL)
    assert running.gone()


def test_sigterm_unwinds_in_order_and_says_143(tree):
    running = tree().start()
    running.process.terminate()
    output, _ = running.process.communicate(timeout=15)
    assert running.process.returncode == 143
    assert output.split() == ["working", "cleaning", "cleaned"]


def test_a_second_sigterm_does_not_disturb_the_cleaning(tree):
    running = tree().start()
    running.process.terminate()
    running.wait_for("cleaning")
    running.process.terminate()
    output, _ = running.process.communicate(timeout=15)
    assert "cleaned" in output


def test_a_worker_that_finishes_well_after_sigterm_is_fine(tree):
    running = tree("finishes").start()
    running.process.terminate()
    assert running.process.wait(15) == 0


def test_a_deaf_worker_is_killed_after_the_grace(tree):
    running = tree("deaf", env={"GRACE_S": "0.5"}).start()
    running.process.terminate()
    _, errors = running.process.communicate(timeout=15)
    assert running.process.returncode == 143
    assert "did not stop in time" in errors
    assert running.gone()


def test_interrupt_reaches_the_worker_alone_and_once(tree):
    running = tree().start()
    running.process.send_signal(signal.SIGINT)
    output, _ = running.process.communicate(timeout=15)
    assert running.process.returncode == 130
    assert output.split() == ["working", "cleaning", "cleaned"]
    assert not (running.folder / "child-interrupted").exists()


def test_a_second_interrupt_cuts_the_cleaning_short(tree):
    running = tree().start()
    running.process.send_signal(signal.SIGINT)
    running.wait_for("cleaning")
    running.process.send_signal(signal.SIGINT)
    output, _ = running.process.communicate(timeout=15)
    assert running.process.returncode not in (0, 143)
    assert "cleaned" not in output
    assert running.gone()


def test_a_third_interrupt_kills_a_deaf_worker(tree):
    running = tree("deaf").start()
    for _ in range(guardian.INTERRUPTS_TO_KILL):
        running.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    assert running.process.wait(15) == 128 + signal.SIGKILL
    assert running.gone()


def test_ctrl_c_in_a_terminal(tree):
    """The terminal signals its whole foreground group; the tree must see it once."""
    controller, terminal = pty.openpty()

    def take_terminal():
        _default_signals()
        os.setsid()
        os.close(os.open(os.ttyname(terminal), os.O_RDWR))  # becomes the controlling terminal

    try:
        running = tree(preexec_fn=take_terminal, stdin=terminal).start()
        os.write(controller, b"\x03")
        output, _ = running.process.communicate(timeout=15)
        assert running.process.returncode == 130
        assert output.split() == ["working", "cleaning", "cleaned"]
        assert not (running.folder / "child-interrupted").exists()
        assert running.gone()
    finally:
        os.close(controller)
        os.close(terminal)


def test_a_closed_terminal_ends_the_command_unless_nohup(tree, tmp_path):
    running = tree().start()
    running.process.send_signal(signal.SIGHUP)
    assert running.process.wait(15) == 129
    assert running.gone()

    (tmp_path / "nohup").mkdir()
    kept = Tree(tmp_path / "nohup", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    try:
        kept.start().process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert psutil.pid_exists(kept.worker)
    finally:
        kept.end()


def test_a_background_job_of_a_script_ignores_interrupts_and_obeys_sigterm(tree):
    ignoring = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    running = tree("replaced", **ignoring).start()
    running.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert psutil.pid_exists(running.worker)
    running.process.terminate()
    assert running.process.wait(15) == 143
    assert (running.folder / "cleaned").exists()
    assert running.gone()


def test_a_killed_worker_is_explained(tree):
    running = tree().start()
    os.kill(running.worker, signal.SIGKILL)
    _, errors = running.process.communicate(timeout=15)
    assert running.process.returncode == 137
    assert "out of memory" in errors


def test_the_next_command_ends_what_a_massacre_left(tree, tmp_path):
    running = tree().start()
    for pid in (running.process.pid, running.reaper, running.worker):
        os.kill(pid, signal.SIGKILL)
    running.process.wait(15)
    deadline = time.monotonic() + 5
    while len(orphans := {process.pid for process in running.alive()}) > 2:
        assert time.monotonic() < deadline
    assert len(orphans) == 2
    assert orphans <= {process.pid for process in guardian.leftovers()}

    (tmp_path / "next").mkdir()
    following = Tree(tmp_path / "next", "exit0")
    _, errors = following.process.communicate(timeout=30)
    assert following.process.returncode == 0
    assert "processes that an earlier command left behind" in errors
    assert not running.alive()


def test_a_live_command_is_not_taken_for_a_leftover(tree, tmp_path):
    running = tree().start()
    before = {process.pid for process in running.alive()}
    (tmp_path / "next").mkdir()
    following = Tree(tmp_path / "next", "exit0")
    assert following.process.wait(30) == 0
    assert {process.pid for process in running.alive()} == before


def guarded(code, **settings):
    command = [sys.executable, "-m", "carryover.guardian", sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, **settings)


def test_any_command_runs_guarded_with_the_engine_environment():
    done = guarded("import os; print(os.environ['RAY_USAGE_STATS_ENABLED'])")
    assert (done.returncode, done.stdout) == (0, "0\n")


def test_standard_input_and_unflushed_output_pass_through():
    done = guarded("import sys; sys.stdout.write(sys.stdin.read().upper())", input="abc" * 50_000)
    assert done.stdout == "ABC" * 50_000


def test_an_unknown_command_is_said_so():
    done = subprocess.run(
        [sys.executable, "-m", "carryover.guardian", "no-such-program"],
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert done.returncode == 127
    assert "cannot start no-such-program: No such file" in done.stderr


def test_commands_nest():
    inner = f"{sys.executable} -m carryover.guardian {sys.executable} -c 'raise SystemExit(5)'"
    done = guarded(f"import os, sys; sys.exit(os.waitstatus_to_exitcode(os.system({inner!r})))")
    assert done.returncode == 5


def test_adopted_processes_do_not_pile_up_as_zombies():
    code = """
import os, psutil, time
for _ in range(3):
    if os.fork() == 0:
        if os.fork() == 0:
            time.sleep(0.1)
        os._exit(0)
    os.wait()
time.sleep(1.0)
print(len(psutil.Process(os.getppid()).children()))
"""
    assert guarded(code).stdout == "1\n"


def test_identity_names_one_process_only():
    mine = guardian.identity(os.getpid())
    assert guardian.is_running(mine)
    assert not guardian.is_running(f"{os.getpid()}:1")
    assert not guardian.is_running("")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    named = guardian.identity(ended.pid)
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert not guardian.is_running(named), "a zombie does not run"
    ended.wait()
