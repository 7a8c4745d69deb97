"""From checkpoints and a file of responses to a replay."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from carryover.data.responses import read_responses, require_target
from carryover.diagnostics.replay import Replay, replay
from carryover.drafters import checkpoint
from carryover.errors import DataError
from carryover.targets import resolve
from carryover.training.packing import Corpus, pack
from carryover.training.states import OnlineStates

_TOKENS_AT_ONCE = 8192


@dataclass(frozen=True)
class ReplayJob:
    """What to replay.

    Attributes:
        drafter: Carryover checkpoint.
        baseline: checkpoint that it was continued from; None compares with itself alone.
        data: responses of the target; those of temperature 0 are used.
        target: name; None takes the one that the checkpoint names.
        max_responses: no more than this many, spread over the data.
    """

    drafter: Path
    data: Path
    baseline: Path | None = None
    target: str | None = None
    max_responses: int = 64


def run_replay(job: ReplayJob, *, on_rounds: Callable[[int], None] = lambda count: None) -> Replay:
    """Load everything and replay, in float32 on this machine's GPU if it has one.

    Raises:
        UserError: whatever is wrong with the checkpoints, the target or the data.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)
    named = checkpoint.read_config(job.drafter)["speculators_config"]["verifier"]["name_or_path"]
    target = resolve(job.target or named)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    drafter = checkpoint.load(job.drafter, target).to(device).eval()
    baseline = None
    if job.baseline is not None:
        baseline = checkpoint.load(job.baseline, target).to(device).eval()
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
    return replay(
        drafter, model, corpus, packs, source, device=device, baseline=baseline,
        on_rounds=on_rounds,
    )  # fmt: skip
