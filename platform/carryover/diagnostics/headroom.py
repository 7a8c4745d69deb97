"""Headroom: does verification leave anything that the next draft does not know already?

To be asked of a baseline, before anybody pays for Carryover training. The rounds are those of its
own greedy decoding. Each rejected round is verified, and the tokens that the target predicts at
its rejected rows are held against what was committed later:

- *Re-convergence*: rejected rows whose prediction is the token committed at the position that it
  is for, or one beside it. *Acceptance after rejection*: proposals after the first rejected one
  that equal what was committed. Carryover Drafting (arXiv 2609.14717), sections 5 and E.
- *Only carried*: rounds in which that prediction is right and the next draft, which has nothing
  carried, is wrong: by slot, an upper bound of what a reader of the top token could add.
- *Mixture*: the next draft's distribution times a power of the target's at the carried rows: at
  its own position, at those beside it, and counted from a rejected token that equals the anchor.
  The powers are fitted to half of the responses and tried on the other half, both ways. A crude
  reader of carried rows, without training: what it gains, a drafter could learn; where it gains
  nothing, there may be little to learn.

Shapes: N next drafts, B slots, K candidate tokens of a slot, F ways to meet a carried row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from carryover.bench.statistics import Interval, ratio_between, ratio_of_sums
from carryover.drafters.drafting import MAX_LOGITS
from carryover.drafters.models import BlockDrafter
from carryover.errors import DataError
from carryover.training.anchors import anchored_blocks, block_labels
from carryover.training.batch import Batch
from carryover.training.evaluate import Rounds, decoding_rounds
from carryover.training.packing import Corpus
from carryover.training.states import StateSource
from carryover.training.verification import predictions, verify

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Rows before, at and after the one that predicts a slot's position; then the one found by content.
_SHIFTS = (-1, 0, 1, 2)
_TOP_DRAFT, _TOP_CARRIED = 16, 4
_FIT_STEPS, _FIT_LR, _WEIGHT_DECAY = 200, 0.05, 1e-3
_MIN_RESPONSES = 4
_NEVER = -1e4


@dataclass(frozen=True)
class SlotHeadroom:
    """One slot of the draft after a rejected round, where a rejected row predicts its position.

    Attributes:
        slot: from 1.
        drafts: counted.
        drafter: share in which the drafter's first choice is the committed token.
        carried: share in which the target's first choice at the rejected row is.
        only_carried: share in which it is and the drafter's is not.
    """

    slot: int
    drafts: int
    drafter: float
    carried: float
    only_carried: float


@dataclass(frozen=True)
class Headroom:
    """What rejected rows would tell the next draft.

    Attributes:
        rounds: of the whole decoding.
        rejected_rounds: with a rejected proposal, and labels for all that its rows predict.
        rejected_rows: for each rejected round, a mean.
        reconverged: rejected rows for each rejected round whose prediction was committed at its
            position or beside it.
        reconverged_exactly: of those, at its position.
        accepted_after_rejection: proposals after the first rejected one, for each rejected round,
            that equal the committed tokens.
        outside_vocabulary: share of the rejected rounds that ended at a token which the drafter's
            vocabulary lacks: what a larger one could have saved, and nothing else.
        slots: by slot of the next draft.
        alone: acceptance length of the drafts after rejected rounds.
        mixed: the same of the mixture.
        gain: mixed over alone, paired over responses; 1 is none.
    """

    rounds: int
    rejected_rounds: int
    rejected_rows: float
    reconverged: float
    reconverged_exactly: float
    accepted_after_rejection: float
    outside_vocabulary: float
    slots: list[SlotHeadroom]
    alone: Interval
    mixed: Interval
    gain: Interval


@dataclass(frozen=True)
class _Drafts:
    """Drafts after rejected rounds, as scores of few candidate tokens for each slot.

    Attributes:
        response_N: whose draft it is.
        scores_FNBK: the log-probability of each candidate at each way's carried row, 0 without
            one; the drafter's own comes first.
        truth_NB: index of the committed token among the candidates; -1 if it is none of them.
        valid_NB: whether the position is part of the response.
    """

    response_N: torch.Tensor
    scores_FNBK: torch.Tensor
    truth_NB: torch.Tensor
    valid_NB: torch.Tensor


def headroom(
    drafter: BlockDrafter,
    target_model: PreTrainedModel,
    corpus: Corpus,
    packs: Sequence[np.ndarray],
    source: StateSource,
    *,
    device: torch.device,
    on_rounds: Callable[[int], None] = lambda count: None,
) -> Headroom:
    """Measure what the rejected rows of these responses' rounds predict.

    Args:
        drafter: drafts with nothing carried, whether it could carry or not.
        target_model: the frozen target, on `device`.
        corpus: the rows' tokens.
        packs: the rows, in groups that are drafted for together.
        source: the target's states, with their prefix.
        device: of everything.
        on_rounds: called with the number of rounds looked at since the last call.

    Raises:
        DataError: no round was rejected, or fewer than four responses have one that was.
    """
    # rows, reconverged, exactly, accepted after, outside the vocabulary, rejected rounds
    counts = torch.zeros(6, dtype=torch.float64)
    slots_4B = torch.zeros(4, drafter.proposal_length, dtype=torch.float64)
    drafts: list[_Drafts] = []
    rounds = responses = 0
    for taken in decoding_rounds(drafter, corpus, packs, source, device=device):
        rounds += len(taken.anchors_A)
        with torch.no_grad():
            found = _next_drafts(drafter, target_model, taken, counts, slots_4B, responses)
        responses += int(taken.batch.document_ids_T.max()) + 1
        drafts += found
        on_rounds(len(taken.anchors_A))
    rejected = int(counts[-1])
    if not rejected:
        raise DataError("no proposal was rejected in these responses: nothing would be carried")
    together = _Drafts(
        response_N=torch.cat([each.response_N for each in drafts]),
        scores_FNBK=torch.cat([each.scores_FNBK for each in drafts], dim=1),
        truth_NB=torch.cat([each.truth_NB for each in drafts]),
        valid_NB=torch.cat([each.valid_NB for each in drafts]),
    )
    alone, mixed, gain = _mixture(together)
    return Headroom(
        rounds, rejected, *(counts[:-1] / rejected).tolist(), _by_slot(slots_4B), alone, mixed, gain
    )


def _by_slot(slots_4B: torch.Tensor) -> list[SlotHeadroom]:
    rates_3B = slots_4B[1:] / slots_4B[0].clamp(min=1)
    return [
        SlotHeadroom(slot, int(count), *rates)
        for slot, (count, rates) in enumerate(
            zip(slots_4B[0].tolist(), rates_3B.T.tolist(), strict=True), 1
        )
        if count
    ]


def _next_drafts(
    drafter: BlockDrafter,
    target_model: PreTrainedModel,
    taken: Rounds,
    counts: torch.Tensor,
    slots_4B: torch.Tensor,
    first_response: int,
) -> list[_Drafts]:
    """Verify a pack's rejected rounds; add to the counts, and return the drafts that follow."""
    batch, length = taken.batch, drafter.proposal_length
    document_A = batch.document_ids_T[taken.anchors_A]
    followed_A = torch.zeros_like(document_A, dtype=torch.bool)
    followed_A[:-1] = document_A[1:] == document_A[:-1]
    kept_A = followed_A & (taken.accepted_A < length)
    if not kept_A.any():
        return []
    anchors_N, accepted_N = taken.anchors_A[kept_A], taken.accepted_A[kept_A]
    proposals_NB = taken.proposals_AB[kept_A]
    states = verify(
        target_model,
        prefix=batch.prefix,
        blocks=anchored_blocks(batch, anchors_N),
        tokens_AB=proposals_NB,
        layer_ids=drafter.target_layer_ids,
        accepted_A=accepted_N,
    )
    predicted_NB = predictions(target_model, states.last_hidden_ND)
    to_draft = drafter.target_to_draft
    _count(batch, anchors_N, accepted_N, proposals_NB, predicted_NB, to_draft, counts)

    shifted_N = anchors_N + accepted_N + 1
    rows_NB, valid_NB = block_labels(batch, shifted_N, length)
    met_FNB = _rows_met(proposals_NB, batch.input_ids_T[shifted_N], accepted_N)
    scores_FNBK, truth_NB = drafter(
        batch.context,
        anchored_blocks(batch, shifted_N),
        partial(
            _score_head,
            last_hidden_NBD=states.last_hidden_ND,
            met_FNB=met_FNB,
            labels_NB=batch.input_ids_T[rows_NB],
            previous_NB=batch.input_ids_T[rows_NB - 1],
        ),
    )
    exact_NB = met_FNB[_SHIFTS.index(0)]
    counted_NB = (exact_NB >= 0) & valid_NB
    right_NB = (scores_FNBK[0].argmax(-1) == truth_NB) & counted_NB
    told_NB = predicted_NB.gather(1, exact_NB.clamp(min=0)) == batch.input_ids_T[rows_NB]
    told_NB &= counted_NB
    slots_4B += torch.stack(
        [each.sum(0) for each in (counted_NB, right_NB, told_NB, told_NB & ~right_NB)]
    ).to(slots_4B)
    response_N = first_response + batch.document_ids_T[anchors_N]
    return [_Drafts(response_N, scores_FNBK, truth_NB, valid_NB)]


