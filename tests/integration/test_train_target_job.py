"""`platform train target` as users run it: through Ray Train, continued and recorded."""

import os
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
import yaml
from training_runs import rows, table

from carryover.targets import resolve
from carryover.tracking import Tracker

pytestmark = pytest.mark.ray

SETTINGS = {
    "name": "small",
    "shape": {
        "vocab_size": 300, "hidden_size": 32, "num_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "intermediate_size": 64, "max_position_embeddings": 256,
    },
    "block_length": 32,
    "blocks_per_step": 4,
    "max_steps": 6,
    "epochs": 100,
    "evaluation": {"every_steps": 3},
    "checkpoints": {"every_steps": 2},
}  # fmt: skip


def platform(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "carryover", *arguments], cwd=folder, text=True, timeout=900,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip


def test_a_target_is_trained_continued_and_served_from(tmp_path, tiny_llama):
    pq.write_table(table(rows(60)), tmp_path / "responses.parquet")
    (tmp_path / "target.yaml").write_text(yaml.safe_dump({**SETTINGS, "writer": str(tiny_llama)}))
    words = ["train", "target", "-c", "target.yaml", "-d", "responses.parquet"]
    refused = platform(tmp_path, "train", "target", "-c", "target.yaml")
    assert refused.returncode == 2 and "no text to train on; give --data PATH" in refused.stdout
    # two workers, so that gradients are averaged and each sees its share
    done = platform(tmp_path, *words, "--set", "resources.num_workers=2")
    assert done.returncode == 0, done.stdout
    assert "held-out loss" in done.stdout and "target training" in done.stdout
    run = tmp_path / "runs/targets/small"
    assert resolve(str(run / "best")).load_config().num_hidden_layers == 2
    again = platform(tmp_path, *words)
    assert again.returncode == 0 and "is finished (6 steps); reusing it" in again.stdout
    other = platform(tmp_path, *words, "--set", "seed=1")
    assert other.returncode == 2 and "settings.seed: 0 before, 1 now" in other.stdout
    client = Tracker(folder=tmp_path).client()
    experiment = client.get_experiment_by_name("targets")
    (recorded,) = client.search_runs([experiment.experiment_id])
    assert recorded.info.status == "FINISHED"
    assert recorded.data.metrics["summary/steps"] == 6
    assert recorded.data.metrics["eval/loss"] > 0
    assert recorded.data.params["shape.num_layers"] == "2"
