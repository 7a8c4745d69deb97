"""The job that trains a small target: `platform train target`."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

from carryover.data.responses import read_responses, require_target
from carryover.errors import ConfigError
from carryover.runtime import has_fast_bfloat16
from carryover.targets import resolve
from carryover.tracking import Tracker
from carryover.training.checkpointed import planned_steps
from carryover.training.snapshots import Progress
from carryover.training.target_config import TargetTrainConfig
from carryover.training.target_loop import block_schedule
from carryover.training.target_session import TargetAssignment, make_initial, read_blocks
from carryover.training.target_text import read_texts
from jobs.run_folder import Outcome, RunFolder
from jobs.train_records import Recorder
from jobs.train_target_view import TargetView
from jobs.train_worker import train_target_worker
from jobs.train_workers import WorkerJob, run_workers


def train_target(
    config: TargetTrainConfig,
    *,
    restart: bool = False,
    tracking_uri: str | None = None,
    view: TargetView | None = None,
) -> Outcome:
    """Train a target from scratch; continue the run if its folder holds a part of it.

    Args:
        config: the run's settings; relative paths are relative to the working folder.
        restart: delete the run of this name first.
        tracking_uri: see `carryover.tracking.store_uri`.
        view: shows what happens; default: on stderr.

    Raises:
        UserError: wrong input, data or settings.
        KeyboardInterrupt: stopped by the user, after a checkpoint was written.
    """
    view = view or TargetView()
    if config.data is None:
        raise ConfigError(
            "no text to train on; give --data PATH, made with `platform data regenerate`"
        )
    config = config.resolved(fast_bfloat16=has_fast_bfloat16())
    tracker = Tracker(tracking_uri)
    tracker.open(config.experiment)
    writer = resolve(config.writer)
    table = read_responses(config.data)
    require_target(table, writer.identity(), source=config.data)
    texts = read_texts(table, writer.load_tokenizer())
    assignment = TargetAssignment(config, (Path(config.runs_folder) / config.name).absolute())
    folder = RunFolder(assignment.run_folder, keep=config.checkpoints.keep)
    if restart:
        folder.delete()
    identity = {
        "training": "target",
        "text_sha256": hashlib.sha256("\0".join(texts).encode()).hexdigest(),
        "settings": config.fingerprint(),
    }
    if folder.exists:
        folder.require_same(identity)
        progress = folder.progress()
        if progress and progress.finished:
            view.reused(folder.path, progress)
            return Outcome(folder.path, progress, reused=True)
        view.resumed(folder.path, progress)
    else:
        view.stage(f"making a tokenizer of {config.shape.vocab_size:,} tokens, and random weights")
        folder.create(identity, lambda path: make_initial(config, texts, writer, path))
    folder.write_config(config.to_yaml())
    blocks, held_out = read_blocks(assignment)
    num_steps = planned_steps(config, block_schedule(config, len(blocks)))
    facts = _facts(assignment, texts, len(blocks), len(held_out))
    view.plan_target(facts, folder.path, num_steps)
    with tracker.run(
        experiment=config.experiment,
        name=config.name,
        tags={"carryover.training": "target", "carryover.run_folder": str(folder.path)},
        run_id=folder.mlflow_run(tracker.uri),
    ) as run:
        folder.update({"mlflow_run_id": run.id, "mlflow_uri": tracker.uri})
        run.log_params({**config.model_dump(mode="json"), "num_steps": num_steps})
        run.log_text(config.to_yaml(), "config.yaml")
        run.log_dict({"path": str(Path(config.data).absolute()), **facts}, "data.json")
        with view.progress(num_steps, None):
            try:
                run_workers(
                    WorkerJob(
                        train_target_worker,
                        {"assignment": assignment},
                        config.resources,
                        folder.path,
                    ),
                    Recorder(run, view, num_steps),
                )
            except KeyboardInterrupt:
                view.stopped(folder.path, folder.progress())
                raise
        progress = folder.progress() or Progress(num_steps=num_steps)
        run.log_metrics(
            {
                "summary/steps": progress.step,
                "summary/trained_s": progress.trained_s,
                "summary/tokens": progress.tokens,
                "summary/parameters": facts["parameters"],
                **{f"summary/best/{name}": value for name, value in progress.best.items()},
            },
            progress.step,
        )
    view.finished_target(folder.path, progress)
    return Outcome(folder.path, progress, reused=False)


def _facts(
    assignment: TargetAssignment, texts: list[str], num_blocks: int, num_held_out: int
) -> dict[str, Any]:
    from safetensors import safe_open

    with safe_open(assignment.initial / "model.safetensors", framework="pt") as weights:
        names = weights.keys()
        parameters = sum(math.prod(weights.get_slice(name).get_shape()) for name in names)
    length = assignment.config.block_length
    return {
        "conversations": len(texts),
        "characters": sum(map(len, texts)),
        "blocks": num_blocks,
        "held_out_blocks": num_held_out,
        "tokens": num_blocks * length,
        "parameters": parameters,
    }
