"""From checkpoints and a file of responses to a diagnosis."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from carryover.data.responses import read_responses, require_target
from carryover.diagnostics.headroom import Headroom, headroom
from carryover.diagnostics.replay import Replay, replay
from carryover.drafters import checkpoint
from carryover.drafters.models import BlockDrafter
from carryover.errors import DataError
from carryover.targets import Target, resolve
from carryover.training.packing import Corpus, pack
from carryover.training.states import OnlineStates

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENS_AT_ONCE = 8192


@dataclass(frozen=True)
class Job:
    """What to diagnose.

    Attributes:
        drafter: checkpoint.
        data: responses of the target; those of temperature 0 are used.
        baseline: checkpoint that a Carryover drafter was continued from; for a replay alone.
        target: name; None takes the one that the checkpoint names.
        max_responses: no more than this many, spread over the data.
    """

    drafter: Path
    data: Path
    baseline: Path | None = None
    target: str | None = None
    max_responses: int = 64


@dataclass(frozen=True)
class _Material:
    """Everything loaded, in float32 on this machine's GPU if it has one."""

    target: Target
    drafter: BlockDrafter
    model: PreTrainedModel
    corpus: Corpus
    packs: list[np.ndarray]
    source: OnlineStates
    device: torch.device


def run_replay(job: Job, *, on_rounds: Callable[[int], None] = lambda count: None) -> Replay:
    """Load everything and replay.

    Raises:
        UserError: whatever is wrong with the checkpoints, the target or the data.
    """
    loaded = _load(job)
    baseline = None
    if job.baseline is not None:
        baseline = checkpoint.load(job.baseline, loaded.target).to(loaded.device).eval()
    return replay(
        loaded.drafter, loaded.model, loaded.corpus, loaded.packs, loaded.source,
        device=loaded.device, baseline=baseline, on_rounds=on_rounds,
    )  # fmt: skip


def run_headroom(job: Job, *, on_rounds: Callable[[int], None] = lambda count: None) -> Headroom:
    """Load everything and measure the headroom.

    Raises:
        UserError: whatever is wrong with the checkpoint, the target or the data.
    """
    loaded = _load(job)
    return headroom(
        loaded.drafter, loaded.model, loaded.corpus, loaded.packs, loaded.source,
        device=loaded.device, on_rounds=on_rounds,
    )  # fmt: skip


def _load(job: Job) -> _Material:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    named = checkpoint.read_config(job.drafter)["speculators_config"]["verifier"]["name_or_path"]
    target = resolve(job.target or named)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    drafter = checkpoint.load(job.drafter, target).to(device).eval()
    table = read_responses(job.data)
    require_target(table, target.identity(), source=job.data)
    limit = target.load_config().max_position_embeddings
    corpus = Corpus(table, max_tokens=min(limit, _TOKENS_AT_ONCE))
    greedy = corpus.usable[corpus.greedy(corpus.usable)]
    if not len(greedy):
        raise DataError(
            f"{job.data} has no response of temperature 0; make some with "
            "`platform data regenerate --set temperatures=[0]`"
        )
    if len(greedy) > job.max_responses:
        greedy = greedy[np.linspace(0, len(greedy) - 1, job.max_responses).round().astype(int)]
    packs = [greedy[members] for members in pack(corpus.lengths(greedy), _TOKENS_AT_ONCE)]
    model = target.load_model(dtype=torch.float32, device=device)
    source = OnlineStates(
        model, layer_ids=list(drafter.target_layer_ids), corpus=corpus, keep_prefix=True
    )
    return _Material(target, drafter, model, corpus, packs, source, device)
