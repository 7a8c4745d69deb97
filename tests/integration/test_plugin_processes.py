"""The plugin where vLLM puts its engine and workers into processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import plugin_models as models
import pytest
from plugin_process import RESULT

from carryover.runtime import engine_environment, usable_cores
from carryover.targets import Target

pytestmark = pytest.mark.vllm
CARRIED = "vllm:spec_decode_num_carried_rows"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    # Two KV heads, so that two workers can share them.
    return models.make_target(tmp_path_factory.mktemp("target"), "qwen3", num_kv_heads=2)


@pytest.fixture(scope="module")
def baseline(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # One layer: of several, the plugin repairs the norm, which a stock engine gets wrong on CPU.
    return models.make_drafter(
        target, tmp_path_factory.mktemp("drafter") / "baseline", num_layers=1, steps=100
    )


@pytest.fixture(scope="module")
def with_plugin(target: Target, baseline: Path) -> dict[str, Any]:
    return run(target, {"model": str(baseline), "method": "dflash"})


def run(
    target: Target, speculative: dict[str, Any], *, plugins: str | None = None, **arguments: Any
) -> dict[str, Any]:
    """What `plugin_process.py` prints: texts, and vLLM's counters by name."""
    environment = {**os.environ, **engine_environment(), "VLLM_LOGGING_LEVEL": "WARNING"}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    environment.update({} if plugins is None else {"VLLM_PLUGINS": plugins})
    speculative = {"num_speculative_tokens": models.PROPOSAL_LENGTH, **speculative}
    workers = arguments.get("tensor_parallel_size", 1)
    if workers > 1:
        cores = [str(core) for core in usable_cores()] * workers
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(cores[:workers])
        environment["OMP_NUM_THREADS"] = "1"
    script = Path(__file__).with_name("plugin_process.py")
    done = subprocess.run(
        [sys.executable, script, target.path, json.dumps(speculative), json.dumps(arguments)],
        env=environment, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    [answer] = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    return json.loads(answer.removeprefix(RESULT))


def test_a_stock_baseline_is_served_as_without_the_plugin(
    target: Target, baseline: Path, with_plugin: dict[str, Any]
) -> None:
    without = run(target, {"model": str(baseline), "method": "dflash"}, plugins="")
    assert without == with_plugin
    assert without["counters"]["vllm:spec_decode_num_accepted_tokens"] > 0
    assert CARRIED not in without["counters"]


def test_carried_rows_in_two_workers(
    target: Target, baseline: Path, with_plugin: dict[str, Any], tmp_path: Path
) -> None:
    checkpoint = models.add_carryover(baseline, tmp_path / "carryover", target)
    shared = run(target, {"model": str(checkpoint)}, tensor_parallel_size=2)
    assert shared["texts"] == with_plugin["texts"]
    assert shared["counters"][CARRIED] > 0
    with models.engine(target, checkpoint) as alone:
        assert models.generate(alone, models.random_prompts(6)) == shared["texts"]
        assert models.speculative_counters(alone) == shared["counters"]
