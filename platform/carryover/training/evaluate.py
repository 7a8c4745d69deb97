"""Held-out evaluation: the rounds that decoding would take, and what each accepts.

A greedy response is what greedy decoding commits, whatever the drafter proposes. So its rounds can
be replayed: from the first response token, each round ends at the token after the accepted ones.
A sampled response is replayed by the same rule: the recorded token is the sample, and a proposal
is accepted while it equals the recorded token.

Without carried context a round depends on nothing but its anchor, so `evaluate` drafts at every
position at once and then walks. With it a round depends on the one before, so `evaluate_carrying`
takes the rounds of all responses one after another, verification by the target included.

The last rounds of a response that was cut are left out when the cut hides recorded tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from carryover.drafters.blocks import Blocks, Carried
from carryover.drafters.drafting import draft
from carryover.drafters.models import BlockDrafter
from carryover.training.anchors import anchor_candidates, anchored_blocks
from carryover.training.batch import Batch
from carryover.training.carryover import carried_after, select
from carryover.training.packing import Corpus
from carryover.training.states import StateSource
from carryover.training.step import recorded_acceptance

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Acceptance:
    """Counts over rounds; add up those of several workers.

    Attributes:
        rounds: rounds replayed.
        reached_B: rounds in which at least k = 1..B proposals were accepted.
    """

    rounds: float
    reached_B: torch.Tensor

    def metrics(self) -> dict[str, float]:
        """Acceptance length (accepted plus one, a mean over rounds) and rates by block position."""
        rounds = max(self.rounds, 1.0)
        rates = (self.reached_B / rounds).tolist()
        positions = {f"accepted/position_{k}": rate for k, rate in enumerate(rates, 1)}
        return {"acceptance_length": 1 + sum(rates), "rounds": self.rounds, **positions}


def make_batch(
    corpus: Corpus, rows: Sequence[int], source: StateSource, *, device: torch.device
) -> Batch:
    """One packed sequence of these rows with the target's states, on this device."""
    sequences = [corpus.sequence(int(row)) for row in rows]
    states = source.states([int(row) for row in rows])
    lengths = [len(sequence) for sequence in sequences]
    position_ids = [np.arange(length) for length in lengths]
    document_ids = [np.full(length, index) for index, length in enumerate(lengths)]
    response = [
        position >= sequence.prompt_length
        for position, sequence in zip(position_ids, sequences, strict=True)
    ]
    tokens = [sequence.input_ids_T for sequence in sequences]
    return Batch(
        input_ids_T=torch.from_numpy(np.concatenate(tokens).astype(np.int64)),
        position_ids_T=torch.from_numpy(np.concatenate(position_ids)),
        document_ids_T=torch.from_numpy(np.concatenate(document_ids)),
        response_mask_T=torch.from_numpy(np.concatenate(response)),
        hidden_TC=states.hidden_TC,
        last_hidden_TD=states.last_hidden_TD,
        prefix=states.prefix,
    ).to(device)


@torch.no_grad()
def evaluate(
    drafter: BlockDrafter,
    corpus: Corpus,
    packs: Sequence[np.ndarray],
    source: StateSource,
    *,
    device: torch.device,
) -> Acceptance:
    """Replay the decoding of these rows, with nothing carried.

    Args:
        drafter: a drafter whose parameters are whole.
        corpus: the rows' tokens.
        packs: the rows, in groups that are drafted for together.
        source: the target's states.
        device: of the drafter.
    """
    rounds = decoding_rounds(drafter, corpus, packs, source, device=device)
    return _acceptance(rounds, drafter.proposal_length)


@torch.no_grad()
def evaluate_carrying(
    drafter: BlockDrafter,
    target_model: PreTrainedModel,
    corpus: Corpus,
    packs: Sequence[np.ndarray],
    source: StateSource,
    *,
    device: torch.device,
) -> Acceptance:
    """Replay the decoding of these rows, each round seeing what the one before left.

    Args:
        drafter: a drafter with carried context whose parameters are whole.
        target_model: the frozen target, on `device`.
        corpus: the rows' tokens.
        packs: the rows, in groups whose rounds are taken together.
        source: the target's states, with their prefix.
        device: of the drafter.
    """
    rounds = carrying_rounds(drafter, target_model, corpus, packs, source, device=device)
    return _acceptance(rounds, drafter.proposal_length)


