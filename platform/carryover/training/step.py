"""Training steps in plain torch: no Ray, no files. Shapes: see drafters/blocks.py."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from carryover.drafters.blocks import Blocks
from carryover.drafters.models import BlockDrafter
from carryover.training.anchors import anchored_blocks, block_labels, draw_anchors
from carryover.training.batch import Batch
from carryover.training.losses import LossSettings, StepSettings, block_loss, position_weights


@dataclass(frozen=True)
class StepResult:
    """Loss with gradient, and detached scalars to log.

    Metrics, means over the step's supervised slots or blocks:
        loss, loss/position_k, accuracy/position_k: by block position k = 1..B; accuracy is the
            share of slots whose most likely token is the teacher's (the recorded one, if no loss
            term has a teacher).
        acceptance_length: leading slots of a block that are accurate so, plus one (the `eal` of
            speculators).
        accepted_length: leading slots that predict the recorded tokens. Teacher forcing does not
            matter to it: up to the first difference, a Markov chain of picks is the recorded one.
        anchors, tokens: supervised blocks and slots, counts.
    """

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]


def baseline_step(
    drafter: nn.Module,
    batch: Batch,
    *,
    settings: StepSettings,
    generator: torch.Generator | None = None,
) -> StepResult:
    """Sample anchors in the responses and supervise one block at each.

    Args:
        drafter: a drafter, wrapped (DDP, FSDP) or not.
        batch: packed sequence with the target's states.
        settings: anchors and loss.
        generator: CPU generator of the anchors.

    Raises:
        DataError: the batch has no anchor.
    """
    anchors_A = draw_anchors(batch, settings.num_anchors, generator=generator)
    return supervise(drafter, batch, anchors_A, anchored_blocks(batch, anchors_A), settings.loss)


def supervise(
    drafter: nn.Module,
    batch: Batch,
    anchors_A: torch.Tensor,
    blocks: Blocks,
    settings: LossSettings,
) -> StepResult:
    """Predict the recorded tokens after each anchor; the one part of training with gradient.

    Args:
        drafter: a drafter, wrapped or not.
        batch: packed sequence with the target's states.
        anchors_A: packed rows of the anchors.
        blocks: their blocks, with carried rows or without.
        settings: loss weights.

    Returns:
        The mean over supervised slots of the position-weighted loss, as speculators takes it.
    """
    head = partial(_supervise_head, batch=batch, anchors_A=anchors_A, settings=settings)
    return drafter(batch.context, blocks, head)


def recorded_acceptance(
    batch: Batch, anchors_A: torch.Tensor, tokens_AB: torch.Tensor
) -> torch.Tensor:
    """Number of leading proposals of each anchor that equal the recorded tokens, [A].

    The recorded response is the target's sample, so this is the acceptance rule at every
    temperature: a proposal passes while it equals the recorded token.
    """
    rows_AB, valid_AB = block_labels(batch, anchors_A, tokens_AB.shape[1])
    return ((tokens_AB == batch.input_ids_T[rows_AB]) & valid_AB).long().cumprod(1).sum(1)


def _supervise_head(
    drafter: BlockDrafter,
    hidden_ASD: torch.Tensor,
    *,
    batch: Batch,
    anchors_A: torch.Tensor,
    settings: LossSettings,
) -> StepResult:
    rows_AB, valid_AB = block_labels(batch, anchors_A, drafter.proposal_length)
    # Slots sorted by position: those that share a teacher row become neighbours.
    slots_N = valid_AB.flatten().nonzero().squeeze(1)
    rows_N = rows_AB.flatten()[slots_N]
    order_N = rows_N.argsort(stable=True)
    slots_N, rows_N = slots_N[order_N], rows_N[order_N]
    position_rows_P, positions_N = torch.unique_consecutive(rows_N, return_inverse=True)

    labels_N = batch.input_ids_T[rows_N]
    to_draft = drafter.target_to_draft
    if to_draft is not None:
        labels_N = to_draft[labels_N]
    block_position_N = slots_N % drafter.proposal_length + 1
    decay_N = position_weights(block_position_N, settings.gamma)
    loss, slots = block_loss(
        hidden_ASD[:, 1:].flatten(0, 1)[slots_N],
        drafter.lm_head.weight,
        settings=settings,
        labels_N=labels_N,
        weights_N=decay_N / max(len(slots_N), 1),
        positions_N=positions_N,
        teacher=drafter.teacher(batch.last_hidden_TD, position_rows_P - 1)
        if settings.uses_teacher
        else None,
        markov=drafter.markov_factors(batch.input_ids_T[rows_N - 1]),
    )
    truth_N = labels_N if slots.truth_P is None else slots.truth_P[positions_N]
    correct_N = slots.predicted_N == truth_N
    metrics = {
        "loss": loss.detach(),
        "acceptance_length": _mean_run(correct_N, slots_N, valid_AB) + 1,
        "accepted_length": _mean_run(slots.predicted_N == labels_N, slots_N, valid_AB),
        "anchors": valid_AB.any(1).sum(),
        "tokens": valid_AB.sum(),
        **_by_position(slots.loss_N, correct_N, block_position_N, drafter.proposal_length),
    }
    return StepResult(loss, metrics)


def _mean_run(
    correct_N: torch.Tensor, slots_N: torch.Tensor, valid_AB: torch.Tensor
) -> torch.Tensor:
    """Mean number of leading correct slots of the blocks that have a supervised slot."""
    correct_AB = torch.zeros_like(valid_AB).flatten()
    correct_AB[slots_N] = correct_N
    runs_A = correct_AB.view_as(valid_AB).long().cumprod(1).sum(1)
    return runs_A.sum() / valid_AB.any(1).sum().clamp(min=1)


def _by_position(
    loss_N: torch.Tensor, correct_N: torch.Tensor, block_position_N: torch.Tensor, length: int
) -> dict[str, torch.Tensor]:
    """Mean loss and accuracy of each block position that has a supervised slot."""
    index_N = block_position_N - 1
    count_B = torch.bincount(index_N, minlength=length)
    loss_B = torch.bincount(index_N, loss_N, minlength=length) / count_B
    accuracy_B = torch.bincount(index_N, correct_N.float(), minlength=length) / count_B
    metrics = {}
    for k in count_B.nonzero().squeeze(1).tolist():
        metrics[f"loss/position_{k + 1}"] = loss_B[k]
        metrics[f"accuracy/position_{k + 1}"] = accuracy_B[k]
    return metrics
