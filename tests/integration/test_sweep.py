"""A sweep with real engines through Ray Tune, Ray Serve and MLflow: the whole command."""

import json
import os
import subprocess
import sys

import psutil
import pytest
import yaml

from carryover.drafters.checkpoint import initialise, save
from carryover.drafters.settings import DrafterSettings
from carryover.serving.config import ServeConfig
from carryover.targets import resolve
from carryover.tracking import Tracker

pytestmark = [pytest.mark.vllm, pytest.mark.ray]

LOADS = [(0.0, 1), (0.0, 2), (1.0, 1), (1.0, 2)]


def platform(*arguments, cwd):
    done = subprocess.run(
        [sys.executable, "-m", "carryover", *arguments],
        cwd=cwd, capture_output=True, text=True, timeout=2400, env={**os.environ, "COLUMNS": "150"},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def sweep(tiny, tmp_path_factory):
    """The folder in which a sweep ran, and what it said; one of its engines cannot start."""
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
            "resources": {"device": "cpu"},
        },
        "proposal_lengths": [9, 3, 2],
        "temperatures": [0.0, 1.0],
        "concurrencies": [1, 2],
        "prompts": "prompts.jsonl",
        "max_tokens": 12,
        "out": "runs/sweeps/tiny",
    }
    (folder / "sweep.yaml").write_text(yaml.safe_dump(config))
    said = platform("sweep", "--config", "sweep.yaml", cwd=folder)
    assert said[0] == 0, said[2]
    return folder, said


def rows(folder):
    file = folder / "runs/sweeps/tiny/measurements.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_every_load_of_every_engine_is_measured_by_bench(sweep):
    folder, _ = sweep
    found = {(r["setting"], r["temperature"], r["concurrency"]): r for r in rows(folder)}
    assert set(found) == {(name, *load) for name in ("dflash-3", "dflash-2") for load in LOADS}
    assert len(rows(folder)) == len(found)
    for (setting, _, _), row in found.items():
        figures = row["figures"]
        assert figures["requests"] == 4 and figures["failed"] == 0
        assert figures["output_tokens_per_s"] > 0 and figures["acceptance_length"] >= 1
        assert figures["num_draft_tokens"] == int(setting[-1]) * figures["num_drafts"]
        assert row["wall_s"] > 0 and row["stored_bytes"] > 0


def test_a_length_above_the_checkpoints_fails_alone_with_its_reason(sweep):
    folder, (_, _, errors) = sweep
    ends = (folder / "runs/sweeps/tiny/trials.jsonl").read_text().splitlines()
    ends = {end["setting"]: end for end in map(json.loads, ends)}
    assert {name: end["outcome"] for name, end in ends.items()} == {
        "dflash-9": "failed", "dflash-3": "done", "dflash-2": "done",
    }  # fmt: skip
    assert "9 exceeds the checkpoint's 4" in ends["dflash-9"]["reason"]
    assert "dflash-9 failed" in errors and "Traceback" not in errors
    assert ends["dflash-3"]["start_s"] > 0


def test_the_answer_is_an_application_that_can_be_served_and_a_page(sweep):
    folder, (_, output, _) = sweep
    out = folder / "runs/sweeps/tiny"
    assert "over all loads: dflash-" in output
    recommended = ServeConfig.load(out / "serve.yaml")
    assert {arm.num_speculative_tokens for arm in recommended.arms} <= {2, 3}
    status, _, errors = platform("serve", "--config", str(out / "serve.yaml"), "--dry-run", cwd=out)
    assert status == 0, errors
    page = (out / "report.html").read_text()
    assert "What to deploy" in page and "dflash-9" in page


def test_mlflow_has_a_parent_and_children_with_the_same_keys(sweep):
    folder, _ = sweep
    client = Tracker(folder=folder).client()
    runs = client.search_runs([client.get_experiment_by_name("sweeps").experiment_id])
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = {run.info.run_name: run for run in runs if run is not parent}
    assert {run.data.tags["mlflow.parentRunId"] for run in children.values()} == {
        parent.info.run_id
    }
    status = {name: run.info.status for name, run in children.items()}
    assert status.pop("dflash-9") == "FAILED"
    assert status == {
        f"{name} T={t:g} c={c}": "FINISHED" for name in ("dflash-3", "dflash-2") for t, c in LOADS
    }
    assert len({tuple(sorted(run.data.params)) for run in children.values()}) == 1
    row = next(r for r in rows(folder) if r["setting"] == "dflash-3" and r["concurrency"] == 2)
    metrics = children["dflash-3 T=0 c=2"].data.metrics
    assert metrics["output_tokens_per_s"] == row["figures"]["output_tokens_per_s"]
    assert children["dflash-3 T=0 c=2"].data.params["num_speculative_tokens"] == "3"


def test_resuming_a_finished_sweep_measures_nothing_and_answers_again(sweep):
    folder, (_, output, _) = sweep
    before = rows(folder)
    status, again, errors = platform("sweep", "--resume", "tiny", cwd=folder)
    assert status == 0, errors
    assert rows(folder) == before
    assert again.splitlines()[:5] == output.splitlines()[:5]


def test_no_engine_is_left(sweep):
    hosts = [p.pid for p in psutil.process_iter(["cmdline"]) if "sweeps.host" in str(p.info)]
    assert hosts == []
