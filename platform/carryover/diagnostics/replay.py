"""Matched-anchor replay: do carried rows tell the drafter anything?

The rounds are those of a Carryover drafter's own greedy decoding, each with the rejected states
that its predecessor left. At the same anchors, with the same committed states, three drafts are
compared: ON has the carried rows, OFF is the same weights without them, Baseline is another
checkpoint. Recall@k is how often the target's top token, which at temperature 0 is the recorded
one, is among a draft's k most likely; at block position i over the rounds in which ON and the
Baseline (OFF, if there is none) have the recorded tokens as their first choice at 1 .. i-1.
Carryover Drafting (arXiv 2609.14717), section 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from carryover.drafters.blocks import Blocks, Carried
from carryover.drafters.carried import CarriedSettings
from carryover.drafters.drafting import MAX_LOGITS
from carryover.drafters.models import BlockDrafter
from carryover.errors import CheckpointError, DataError
from carryover.training.anchors import anchored_blocks, block_labels
from carryover.training.batch import Batch
from carryover.training.carryover import select
from carryover.training.evaluate import Rounds, carrying_rounds
from carryover.training.packing import Corpus
from carryover.training.states import StateSource

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOPS = (1, 16)
_Z = 1.96
_BLOCKS_AT_ONCE = 256


@dataclass(frozen=True)
class Recall:
    """Recall at one block position.

    Attributes:
        position: of the block, from 1.
        top: k of recall@k.
        rounds: it is a mean over these.
        rates: by draft: `on`, `off`, and `baseline` if there is one; nan over no rounds.
        gain: rate of `on` less that of `off`.
        error: half of the gain's 95% interval, by the normal approximation of paired differences.
    """

    position: int
    top: int
    rounds: int
    rates: dict[str, float]
    gain: float
    error: float


@dataclass(frozen=True)
class Difference:
    """Tokens a round more with the carried rows than with another draft.

    Attributes:
        value: mean over the compared rounds.
        error: half of its 95% interval, by the normal approximation of paired differences.
    """

    value: float
    error: float


@dataclass(frozen=True)
class Replay:
    """What a replay found.

    Attributes:
        carried: what the drafter carries.
        mark: how it is marked.
        rounds: with carried rows; those without are not compared.
        all_rounds: of the whole decoding.
        acceptance_length: accepted plus one at the compared rounds, a mean, by draft.
        acceptance_gain: of `on` over each other draft.
        recalls: by position and k.
    """

    carried: str
    mark: str
    rounds: int
    all_rounds: int
    acceptance_length: dict[str, float]
    acceptance_gain: dict[str, Difference]
    recalls: list[Recall]


def replay(
    drafter: BlockDrafter,
    target_model: PreTrainedModel,
    corpus: Corpus,
    packs: Sequence[np.ndarray],
    source: StateSource,
    *,
    device: torch.device,
    baseline: BlockDrafter | None = None,
    on_rounds: Callable[[int], None] = lambda count: None,
) -> Replay:
    """Decode these rows with carried context, and draft at each anchor without it too.

    Args:
        drafter: with carried context.
        target_model: the frozen target, on `device`.
        corpus: the rows' tokens.
        packs: the rows, all greedy, in groups whose rounds are taken together.
        source: the target's states, with their prefix.
        device: of everything.
        baseline: reads the same target layers and proposes as many tokens.
        on_rounds: called with the number of rounds compared since the last call.

    Raises:
        CheckpointError: the drafter carries nothing, or the baseline differs in its shape.
        DataError: a row is not greedy, or no round has anything carried.
    """
    _check(drafter, baseline, corpus, packs)
    drafters = {"on": drafter, "off": drafter}
    if baseline is not None:
        drafters["baseline"] = baseline
    ranks: dict[str, list[np.ndarray]] = {name: [] for name in drafters}
    valid: list[np.ndarray] = []
    all_rounds = 0

    def count_all() -> Iterator[Rounds]:
        nonlocal all_rounds
        for taken in carrying_rounds(drafter, target_model, corpus, packs, source, device=device):
            all_rounds += len(taken.anchors_A)
            yield _with_carried_rows(taken)

    for taken in _together(count_all()):
        batch, blocks = taken.batch, taken.blocks
        plain = anchored_blocks(batch, taken.anchors_A)
        rows_AB, valid_AB = block_labels(batch, taken.anchors_A, drafter.proposal_length)
        valid.append(valid_AB.cpu().numpy())
        for name, model in drafters.items():
            given = blocks if name == "on" else plain
            ranks[name].append(_ranks(model, batch, given, rows_AB, valid_AB).cpu().numpy())
        on_rounds(len(taken.anchors_A))
    if not valid:
        raise DataError("no round has anything carried: every proposal was accepted")
    return _summarise(
        drafter.carried_settings,
        {name: np.concatenate(found) for name, found in ranks.items()},
        np.concatenate(valid),
        all_rounds,
    )


def _check(
    drafter: BlockDrafter,
    baseline: BlockDrafter | None,
    corpus: Corpus,
    packs: Sequence[np.ndarray],
) -> None:
    if drafter.carried_settings is None:
        raise CheckpointError("this drafter has no carried context; give a Carryover checkpoint")
    if baseline is not None:
        for name in ("proposal_length", "target_layer_ids"):
            theirs, ours = getattr(baseline, name), getattr(drafter, name)
            if theirs != ours:
                raise CheckpointError(
                    f"the baseline differs in {name}: {theirs}, and the Carryover drafter has "
                    f"{ours}; give the checkpoint that it was continued from"
                )
    for rows in packs:
        if not corpus.greedy(rows).all():
            raise DataError("replay needs responses of temperature 0: only there is the recorded "
                            "token the target's top token")  # fmt: skip


def _together(rounds: Iterable[Rounds]) -> Iterator[Rounds]:
    """The same rounds, many of a batch at a time: each draft reads the whole batch's context."""
    held: list[Rounds] = []
    for taken in rounds:
        if held and (
            taken.batch is not held[0].batch
            or sum(len(each.anchors_A) for each in held) >= _BLOCKS_AT_ONCE
        ):
            yield _joined(held)
            held = []
        if len(taken.anchors_A):
            held.append(taken)
    if held:
        yield _joined(held)


