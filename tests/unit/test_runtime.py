"""The environment of engines: child processes keep every core, however they are started."""

import json
import os
import subprocess
import sys

import pytest

from carryover.runtime import engine_environment, find_libiomp, usable_cores

PARENT = """
import json, os, subprocess, sys, torch
torch.randn(1 << 20).exp().sum()  # starts OpenMP's threads
child = [sys.executable, "-S", "-c", "import os; print(len(os.sched_getaffinity(0)))"]
count = lambda **how: int(subprocess.run(child, capture_output=True, text=True, **how).stdout)
print(json.dumps([len(os.sched_getaffinity(0)), count(), count(preexec_fn=lambda: None)]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="affinity is Linux's")
def test_children_may_use_every_core():
    names = ("KMP_AFFINITY", "LD_PRELOAD", "OMP_NUM_THREADS")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    environment = clean | {"OMP_NUM_THREADS": str(len(usable_cores()))} | engine_environment()
    assert find_libiomp() is None or str(find_libiomp()) in environment["LD_PRELOAD"]
    done = subprocess.run(
        [sys.executable, "-c", PARENT], env=environment, capture_output=True, text=True, check=True
    )
    parent, spawned, forked = json.loads(done.stdout)
    assert parent == spawned == forked == len(os.sched_getaffinity(0))


def test_what_the_user_set_is_kept(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("KMP_AFFINITY", "compact")
    monkeypatch.setenv("LD_PRELOAD", "/lib/mine.so")
    environment = engine_environment()
    assert "OMP_NUM_THREADS" not in environment and "KMP_AFFINITY" not in environment
    assert environment["LD_PRELOAD"].endswith("/lib/mine.so")