@dataclass(frozen=True)
class Rounds:
    """Some rounds of some responses.

    Attributes:
        batch: the packed sequence of the responses.
        anchors_A: packed rows of the anchors.
        blocks: their blocks, with what the rounds before left.
        proposals_AB: what was proposed.
        accepted_A: how many proposals pass.
    """

    batch: Batch
    anchors_A: torch.Tensor
    blocks: Blocks
    proposals_AB: torch.Tensor
    accepted_A: torch.Tensor


@torch.no_grad()
def decoding_rounds(
    drafter: BlockDrafter,
    corpus: Corpus,
    packs: Sequence[np.ndarray],
    source: StateSource,
    *,
    device: torch.device,
) -> Iterator[Rounds]:
    """All rounds that decoding with nothing carried takes, a pack at a time, by packed row.

    Arguments as of `evaluate`.
    """
    for rows in packs:
        batch = make_batch(corpus, rows, source, device=device)
        anchors_A = anchor_candidates(batch).nonzero().squeeze(-1)
        proposals_AB = draft(drafter, batch.context, anchored_blocks(batch, anchors_A))
        accepted_A = recorded_acceptance(batch, anchors_A, proposals_AB)
        place_of = {anchor: place for place, anchor in enumerate(anchors_A.tolist())}
        accepted = accepted_A.tolist()
        firsts, lasts = _anchor_range(corpus, rows, drafter.proposal_length)
        walked = []
        for anchor, last in zip(firsts, lasts, strict=True):
            while anchor <= last:
                place = place_of[anchor]
                walked.append(place)
                anchor += accepted[place] + 1
        taken_A = torch.tensor(walked, dtype=torch.long, device=device)
        anchors_A = anchors_A[taken_A]
        blocks = anchored_blocks(batch, anchors_A)
        yield Rounds(batch, anchors_A, blocks, proposals_AB[taken_A], accepted_A[taken_A])


@torch.no_grad()
def carrying_rounds(
    drafter: BlockDrafter,
    target_model: PreTrainedModel,
    corpus: Corpus,
    packs: Sequence[np.ndarray],
    source: StateSource,
    *,
    device: torch.device,
) -> Iterator[Rounds]:
    """The rounds that decoding with carried context takes, one of every response at a time.

    Arguments as of `evaluate_carrying`.
    """
    for rows in packs:
        batch = make_batch(corpus, rows, source, device=device)
        context = drafter.project(batch.context)
        firsts, lasts = _anchor_range(corpus, rows, drafter.proposal_length)
        anchors_A = torch.tensor(firsts, device=device)
        lasts_A = torch.tensor(lasts, device=device)
        carried: dict[str, Carried | torch.Tensor] = {}
        while True:
            going = (anchors_A <= lasts_A).nonzero().squeeze(1)
            if not len(going):
                break
            anchors_A, lasts_A = anchors_A[going], lasts_A[going]
            blocks = replace(anchored_blocks(batch, anchors_A), **select(carried, going))
            proposals_AB = draft(drafter, context, blocks)
            accepted_A = recorded_acceptance(batch, anchors_A, proposals_AB)
            yield Rounds(batch, anchors_A, blocks, proposals_AB, accepted_A)
            carried = carried_after(drafter, target_model, batch, blocks, proposals_AB, accepted_A)
            anchors_A = anchors_A + accepted_A + 1


def _anchor_range(
    corpus: Corpus, rows: Sequence[int], proposal_length: int
) -> tuple[list[int], list[int]]:
    """Packed rows of each response's first anchor, and of the last whose labels are all known."""
    firsts, lasts, start = [], [], 0
    for row in rows:
        sequence = corpus.sequence(int(row))
        end = start + len(sequence)
        firsts.append(start + sequence.prompt_length)
        lasts.append(end - 2 if sequence.complete else end - 1 - proposal_length)
        start = end
    return firsts, lasts


def _acceptance(rounds: Iterable[Rounds], proposal_length: int) -> Acceptance:
    """Counts rounds by accepted length."""
    counted = 0
    reached_B = torch.zeros(proposal_length, dtype=torch.float64)
    for taken in rounds:
        counted += len(taken.accepted_A)
        places_B = torch.arange(proposal_length, device=taken.accepted_A.device)
        reached_B += (taken.accepted_A[:, None] > places_B).sum(0).cpu()
    return Acceptance(rounds=float(counted), reached_B=reached_B)