def _joined(rounds: Sequence[Rounds]) -> Rounds:
    """Rounds of one batch as one, by packed row."""
    anchors_A, order_A = torch.cat([each.anchors_A for each in rounds]).sort()
    blocks = [each.blocks for each in rounds]
    fields: dict[str, Carried | torch.Tensor] = {}
    if blocks[0].carried is not None:
        fields["carried"] = Carried(
            torch.cat([each.carried.hidden_ARC for each in blocks]),
            torch.cat([each.carried.positions_AR for each in blocks]),
            torch.cat([each.carried.valid_AR for each in blocks]),
        )
    if blocks[0].hints_AS is not None:
        fields["hints_AS"] = torch.cat([each.hints_AS for each in blocks])
    return Rounds(
        batch=rounds[0].batch,
        anchors_A=anchors_A,
        blocks=replace(anchored_blocks(rounds[0].batch, anchors_A), **select(fields, order_A)),
        proposals_AB=torch.cat([each.proposals_AB for each in rounds])[order_A],
        accepted_A=torch.cat([each.accepted_A for each in rounds])[order_A],
    )


def _with_carried_rows(taken: Rounds) -> Rounds:
    """Only the rounds that have something carried."""
    blocks = taken.blocks
    fields = {
        name: value
        for name in ("carried", "hints_AS")
        if (value := getattr(blocks, name)) is not None
    }
    has_A = torch.zeros_like(taken.anchors_A, dtype=torch.bool)
    if blocks.carried is not None:
        has_A = blocks.carried.valid_AR.any(1)
    elif blocks.hints_AS is not None:
        has_A = (blocks.hints_AS >= 0).any(1)
    anchors_A = taken.anchors_A[has_A]
    return replace(
        taken,
        anchors_A=anchors_A,
        blocks=replace(anchored_blocks(taken.batch, anchors_A), **select(fields, has_A)),
        proposals_AB=taken.proposals_AB[has_A],
        accepted_A=taken.accepted_A[has_A],
    )


