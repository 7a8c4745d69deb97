"""A sweep with real engines through Ray Tune, Ray Serve and MLflow."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from carryover.drafters.checkpoint import initialise, save
from carryover.drafters.settings import DrafterSettings
from carryover.serving.config import ServeConfig
from carryover.targets import resolve
from carryover.tracking import Tracker

pytestmark = [pytest.mark.vllm, pytest.mark.ray]


def platform(*arguments, cwd):
    done = subprocess.run(
        [sys.executable, "-m", "carryover", *arguments],
        cwd=cwd, capture_output=True, text=True, timeout=800, env={**os.environ, "COLUMNS": "150"},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def sweep(tiny, tmp_path_factory):
    """A folder with drafter, prompts and configuration: two engines, one of which cannot start."""
    folder = tmp_path_factory.mktemp("sweep")
    target = tiny("llama", num_heads=2, num_kv_heads=1, scale=8.0)
    settings = DrafterSettings(num_layers=1, proposal_length=4)
    save(initialise("dflash", resolve(str(target)), settings), folder / "drafter", {})
    prompts = [{"prompt": f"Count from {n} to ten."} for n in range(4)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    config = {
        "serve": {
            "model": "tiny",
            "target": str(target),
            "engine": {"max_model_len": 256, "max_num_seqs": 4, "kv_cache_gib": 0.1},
            "arms": [{"name": "dflash", "drafter": "drafter"}],
            "http": {"port": 0},
            "resources": {"device": "cpu"},
        },
        "proposal_lengths": [9, 3],
        "temperatures": [0.0],
        "concurrencies": [1, 2],
        "prompts": "prompts.jsonl",
        "max_tokens": 12,
        "out": "runs/sweep",
    }
    (folder / "sweep.yaml").write_text(yaml.safe_dump(config))
    return folder


def test_a_sweep_measures_records_and_answers(sweep):
    status, output, errors = platform("sweep", "--config", "sweep.yaml", cwd=sweep)
    assert status == 0, errors
    out = sweep / "runs" / "sweep"

    # the length above the checkpoint's failed alone, with its reason
    (failure,) = map(json.loads, (out / "failures.jsonl").read_text().splitlines())
    assert failure["setting"] == "dflash-9"
    assert "9 exceeds" in failure["reason"] and "dflash-9 failed" in errors

    rows = [json.loads(line) for line in (out / "measurements.jsonl").read_text().splitlines()]
    assert [(row["setting"], row["concurrency"]) for row in rows] == [
        ("dflash-3", 1),
        ("dflash-3", 2),
    ]
    for row in rows:
        assert row["figures"]["requests"] == 4
        assert row["figures"]["failed"] == 0
        assert row["figures"]["output_tokens_per_s"] > 0
        assert row["figures"]["acceptance_length"] >= 1
        assert row["figures"]["num_draft_tokens"] == 3 * row["figures"]["num_drafts"]

    assert "over all loads: dflash-3" in output
    recommended = ServeConfig.load(out / "serve.yaml")
    assert [arm.num_speculative_tokens for arm in recommended.arms] == [3]

    client = Tracker(folder=sweep).client()
    experiment = client.get_experiment_by_name("sweeps")
    runs = client.search_runs([experiment.experiment_id])
    parent = next(run for run in runs if "mlflow.parentRunId" not in run.data.tags)
    children = {run.info.run_name: run for run in runs if run.info.run_id != parent.info.run_id}
    assert {run.data.tags["mlflow.parentRunId"] for run in children.values()} == {
        parent.info.run_id
    }
    assert {name: run.info.status for name, run in children.items()} == {
        "dflash-9": "FAILED",
        "dflash-3 T=0 c=1": "FINISHED",
        "dflash-3 T=0 c=2": "FINISHED",
    }
    recorded = children["dflash-3 T=0 c=2"]
    assert recorded.data.params["num_speculative_tokens"] == "3"
    assert recorded.data.metrics["output_tokens_per_s"] == rows[1]["figures"]["output_tokens_per_s"]
