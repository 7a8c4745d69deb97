"""From a configuration to a loop that is ready to run: data, target states, drafter.

The driver of a job uses the first half to check and to estimate; each worker uses all of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache as cache_calls
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import nn

from carryover import provenance
from carryover.data.responses import read_responses, require_target
from carryover.drafters import checkpoint
from carryover.drafters.models import BlockDrafter
from carryover.engine import kv_numbers_per_token
from carryover.targets import Target
from carryover.training.batch import Batch
from carryover.training.carryover import carryover_step
from carryover.training.checkpointed import Reporter
from carryover.training.config import TrainConfig
from carryover.training.evaluate import Acceptance, evaluate, evaluate_carrying, make_batch
from carryover.training.loop import Material, StepFunction, TrainingLoop
from carryover.training.packing import Corpus, Split, pack, split
from carryover.training.snapshots import Progress, Snapshots
from carryover.training.states import OnlineStates, StateCache, StateSource, weights_fingerprint
from carryover.training.step import StepResult, baseline_step
from carryover.training.workers import Workers

Kind = Literal["baseline", "carryover", "control"]
# A batch for evaluation needs no gradient, so it may hold more than one for training.
_EVALUATION_TOKENS = 8192


@dataclass(frozen=True)
class Assignment:
    """What every worker of a job is told.

    Attributes:
        config: the run's settings.
        kind: a baseline from scratch; or, from a checkpoint, carryover training or its
            control, which takes the same steps and carries nothing.
        target: the frozen target.
        data: absolute path of the responses.
        run_folder: absolute path, the same on all workers.
    """

    config: TrainConfig
    kind: Kind
    target: Target
    data: Path
    run_folder: Path


@dataclass(frozen=True)
class Data:
    """The rows of a run.

    Attributes:
        corpus: their tokens.
        split: which are trained on, which are held out.
        packs: rows of each training pack.
        held_out: rows of each evaluation pack.
    """

    corpus: Corpus
    split: Split
    packs: list[np.ndarray]
    held_out: list[np.ndarray]


def load_data(assignment: Assignment) -> Data:
    """Read, check, split and pack the responses.

    Raises:
        DataError: unreadable, made by another target, or nothing to train on.
    """
    config = assignment.config
    table = read_responses(assignment.data)
    require_target(table, assignment.target.identity(), source=assignment.data)
    capacity = config.batch.sequence_length
    corpus = Corpus(table, max_tokens=capacity)
    parts = split(
        corpus,
        fraction=config.evaluation.held_out_fraction,
        max_held_out=config.evaluation.max_sequences,
    )
    packs, held_out = (
        [rows[members] for members in pack(corpus.lengths(rows), room, seed=config.seed)]
        for rows, room in (
            (parts.train_N, capacity),
            (parts.held_out_N, max(capacity, _EVALUATION_TOKENS)),
        )
    )
    return Data(corpus=corpus, split=parts, packs=packs, held_out=held_out)


def state_cache(assignment: Assignment, data: Data, layer_ids: list[int]) -> StateCache | None:
    """The cache of hidden states that the configuration asks for, whether filled or not.

    Carryover training verifies with the target, so it needs what the target's attention kept of
    the recorded text; its control reads the same states from the same files. Without
    `cache_prefix` both run the target in every step.
    """
    config, kept = assignment.config, assignment.config.hidden_states
    continued = assignment.kind != "baseline"
    if kept.cache == "none" or (continued and not kept.cache_prefix):
        return None
    prefix_width = kv_numbers_per_token(assignment.target.load_config()) if continued else None
    return StateCache(
        kept.cache_folder,
        corpus=data.corpus,
        rows=np.sort(np.concatenate([data.split.train_N, data.split.held_out_N])),
        identity=assignment.target.identity(),
        weights=weights_fingerprint(assignment.target),
        layer_ids=layer_ids,
        compute_dtype=config.target_precision,
        dtype=kept.cache_dtype,
        prefix_width=prefix_width,
        read_prefix=assignment.kind == "carryover",
    )


def build_loop(assignment: Assignment, *, workers: Workers, reporter: Reporter) -> TrainingLoop:
    """Load everything and return the loop, at the run's last checkpoint if it has one.

    Fills the cache of hidden states first if there is one; workers share that work.

    Raises:
        UserError: whatever is wrong with data, target, checkpoint or settings.
        Stopped: the user stopped the run while the cache was filled.
    """
    config, target, device = assignment.config, assignment.target, workers.device
    snapshots = Snapshots(assignment.run_folder, keep=config.checkpoints.keep)
    resume_from = snapshots.latest()
    data = load_data(assignment)
    drafter = checkpoint.load(resume_from or assignment.run_folder / "initial", target)
    source, step, evaluator = _kind_parts(
        assignment, data, list(drafter.target_layer_ids), workers, reporter
    )
    drafter = drafter.to(device)
    if assignment.kind != "baseline" and config.continuation.trained == "attention":
        freeze_outside_attention(drafter)
    material = Material(data.corpus, data.packs, data.held_out, source)
    scale = _marker_lr_scale(assignment, material, drafter, resume_from)
    optimizer = config.optimizer.model_copy(update={"marker_lr_scale": scale})
    return TrainingLoop(
        config.model_copy(update={"optimizer": optimizer}),
        material,
        drafter=drafter,
        step=step,
        evaluate=evaluator,
        save_drafter=_saver(assignment, drafter),
        snapshots=snapshots,
        workers=workers,
        reporter=reporter,
        resume_from=resume_from,
        evaluate_first=assignment.kind != "baseline",
    )


def freeze_outside_attention(drafter: nn.Module) -> None:
    """Keep MLPs and the Markov head as they are."""
    for name, parameter in drafter.named_parameters():
        if ".mlp." in name or name.startswith("markov_head."):
            parameter.requires_grad_(False)


def _marker_lr_scale(
    assignment: Assignment, material: Material, drafter: BlockDrafter, resume_from: Path | None
) -> float:
    """As set; else the size of a fused state's entry before the first step, in one pack."""
    interface, chosen = drafter.carried_settings, assignment.config.optimizer.marker_lr_scale
    if interface is None or interface.mark != "embedding":
        return 1.0
    if chosen is not None:
        return chosen
    initial = drafter
    if resume_from is not None:
        initial = checkpoint.load(assignment.run_folder / "initial", assignment.target)
    device = next(drafter.parameters()).device
    batch = make_batch(material.corpus, material.packs[0], material.source, device=device)
    return fused_size(initial, batch.hidden_TC)


