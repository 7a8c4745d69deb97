"""The demo as a user runs it: interrupted in the middle, then run again to its end."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml
from talker import make_talker

from jobs.demo import DEFAULT_CONFIG, DemoConfig

pytestmark = [pytest.mark.vllm, pytest.mark.ray]

ENGINE = {"max_model_len": 256, "max_num_seqs": 8, "kv_cache_gib": 0.05}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A working folder with the shipped configuration shrunk to a tiny target."""
    folder = tmp_path_factory.mktemp("demo")
    make_talker(folder / "target")
    config = yaml.safe_load(DEFAULT_CONFIG.read_text())
    for section in ("synthesize", "regenerate", "train", "serve"):
        config[section]["target"] = str(folder / "target")
    config["num_bench_prompts"] = 2
    config["baseline"] = None  # the one that is shipped is for another target
    config["serve"]["arms"][1]["drafter"] = "runs/demo/train/baseline/best"
    config["synthesize"] |= {
        "num_prompts": 16, "min_tokens": 3, "max_tokens": 24, "near_duplicate": 1.0,
        "engine": ENGINE,
        "elicitations": [{"category": "general"}],
    }  # fmt: skip
    config["regenerate"] |= {"max_new_tokens": 24, "temperatures": [1.0], "engine": ENGINE}
    config["train"] |= {
        "drafter": {"num_layers": 1, "proposal_length": 3},
        "batch": {"sequence_length": 256},
        "max_steps": 3,
        "evaluation": {"every_steps": 3, "max_sequences": 2, "held_out_fraction": 0.2},
        "checkpoints": {"every_steps": 3},
        "verify_first": False,
    }
    config["carryover_steps"] = 2
    config["serve"]["engine"] = ENGINE
    config["bench"] |= {"max_tokens": 8, "ignore_eos": True}
    (folder / "demo.yaml").write_text(yaml.safe_dump(config))
    return folder


def start(folder: Path) -> subprocess.Popen:
    environment = {**os.environ, "COLUMNS": "200"}
    environment.pop("MLFLOW_TRACKING_URI", None)
    return subprocess.Popen(
        [sys.executable, "-m", "carryover", "demo", "--config", "demo.yaml"],
        cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip


def below(process: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def test_an_interrupted_demo_goes_on_where_it_was_and_leaves_no_process(folder):
    first = start(folder)
    lines = []
    for line in first.stdout:
        lines.append(line)
        if line.startswith("[6/7]"):
            break
    assert lines[-1].startswith("[6/7]"), "".join(lines)
    tree = below(first)
    assert tree
    first.send_signal(signal.SIGINT)
    rest = first.stdout.read()
    assert first.wait(timeout=360) == 130, rest
    assert [p for p in tree if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []

    second = start(folder)
    output = second.stdout.read()
    assert second.wait(timeout=900) == 0, output
    for stage in ("[2/7] prompts", "[3/7] responses", "[4/7] baseline", "[5/7] carryover"):
        assert any(line.startswith(stage) and "reused" in line for line in output.splitlines())
    for wanted in ("acceptance length", "output tokens/s", "TTFT", "TPOT", "speed-up"):
        assert wanted in output
    for arm in ("autoregressive", "baseline", "carryover"):
        assert arm in output
    check_records(folder)


def check_records(folder: Path) -> None:
    """Every run has ended, and the bench has a child with the agreed keys for each arm."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    experiments = {e.name: e.experiment_id for e in client.search_experiments()}
    runs = client.search_runs(list(experiments.values()))
    assert {run.info.status for run in runs} == {"FINISHED"}
    bench = {
        run.data.tags["carryover.arm"]: run.data.metrics
        for run in client.search_runs([experiments["bench"]])
        if "carryover.arm" in run.data.tags
    }
    assert set(bench) == {"autoregressive", "baseline", "carryover"}
    assert "acceptance_length" in bench["carryover"]
    for metrics in bench.values():
        assert metrics["output_tokens_per_s"] > 0


def test_the_shipped_configuration_keeps_bench_prompts_from_training():
    config = DemoConfig.load(DEFAULT_CONFIG)
    assert 0 < config.training_prompts < config.synthesize.num_prompts
    assert config.bench.prompts not in (config.regenerate.out, config.train.data)


def test_fresh_removes_what_an_earlier_demo_made(tmp_path, monkeypatch):
    from jobs.demo import remove

    monkeypatch.chdir(tmp_path)
    config = DemoConfig.load(DEFAULT_CONFIG)
    for path in (config.synthesize.out, config.train.data, "runs/demo/train/baseline", "keep"):
        Path(path).mkdir(parents=True)
    remove(config)
    assert [p.name for p in tmp_path.rglob("*") if p.is_dir()] == ["runs", "keep", "demo", "train"]
    shutil.rmtree(tmp_path / "runs")
