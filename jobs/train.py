"""The training job: checks, the run's folder, workers through Ray Train, records.

The training itself is plain torch in `carryover.training`. Ray Train V2 places the workers, sets up
their process group, and starts them again when one is lost. Checkpoints are the run folder's own
(whole by renaming, without pickles, the same with and without Ray), so what a run resumes from is
always said, and never Ray's silent choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from carryover import provenance
from carryover.drafters import checkpoint
from carryover.drafters.models import BlockDrafter
from carryover.drafters.shipped import drafter_folder
from carryover.errors import ConfigError
from carryover.runtime import has_fast_bfloat16
from carryover.targets import file_sha256, resolve
from carryover.tracking import Run, Tracker
from carryover.training.checkpointed import planned_steps
from carryover.training.config import TrainConfig
from carryover.training.packing import Schedule
from carryover.training.session import Assignment, Data, Kind, load_data, state_cache
from carryover.training.snapshots import Progress
from jobs.run_folder import Outcome, RunFolder
from jobs.train_records import Recorder
from jobs.train_view import View
from jobs.train_worker import train_worker
from jobs.train_workers import WorkerJob, run_workers
from jobs.verification import verify_in_vllm


def train(
    config: TrainConfig,
    *,
    kind: Kind = "baseline",
    start_from: str | Path | None = None,
    restart: bool = False,
    tracking_uri: str | None = None,
    tracker: Tracker | None = None,
    view: View | None = None,
) -> Outcome:
    """Run a training job to its end; continue it if its folder holds a part of it.

    Args:
        config: the run's settings; relative paths are relative to the working folder.
        kind: which training.
        start_from: the checkpoint that carryover training and its control begin at; a baseline
            may begin at one, to be trained longer, in the other regime or with another vocabulary.
        restart: delete the run of this name first.
        tracking_uri: see `carryover.tracking.store_uri`.
        tracker: records the run, in place of the store at `tracking_uri`.
        view: shows what happens; default: on stderr.

    Raises:
        UserError: wrong input, data, target or settings.
        KeyboardInterrupt: stopped by the user, after a checkpoint was written.
    """
    view = view or View()
    if config.data is None:
        raise ConfigError(
            "no responses to train on; give --data PATH, made with `platform data regenerate`"
        )
    config = config.resolved(fast_bfloat16=has_fast_bfloat16())
    if start_from is None and kind != "baseline":
        raise ConfigError("carryover and control training begin at a checkpoint")
    if start_from is not None:
        start_from = drafter_folder(start_from).resolve()
        config = continue_from(start_from, config, kind=kind)
    tracker = tracker or Tracker(tracking_uri)
    tracker.open(config.experiment)
    assignment = _assign(config, kind)
    data = load_data(assignment)
    folder = RunFolder(assignment.run_folder, keep=config.checkpoints.keep)
    if restart:
        folder.delete()
    view.data(assignment, data)
    identity = _identity(assignment, data, start_from)
    if folder.exists:
        folder.require_same(identity)
        progress = folder.progress()
        if progress and progress.finished:
            view.reused(folder.path, progress)
            return Outcome(folder.path, progress, reused=True)
        view.resumed(folder.path, progress)
    else:
        view.stage("making the drafter")
        folder.create(identity, lambda path: _initialise(assignment, data, start_from, path))
    folder.write_config(config.to_yaml())
    description = checkpoint.describe(folder.initial)
    num_steps = planned_steps(
        config,
        Schedule(len(data.packs), packs_per_step=config.batch.packs_per_step, seed=config.seed),
    )
    view.plan(description, folder.path, num_steps)
    cache = state_cache(assignment, data, description["target_layer_ids"])
    if cache is not None:
        view.cache(cache)
        cache.require_room()
    record = folder.record()
    with tracker.run(
        experiment=config.experiment,
        name=config.name,
        tags={"carryover.training": kind, "carryover.run_folder": str(folder.path)},
        run_id=folder.mlflow_run(tracker.uri),
    ) as run:
        folder.update({"mlflow_run_id": run.id, "mlflow_uri": tracker.uri})
        _describe_run(run, assignment, data, description, num_steps)
        if config.verify_first and not record.get("verified"):
            view.stage("loading the untrained drafter into vLLM with its target")
            view.verified(verify_in_vllm(folder.initial, assignment.target))
            folder.update({"verified": True})
        recorder = Recorder(run, view, num_steps, states_s=record.get("states_s", 0.0))
        with view.progress(num_steps, cache):
            try:
                run_workers(
                    WorkerJob(
                        train_worker, {"assignment": assignment}, config.resources, folder.path
                    ),
                    recorder,
                )
            except KeyboardInterrupt:
                view.stopped(folder.path, folder.progress())
                raise
            finally:
                folder.update({"states_s": recorder.states_s})
        progress = folder.progress() or Progress(num_steps=num_steps)
        run.log_dict(checkpoint.describe(folder.path / "last"), "checkpoint.json")
        _summarise(run, progress, states_s=recorder.states_s)
    view.finished(folder.path, progress, kind)
    return Outcome(folder.path, progress, reused=False)


def _assign(config: TrainConfig, kind: Kind) -> Assignment:
    """Resolve the target and make every path absolute: workers run elsewhere."""
    hidden_states = config.hidden_states.model_copy(
        update={"cache_folder": str(Path(config.hidden_states.cache_folder).absolute())}
    )
    return Assignment(
        config=config.model_copy(update={"hidden_states": hidden_states}),
        kind=kind,
        target=resolve(config.target),
        data=Path(config.data).absolute(),
        run_folder=(Path(config.runs_folder) / config.name).absolute(),
    )


def continue_from(start_from: Path, config: TrainConfig, *, kind: Kind) -> TrainConfig:
    """The settings of training that begins at a checkpoint: the drafter's shape is that one's.

    A baseline may have another vocabulary, if `config` sets its size. Carryover training and its
    control keep the regime too, and take epochs and learning rate from `continuation`.

    Raises:
        CheckpointError: not a checkpoint.
    """
    found = checkpoint.describe(start_from)
    taken = {
        "num_layers": found["layers"],
        "proposal_length": found["proposal_length"],
        "target_layer_ids": tuple(found["target_layer_ids"]),
        "mask_token_id": found["mask_token_id"],
    }
    if kind != "baseline" or "draft_vocab_size" not in config.drafter.model_fields_set:
        full = found["draft_vocab_size"] == found["target_vocab_size"]
        taken["draft_vocab_size"] = None if full else found["draft_vocab_size"]
    drafter = config.drafter.model_copy(update=taken)
    if kind == "baseline":
        return config.model_copy(update={"drafter": drafter})
    return config.continued(regime=found["regime"], drafter=drafter)


def _identity(assignment: Assignment, data: Data, start_from: Path | None) -> dict[str, Any]:
    """What must stay the same for a run to be continued."""
    start = None if start_from is None else file_sha256(start_from / checkpoint.WEIGHTS)
    target = {k: v for k, v in assignment.target.identity().items() if k != "name"}
    return {
        "training": assignment.kind,
        "start_sha256": start,
        "target": target,
        "data_sha256": data.corpus.sha256(data.corpus.usable),
        "settings": assignment.config.fingerprint(),
    }


def _initialise(assignment: Assignment, data: Data, start_from: Path | None, folder: Path) -> None:
    """Write the drafter before the first step."""
    config, target = assignment.config, assignment.target
    record = {"training": assignment.kind, "run": config.name, "step": 0}
    drafter = None
    if start_from is not None:
        drafter = checkpoint.load(start_from, target)
        record["from"] = str(start_from)
        if assignment.kind != "carryover" and drafter.carried_settings is not None:
            raise ConfigError(
                f"{start_from} has carried context; a baseline and the control begin at a baseline "
                "checkpoint, such as the one that carryover training began at"
            )
    if assignment.kind == "carryover":
        drafter.add_carried_context(config.carried)
    elif assignment.kind == "baseline" and not _is_what_is_asked(drafter, config):
        counts = data.corpus.token_counts(data.split.train_N, target.identity()["vocab_size"])
        drafter = checkpoint.initialise(
            config.regime,
            target,
            config.drafter,
            token_counts={token: int(counts[token]) for token in counts.nonzero()[0].tolist()},
            seed=config.seed,
            like=drafter,
        )
    checkpoint.save(drafter, folder, {**record, **provenance.collect()})


def _is_what_is_asked(drafter: BlockDrafter | None, config: TrainConfig) -> bool:
    """Whether a baseline can train on as it is: of this regime, with a vocabulary of this size."""
    if drafter is None or checkpoint.regime_of(drafter) != config.regime:
        return False
    size = config.drafter.draft_vocab_size or drafter.embed_tokens.num_embeddings
    return drafter.draft_vocab_size == size


def _describe_run(
    run: Run, assignment: Assignment, data: Data, description: Mapping[str, Any], num_steps: int
) -> None:
    settings = assignment.config.model_dump(mode="json")
    run.log_params({**settings, "training": assignment.kind, "num_steps": num_steps})
    run.log_text(assignment.config.to_yaml(), "config.yaml")
    kept = {key: value for key, value in description.items() if key != "provenance"}
    run.log_dict(kept, "drafter.json")
    run.log_dict(
        {
            "path": str(assignment.data),
            "rows": len(data.corpus.row_ids),
            "dropped": data.corpus.num_dropped,
            "cut": data.corpus.num_cut,
            "train_rows": len(data.split.train_N),
            "held_out_rows": len(data.split.held_out_N),
            "packs": len(data.packs),
        },
        "data.json",
    )


def _summarise(run: Run, progress: Progress, *, states_s: float) -> None:
    summary = {
        "steps": progress.step, "trained_s": progress.trained_s, "tokens": progress.tokens,
        "states_s": states_s,
    }  # fmt: skip
    if progress.best:
        summary["best/acceptance_length"] = progress.best["acceptance_length"]
        summary["best/step"] = progress.best["step"]
    run.log_metrics({f"summary/{name}": value for name, value in summary.items()}, progress.step)
