"""Processes of an offline bench, with a stub for vLLM: who runs when, and what ends them."""

import subprocess
from types import SimpleNamespace

import pytest

from carryover.bench import offline_engines
from carryover.bench.offline import OfflineConfig
from carryover.bench.offline_engines import OfflineBackend
from carryover.bench.records import Condition
from carryover.bench.workload import make_plan
from carryover.data.prompts import Prompt
from carryover.errors import ServingError
from carryover.serving.config import Arm

STUB = """
import json, os, signal, sys
for line in sys.stdin:
    message = json.loads(line)
    if "start" in message:
        print(json.dumps({"ready": {}}), flush=True)
        continue
    for number, conversation in enumerate(message["send"]):
        if conversation[0]["content"] == "die":
            print("RuntimeError: out of memory", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        answer = {"started_s": 0.0, "ttft_s": 0.1, "latency_s": 0.5, "output_tokens": 4,
                  "finish": "stop", "text": "x", "status": 200}
        print(json.dumps({"response": answer}), flush=True)
    print(json.dumps({"counted": {"num_drafts": 0.0}}), flush=True)
"""


@pytest.fixture
def started(monkeypatch):
    """Processes in the order in which they were started."""
    found, popen = [], subprocess.Popen

    def start(command, **options):
        process = popen([command[0], "-c", STUB], **options)
        found.append(process)
        return process

    monkeypatch.setattr(offline_engines.subprocess, "Popen", start)
    return found


def backend(folder, **settings):
    arms = [Arm(name=name) for name in ("a", "b", "c")]
    config = OfflineConfig(prompts="x", arms=arms, **settings)
    return OfflineBackend(config, SimpleNamespace(name="target"), folder)


def plan(*texts):
    prompts = [Prompt(n, "s", "c", (text,)) for n, text in enumerate(texts)]
    return make_plan(prompts, ("a", "b", "c"), [Condition("offline")], block_size=1, seed=0)


def test_all_engines_stand_side_by_side_where_they_fit(tmp_path, started):
    engines = backend(tmp_path)
    engines.prepare(["a", "b", "c"], [Condition("offline")])
    assert len(started) == 3 and engines.side_by_side and engines.notes() == []
    units = plan("one", "two")
    assert engines.order(units) == units
    answers = [engines.send(unit, lambda: None) for unit in units]
    assert all(answer.wall_s == 0.5 and len(answer.responses) == 1 for answer in answers)
    assert len(started) == 3
    engines.close()
    assert all(process.poll() == 0 for process in started)


def test_where_memory_is_short_one_runs_at_a_time_in_turns(tmp_path, started, monkeypatch):
    monkeypatch.setattr(offline_engines, "free_memory", lambda: 1000)
    engines = backend(tmp_path, turns=2)
    engines.prepare(["a", "b", "c"], [Condition("offline")])
    assert len(started) == 1 and not engines.side_by_side
    for unit in engines.order(plan("one", "two")):
        engines.send(unit, lambda: None)
        assert sum(process.poll() is None for process in started) == 1
    # every arm once a turn, and the last of the first turn goes on into the second
    assert len(started) in (5, 6)
    assert "one engine ran at a time" in engines.notes()[0]
    engines.close()
    assert all(process.poll() is not None for process in started)


def test_an_engine_that_dies_says_why_and_the_others_are_ended(tmp_path, started):
    engines = backend(tmp_path)
    engines.prepare(["a", "b", "c"], [Condition("offline")])
    with pytest.raises(ServingError, match=r"exit status -9\): RuntimeError: out of memory"):
        engines.send(plan("die")[0], lambda: None)
    engines.close()
    assert all(process.poll() is not None for process in started)