def _ranks(
    drafter: BlockDrafter,
    batch: Batch,
    blocks: Blocks,
    rows_AB: torch.Tensor,
    valid_AB: torch.Tensor,
) -> torch.Tensor:
    """Tokens that the draft finds more likely than the recorded one, [A, B].

    A Markov drafter gets the recorded token before as its previous one: positions after a wrong
    choice are not counted. A token outside the draft vocabulary has a rank beyond any k.
    """
    tokens_AB = batch.input_ids_T[rows_AB]
    previous_AB = torch.cat((blocks.tokens_A[:, None], tokens_AB[:, :-1]), dim=1)
    head = partial(_rank_head, tokens_AB=tokens_AB, previous_AB=previous_AB)
    return torch.where(valid_AB, drafter(batch.context, blocks, head), torch.iinfo(torch.long).max)


def _rank_head(
    drafter: BlockDrafter,
    hidden_ASD: torch.Tensor,
    *,
    tokens_AB: torch.Tensor,
    previous_AB: torch.Tensor,
) -> torch.Tensor:
    to_draft = drafter.target_to_draft
    labels_N = (tokens_AB if to_draft is None else to_draft[tokens_AB]).flatten()
    hidden_ND = hidden_ASD[:, 1:].flatten(0, 1)
    rows = max(1, MAX_LOGITS // drafter.lm_head.weight.shape[0])
    found = []
    for hidden_MD, labels_M, previous_M in zip(
        hidden_ND.split(rows), labels_N.split(rows), previous_AB.flatten().split(rows), strict=True
    ):
        logits_MV = drafter.logits(hidden_MD, previous_M)
        truth_M1 = logits_MV.gather(1, labels_M.clamp(min=0)[:, None])
        rank_M = (logits_MV > truth_M1).sum(1)
        found.append(torch.where(labels_M < 0, torch.iinfo(torch.long).max, rank_M))
    return torch.cat(found).view_as(tokens_AB)


def _summarise(
    settings: CarriedSettings,
    ranks: dict[str, np.ndarray],
    valid_NB: np.ndarray,
    all_rounds: int,
) -> Replay:
    first = {name: found == 0 for name, found in ranks.items()}
    other = first.get("baseline", first["off"])
    matched_NB = np.ones_like(valid_NB)
    matched_NB[:, 1:] = np.logical_and.accumulate(first["on"] & other, axis=1)[:, :-1]
    recalls = []
    for top in TOPS:
        for index in range(valid_NB.shape[1]):
            counted = valid_NB[:, index] & matched_NB[:, index]
            hits = {name: (found[counted, index] < top) for name, found in ranks.items()}
            recalls.append(_recall(index + 1, top, hits))
    lengths = {
        name: 1.0 + np.logical_and.accumulate(found, axis=1).sum(1) for name, found in first.items()
    }
    gains = {
        name: Difference(*_paired(lengths["on"], length))
        for name, length in lengths.items()
        if name != "on"
    }
    return Replay(
        carried=settings.carried, mark=settings.mark, rounds=len(valid_NB), all_rounds=all_rounds,
        acceptance_length={name: float(length.mean()) for name, length in lengths.items()},
        acceptance_gain=gains, recalls=recalls,
    )  # fmt: skip


def _recall(position: int, top: int, hits: dict[str, np.ndarray]) -> Recall:
    count = len(hits["on"])
    rates = {name: float(found.mean()) if count else math.nan for name, found in hits.items()}
    return Recall(position, top, count, rates, *_paired(hits["on"], hits["off"]))


def _paired(on_N: np.ndarray, other_N: np.ndarray) -> tuple[float, float]:
    """Mean difference, and half of its interval; nan over too few rounds."""
    differences = on_N.astype(float) - other_N
    count = len(differences)
    error = _Z * float(differences.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan
    return float(differences.mean()) if count else math.nan, error
