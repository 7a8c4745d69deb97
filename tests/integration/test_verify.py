"""Drafters in stock vLLM: what serves is reported, what does not is refused before or after."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from carryover.drafters.carried import CarriedSettings
from carryover.drafters.checkpoint import initialise, load, save
from carryover.drafters.settings import DrafterSettings
from carryover.drafters.verify import PROMPTS, greedy_gaps, verify
from carryover.errors import CheckpointError, ServingError
from carryover.targets import Target, resolve

# vLLM's CPU attention has kernels for head sizes from 32; the scale makes greedy text varied
SHAPE = {"num_heads": 2, "num_kv_heads": 1, "scale": 8.0}
SETTINGS = DrafterSettings(num_layers=1, proposal_length=4, markov_rank=8)


@pytest.fixture(scope="module")
def target(tiny):
    return resolve(str(tiny("llama", **SHAPE)))


@pytest.fixture(scope="module")
def baseline(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / "dflash"
    return save(initialise("dflash", target, SETTINGS), folder, {"made_by": "a test"})


@pytest.fixture(scope="module")
def carryover(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / "markov"
    drafter = initialise("markov", target, SETTINGS)
    drafter.add_carried_context(CarriedSettings())
    drafter.carryover_marker.data.fill_(0.1)
    return save(drafter, folder, {"made_by": "a test"})


@pytest.fixture(autouse=True)
def in_process(monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


@pytest.mark.vllm
def test_an_untrained_baseline_serves_from_the_command_line(baseline):
    done = subprocess.run(
        [sys.executable, "-m", "carryover", "checkpoint", "verify", str(baseline), "--json"],
        capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout[done.stdout.index("{") :])
    assert (report["kind"], report["regime"], report["proposal_length"]) == (
        "baseline",
        "dflash",
        4,
    )
    assert report["num_prompts"] == len(PROMPTS)
    assert report["num_tokens"] >= len(PROMPTS)
    assert report["num_drafts"] > 0
    assert report["acceptance_length"] == 1 + report["num_accepted"] / report["num_drafts"]
    assert report["num_carried_rows"] is None
    assert report["largest_gap"] <= 1e-3


@pytest.mark.vllm
def test_a_carryover_drafter_serves_and_carries(carryover):
    report = verify(carryover)
    assert (report.kind, report.regime) == ("carryover", "markov")
    assert report.num_carried_rows > 0
    assert "the target's own greedy text" in str(report)


@pytest.mark.vllm
def test_text_that_is_not_the_targets_is_refused(baseline, target, tiny, monkeypatch):
    other = resolve(str(tiny("llama", **SHAPE, seed=1)))
    real = Target.load_model
    monkeypatch.setattr(Target, "load_model", lambda self, **settings: real(other, **settings))
    with pytest.raises(ServingError, match=r"is not the target's greedy text: \d+ of \d+ tokens"):
        verify(baseline, target)


@pytest.mark.vllm
def test_what_vllm_refuses_is_said_in_one_message(baseline, target, tmp_path):
    """A drafter for a carried interface that only the reference decoder runs."""
    drafter = load(baseline, target)
    drafter.add_carried_context(CarriedSettings(carried="target_tokens"))
    folder = save(drafter, tmp_path / "drafter", {})
    with pytest.raises(CheckpointError, match="other interfaces run in the reference decoder"):
        verify(folder, target)


def test_another_target_is_refused_before_vllm_starts(baseline, tiny):
    with pytest.raises(CheckpointError, match="hidden_size: expected 64, got 96") as caught:
        verify(baseline, resolve(str(tiny("llama", hidden_size=96))))
    assert "--target" in str(caught.value)


def test_the_gap_is_zero_for_greedy_tokens_and_positive_for_others(target):
    model = target.load_model()
    prompt = [20, 30, 40]
    tokens = list(prompt)
    for _ in range(6):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    response = tokens[len(prompt) :]
    assert greedy_gaps(model, prompt, response) == [0.0] * 6
    changed = [*response[:3], (response[3] + 1) % 300, *response[4:]]
    gaps = greedy_gaps(model, prompt, changed)
    assert gaps[:3] == [0.0] * 3
    assert gaps[3] > 0.01


def platform(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "carryover", "checkpoint", *arguments],
        capture_output=True, text=True, timeout=360, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip


def test_show_prints_what_a_checkpoint_is(carryover, target):
    table = platform("show", str(carryover))
    assert table.returncode == 0, table.stderr
    printed = table.stdout.partition("\n\n")[0].splitlines()
    lines = [line.rstrip() for line in printed if line[0].islower()]
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in lines)
    assert rows["kind"] == "carryover"
    assert rows["regime"] == "markov"
    assert rows["proposal length"] == "4"
    described = json.loads(platform("show", str(carryover), "--json").stdout)
    assert described["proposal_length"] == 4
    assert described["target"] == target.identity()


def test_a_folder_that_is_no_checkpoint_is_the_users_mistake(tmp_path):
    done = platform("verify", str(tmp_path))
    assert done.returncode == 2
    assert "not a drafter checkpoint: it holds no config.json" in done.stderr
    assert "Traceback" not in done.stderr