def _count(
    batch: Batch,
    anchors_N: torch.Tensor,
    accepted_N: torch.Tensor,
    proposals_NB: torch.Tensor,
    predicted_NB: torch.Tensor,
    to_draft: torch.Tensor | None,
    counts: torch.Tensor,
) -> None:
    """Add rejected rows, re-converged ones, and so on, of rounds well inside their response."""
    length = proposals_NB.shape[1]
    rows, valid = block_labels(batch, anchors_N, length + 2)
    whole_N1 = valid.all(1)[:, None]
    # committed[:, j - 1] stands at anchor + j, and row j predicts anchor + j + 1
    committed = batch.input_ids_T[rows]
    before_NB, at_NB, after_NB = (committed[:, low : low + length] for low in range(3))
    row_B = torch.arange(1, length + 1, device=anchors_N.device)
    rejected_NB = (row_B > accepted_N[:, None]) & whole_N1
    exactly_NB = rejected_NB & (predicted_NB == at_NB)
    near_NB = (predicted_NB == before_NB) | (predicted_NB == after_NB)
    later_NB = rejected_NB & (row_B > accepted_N[:, None] + 1) & (proposals_NB == before_NB)
    outside_N1 = torch.zeros_like(whole_N1)
    if to_draft is not None:
        ends_N1 = committed.gather(1, accepted_N[:, None])
        outside_N1 = whole_N1 & (to_draft[ends_N1] < 0)
    found = (
        rejected_NB, exactly_NB | (rejected_NB & near_NB), exactly_NB, later_NB, outside_N1,
        whole_N1,
    )  # fmt: skip
    counts += torch.stack([each.sum() for each in found]).to(counts)