@torch.no_grad()
def fused_size(drafter: BlockDrafter, hidden_TC: torch.Tensor) -> float:
    """Root mean square of a fused state's entries, of the median row: some are very large."""
    weight = drafter.fc.weight
    fused_TD = drafter.fc(hidden_TC.to(weight.device, weight.dtype)).float()
    return float(fused_TD.square().mean(-1).sqrt().median())


def _kind_parts(
    assignment: Assignment,
    data: Data,
    layer_ids: list[int],
    workers: Workers,
    reporter: Reporter,
) -> tuple[StateSource, StepFunction, Callable[[BlockDrafter, Sequence[np.ndarray]], Acceptance]]:
    """Where states come from, what a step is, and how it is evaluated."""
    config, corpus, device = assignment.config, data.corpus, workers.device
    carries = assignment.kind == "carryover"
    # once, whether to fill the cache, to verify or both
    load_target = cache_calls(
        partial(
            assignment.target.load_model,
            dtype=getattr(torch, config.target_precision),
            device=device,
        )
    )
    cache = state_cache(assignment, data, layer_ids)
    if cache is not None:
        _fill(cache, load_target, layer_ids, corpus, workers, reporter)
        model, source = load_target() if carries else None, cache
    else:
        model = load_target()
        source = OnlineStates(model, layer_ids=layer_ids, corpus=corpus, keep_prefix=carries)

    def continued_step(
        drafter: nn.Module, batch: Batch, *, generator: torch.Generator
    ) -> StepResult:
        return carryover_step(
            drafter, model, batch, settings=config.step, generator=generator, carry=carries
        )

    def replay(drafter: BlockDrafter, packs: Sequence[np.ndarray]) -> Acceptance:
        if carries:
            return evaluate_carrying(drafter, model, corpus, packs, source, device=device)
        return evaluate(drafter, corpus, packs, source, device=device)

    if assignment.kind == "baseline":
        return source, partial(baseline_step, settings=config.step), replay
    return source, continued_step, replay


def _saver(
    assignment: Assignment, drafter: nn.Module
) -> Callable[[Mapping[str, torch.Tensor], Progress, Path], None]:
    """Saves trained weights with what a checkpoint holds besides, kept as it is now."""
    trained = {name for name, weight in drafter.named_parameters() if weight.requires_grad}
    fixed = {
        name: tensor.detach().clone()
        for name, tensor in drafter.state_dict().items()
        if name in checkpoint.saved_names(drafter) - trained
    }

    def save(weights: Mapping[str, torch.Tensor], progress: Progress, folder: Path) -> None:
        record = {
            "training": assignment.kind,
            "run": assignment.config.name,
            "step": progress.step,
            "num_steps": progress.num_steps,
            "evaluation": progress.evaluation,
            "config": assignment.config.model_dump(mode="json"),
            **provenance.collect(),
        }
        checkpoint.save(drafter, folder, record, weights={**fixed, **weights})

    return save


class Stopped(Exception):
    """The user stopped the run before its loop began; there is nothing to save."""


def _fill(
    cache: StateCache,
    load_target: Callable[[], nn.Module],
    layer_ids: list[int],
    corpus: Corpus,
    workers: Workers,
    reporter: Reporter,
) -> None:
    """Write the missing parts, each worker its share; return when all are there.

    Raises:
        Stopped: on every worker, if one was asked to stop.
    """
    missing = cache.missing_parts()
    workers.barrier()
    mine = missing[workers.rank :: workers.size]
    before = time.monotonic()

    def on_rows(tokens: int) -> None:
        nonlocal before
        now = time.monotonic()
        reporter.report({"kind": "cached", "tokens": tokens, "seconds": now - before})
        before = now
        if reporter.stop_requested():
            raise Stopped

    if mine:
        online = OnlineStates(
            load_target(), layer_ids=layer_ids, corpus=corpus, keep_prefix=cache.keeps_prefix
        )
        with suppress(Stopped):
            cache.build(online, parts=mine, on_rows=on_rows)
    workers.barrier()
    if cache.missing_parts():
        raise Stopped
