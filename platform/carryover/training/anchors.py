"""Which positions of a packed sequence become anchors, and what their blocks learn from.

An anchor is a token of a response whose successor is in the response too. Its block sees the
committed rows of its own document strictly before it, and is supervised on the recorded tokens
after it, as far as the response goes. Shapes: see drafters/blocks.py.
"""

from __future__ import annotations

import torch

from carryover.drafters.blocks import Blocks
from carryover.training.batch import Batch


def sample_anchors(
    batch: Batch, count: int, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Draw distinct anchor rows, ascending; fewer than `count` where the responses are short.

    Args:
        batch: the packed sequence.
        count: how many to draw.
        generator: CPU generator, so that the draw is the same on every device.

    Returns:
        Rows of the packed sequence, [A]; empty if no response has two tokens.
    """
    rows = anchor_candidates(batch).nonzero().squeeze(-1)
    if rows.shape[0] > count:
        kept = torch.randperm(rows.shape[0], generator=generator)[:count].sort().values
        rows = rows[kept.to(rows.device)]
    return rows


def anchor_candidates(batch: Batch) -> torch.Tensor:
    """Rows that can be anchors, as a mask [T]."""
    response, document = batch.response_mask_T, batch.document_ids_T
    candidates = response.clone()
    candidates[-1:] = False
    candidates[:-1] &= response[1:] & (document[1:] == document[:-1])
    return candidates & (document >= 0)


def anchored_blocks(batch: Batch, anchors_A: torch.Tensor) -> Blocks:
    """Blocks at packed rows `anchors_A`: context strictly before the anchor, same document."""
    positions_A = batch.position_ids_T[anchors_A]
    return Blocks(
        tokens_A=batch.input_ids_T[anchors_A],
        positions_A=positions_A,
        starts_A=anchors_A - positions_A,
        ends_A=anchors_A,
    )


def block_labels(
    batch: Batch, anchors_A: torch.Tensor, proposal_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed rows that the slots 1..B of each block predict, and which of them count.

    Returns:
        Rows [A, B], clamped to the sequence, and a mask [A, B]: true while the row lies in the
        same document's response.
    """
    offsets = torch.arange(1, proposal_length + 1, device=anchors_A.device)
    rows_AB = anchors_A[:, None] + offsets
    inside = rows_AB < len(batch)
    rows_AB = rows_AB.clamp(max=len(batch) - 1)
    valid = (
        inside
        & batch.response_mask_T[rows_AB]
        & (batch.document_ids_T[rows_AB] == batch.document_ids_T[anchors_A][:, None])
    )
    # A response is contiguous; cumprod keeps a block's supervision so, whatever the mask holds.
    return rows_AB, valid.long().cumprod(1).bool()