def _rows_met(
    proposals_NB: torch.Tensor, anchor_tokens_N: torch.Tensor, accepted_N: torch.Tensor
) -> torch.Tensor:
    """Index of the verified row that each slot meets in each way, [F, N, B]; -1 where it is none.

    The next anchor stands at `anchor + a + 1`, so row `a + s` predicts the position of its slot s.
    """
    length = proposals_NB.shape[1]
    slot_B = torch.arange(1, length + 1, device=proposals_NB.device)
    ways = [accepted_N[:, None] + slot_B + shift for shift in _SHIFTS]
    same_NB = (proposals_NB == anchor_tokens_N[:, None]) & (slot_B > accepted_N[:, None])
    first_N = torch.where(same_NB.any(1), same_NB.long().argmax(1) + 1, length + 1)
    ways.append(first_N[:, None] + slot_B - 1)
    rows_FNB = torch.stack(ways)
    carried_FNB = (rows_FNB > accepted_N[:, None]) & (rows_FNB <= length)
    return torch.where(carried_FNB, rows_FNB - 1, -1)


def _score_head(
    drafter: BlockDrafter,
    hidden_NSD: torch.Tensor,
    *,
    last_hidden_NBD: torch.Tensor,
    met_FNB: torch.Tensor,
    labels_NB: torch.Tensor,
    previous_NB: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of the candidates, as in `_Drafts`, and where the committed token is among them.

    A Markov drafter gets the committed token before as its previous one: what comes after a wrong
    choice is not counted.
    """
    to_draft = drafter.target_to_draft
    if to_draft is not None:
        labels_NB = to_draft[labels_NB]
    at_once = max(1, MAX_LOGITS // (labels_NB.shape[1] * drafter.lm_head.weight.shape[0]))
    pieces = []
    for hidden_MBD, last_MBD, met_FMB, labels_MB, previous_MB in zip(
        hidden_NSD[:, 1:].split(at_once),
        last_hidden_NBD.split(at_once),
        met_FNB.split(at_once, dim=1),
        labels_NB.split(at_once),
        previous_NB.split(at_once),
        strict=True,
    ):
        logits_QV = drafter.logits(hidden_MBD.flatten(0, 1), previous_MB.flatten())
        own_MBV = logits_QV.float().log_softmax(-1).unflatten(0, labels_MB.shape)
        told_MBV = _target_scores(drafter, last_MBD.flatten(0, 1)).unflatten(0, labels_MB.shape)
        pieces.append(_candidates(own_MBV, told_MBV, met_FMB, labels_MB))
    scores, truth = zip(*pieces, strict=True)
    return torch.cat(scores, dim=1), torch.cat(truth)


def _target_scores(drafter: BlockDrafter, last_hidden_QD: torch.Tensor) -> torch.Tensor:
    """The target's log-probabilities over the draft vocabulary, [Q, V]."""
    rows_Q = torch.arange(len(last_hidden_QD), device=last_hidden_QD.device)
    teacher = drafter.teacher(last_hidden_QD, rows_Q)
    logits_QV = (teacher.hidden_PD @ teacher.weight_VD.T).float()
    if teacher.softcap is not None:
        logits_QV = (logits_QV / teacher.softcap).tanh() * teacher.softcap
    return logits_QV.log_softmax(-1)


def _candidates(
    own_MBV: torch.Tensor, told_MBV: torch.Tensor, met_FMB: torch.Tensor, labels_MB: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    size = own_MBV.shape[-1]
    top_MBK = [own_MBV.topk(min(_TOP_DRAFT, size)).indices]
    best_MBK = told_MBV.topk(min(_TOP_CARRIED, size)).indices
    told = []
    for met_MB in met_FMB:
        at_MB1 = met_MB.clamp(min=0)[..., None]
        none_MB1 = (met_MB < 0)[..., None]
        told.append((at_MB1, none_MB1))
        rows_MBK = best_MBK.gather(1, at_MB1.expand(-1, -1, best_MBK.shape[-1]))
        # without a row, the drafter's own first choice once more
        top_MBK.append(torch.where(none_MB1, top_MBK[0][..., :1], rows_MBK))
    candidates_MBK = torch.cat(top_MBK, dim=-1).sort(-1).values
    again_MBK = torch.zeros_like(candidates_MBK, dtype=torch.bool)
    again_MBK[..., 1:] = candidates_MBK[..., 1:] == candidates_MBK[..., :-1]
    scores = [own_MBV.gather(-1, candidates_MBK).masked_fill(again_MBK, _NEVER)]
    for at_MB1, none_MB1 in told:
        rows_MBV = told_MBV.gather(1, at_MB1.expand(-1, -1, size))
        scores.append(rows_MBV.gather(-1, candidates_MBK).masked_fill(none_MB1, 0.0))
    is_truth_MBK = (candidates_MBK == labels_MB[..., None]) & ~again_MBK
    truth_MB = torch.where(is_truth_MBK.any(-1), is_truth_MBK.long().argmax(-1), -1)
    return torch.stack(scores), truth_MB


def _mixture(drafts: _Drafts) -> tuple[Interval, Interval, Interval]:
    """Acceptance lengths alone and mixed, and their ratio, over responses."""
    half_N = drafts.response_N.unique(return_inverse=True)[1] % 2
    accepted_N = torch.zeros_like(drafts.response_N)
    for half in range(2):
        powers_FB = _fit(drafts, half_N != half)
        mixed_NBK = torch.einsum("fb,fnbk->nbk", powers_FB, drafts.scores_FNBK)
        accepted_N = torch.where(half_N == half, _accepted(mixed_NBK, drafts), accepted_N)
    totals = []
    responses, place_N = drafts.response_N.unique(return_inverse=True)
    if len(responses) < _MIN_RESPONSES:
        raise DataError(
            f"only {len(responses)} responses have a round after a rejected one; give at least "
            f"{_MIN_RESPONSES}"
        )
    for tokens_N in (_accepted(drafts.scores_FNBK[0], drafts) + 1, accepted_N + 1):
        sums = torch.zeros(len(responses), dtype=torch.float64)
        totals.append(sums.index_add(0, place_N.cpu(), tokens_N.double().cpu()).tolist())
    rounds = torch.bincount(place_N.cpu(), minlength=len(responses)).tolist()
    alone, mixed = totals
    return (
        ratio_of_sums(alone, rounds),
        ratio_of_sums(mixed, rounds),
        ratio_between((mixed, rounds), (alone, rounds)),
    )


def _accepted(scores_NBK: torch.Tensor, drafts: _Drafts) -> torch.Tensor:
    right_NB = (scores_NBK.argmax(-1) == drafts.truth_NB) & drafts.valid_NB
    return right_NB.long().cumprod(1).sum(1)


def _fit(drafts: _Drafts, used_N: torch.Tensor) -> torch.Tensor:
    """The powers that make the committed tokens likeliest, [F, B]; the drafter's own are near 1."""
    scores_FNBK = drafts.scores_FNBK[:, used_N]
    labelled_NB = (drafts.valid_NB & (drafts.truth_NB >= 0))[used_N]
    truth_Q = drafts.truth_NB[used_N][labelled_NB]
    start_FB = torch.zeros(scores_FNBK.shape[0], scores_FNBK.shape[2], device=truth_Q.device)
    start_FB[0] = 1.0
    change_FB = torch.zeros_like(start_FB, requires_grad=True)
    if not len(truth_Q):
        return start_FB
    optimizer = torch.optim.Adam([change_FB], lr=_FIT_LR)
    for _ in range(_FIT_STEPS):
        mixed_NBK = torch.einsum("fb,fnbk->nbk", start_FB + change_FB, scores_FNBK)
        loss = torch.nn.functional.cross_entropy(mixed_NBK[labelled_NB], truth_Q)
        (loss + _WEIGHT_DECAY * change_FB.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return (start_FB + change_FB).detach()
