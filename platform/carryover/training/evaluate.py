"""Held-out evaluation: the rounds that decoding would take, and what each accepts.

A greedy response is what greedy decoding commits, whatever the drafter proposes. So its rounds can
be replayed without the target: draft at every position of the response at once, count how many
proposals equal the recorded tokens, and walk from the first response token, each round ending at
the token after the accepted ones. A sampled response is replayed by the same rule: the recorded
token is the sample, and a proposal is accepted while it equals the recorded token.

The last rounds of a response that was cut are left out when the cut hides recorded tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from carryover.drafters.drafting import draft
from carryover.training.anchors import anchor_candidates, anchored_blocks
from carryover.training.batch import Batch
from carryover.training.packing import Corpus
from carryover.training.states import StateSource
from carryover.training.step import recorded_acceptance


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


def evaluate(
    drafter: nn.Module,
    corpus: Corpus,
    packs: Sequence[np.ndarray],
    source: StateSource,
    *,
    device: torch.device,
) -> Acceptance:
    """Replay the decoding of these rows.

    Args:
        drafter: a drafter whose parameters are whole.
        corpus: the rows' tokens.
        packs: the rows, in groups that are drafted for together.
        source: the target's states.
        device: of the drafter.
    """
    proposal_length = drafter.proposal_length
    rounds, reached_B = 0, torch.zeros(proposal_length, dtype=torch.float64)
    for rows in packs:
        batch = make_batch(corpus, rows, source, device=device)
        anchors_A = anchor_candidates(batch).nonzero().squeeze(-1)
        proposals_AB = draft(drafter, batch.context, anchored_blocks(batch, anchors_A))
        accepted_A = recorded_acceptance(batch, anchors_A, proposals_AB)
        accepted = dict(zip(anchors_A.tolist(), accepted_A.tolist(), strict=True))
        first = 0
        for row in rows:
            sequence = corpus.sequence(int(row))
            end = first + len(sequence)
            last_anchor = end - 2 if sequence.complete else end - 1 - proposal_length
            anchor = first + sequence.prompt_length
            while anchor <= last_anchor:
                rounds += 1
                reached_B[: accepted[anchor]] += 1
                anchor += accepted[anchor] + 1
            first = end
    return Acceptance(rounds=float(rounds), reached_B=reached_B)
