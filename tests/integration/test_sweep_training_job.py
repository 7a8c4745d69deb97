"""A training sweep through Ray Tune and Ray Train, as a command."""

import json
import os
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
import yaml
from training_runs import SETTINGS, merged, rows, table

from carryover.drafters import checkpoint
from carryover.tracking import Tracker

pytestmark = pytest.mark.ray


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_llama):
    """A folder with data and a sweep of two trainings, of which one cannot be."""
    folder = tmp_path_factory.mktemp("training_sweep")
    pq.write_table(table(rows()), folder / "responses.parquet")
    train = merged(
        SETTINGS,
        {
            "target": str(tiny_llama), "data": "responses.parquet", "verify_first": False,
            "resources": {"max_restarts": 0, "cpus_per_worker": 1},
        },
    )  # fmt: skip
    config = {
        "train": train,
        "values": {"optimizer.lr": [3e-3], "drafter.draft_vocab_size": [None, 100_000]},
        "out": "runs/sweeps/training",
    }
    (folder / "sweep.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.mark.slow
def test_a_training_sweep_trains_records_and_says_what_is_best(folder):
    out = folder / "runs/sweeps/training"
    done = subprocess.run(
        [sys.executable, "-m", "carryover", "sweep", "--config", "sweep.yaml"],
        cwd=folder, capture_output=True, text=True, timeout=1200,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "150"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    whole, failed = "draft_vocab_size_None-lr_0.003", "draft_vocab_size_100000-lr_0.003"

    found = lines(out / "measurements.jsonl")
    assert [(r["setting"], r["at"]) for r in found] == [
        (whole, at) for at in ("4", "8", "12", "final")
    ]
    ends = {end["setting"]: end for end in lines(out / "trials.jsonl")}
    assert {name: end["outcome"] for name, end in ends.items()} == {
        whole: "done", failed: "failed",
    }  # fmt: skip
    assert "draft_vocab_size 100000 exceeds the target's 320" in ends[failed]["reason"]

    best = out / "trainings" / whole / "best"
    assert f"best: {best}" in done.stdout and (out / "report.html").exists()
    assert checkpoint.describe(best)["proposal_length"] == 4

    client = Tracker(folder=folder).client()
    runs = client.search_runs([client.get_experiment_by_name("sweeps").experiment_id])
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = {r.info.run_name: r for r in runs if r is not parent}
    assert {name: run.info.status for name, run in children.items()} == {
        whole: "FINISHED", failed: "FAILED",
    }  # fmt: skip
    assert children[whole].data.params["optimizer.lr"] == "0.003"
    assert children[whole].data.params.keys() == children[failed].data.params.keys()
    history = client.get_metric_history(children[whole].info.run_id, "acceptance_length")
    assert {point.step for point in history} >= {4, 8, 12}
    assert {f.path for f in client.list_artifacts(parent.info.run_id)} == {"report.html"}
