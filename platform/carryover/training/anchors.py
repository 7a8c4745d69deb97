"""Which positions of a packed sequence become anchors, and what their blocks learn from.

An anchor is a token of a response whose successor is in the response too. Its block sees the
committed rows of its own document strictly before it, and is supervised on the recorded tokens
after it, as far as the response goes. Shapes: see drafters/blocks.py.
"""

from __future__ import annotations

import torch

from carryover.drafters.blocks import Blocks
from carryover.errors import DataError
from carryover.training.batch import Batch


def draw_anchors(
    batch: Batch, count: int, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Draw distinct anchor rows, ascending; fewer than `count` where the responses are short.

    Args:
        batch: the packed sequence.
        count: how many to draw.
        generator: CPU generator, so that the draw is the same on every device.

    Returns:
        Rows of the packed sequence, [A].

    Raises:
        DataError: no response in the batch has two tokens.
    """
    rows = anchor_candidates(batch).nonzero().squeeze(-1)
    if not len(rows):
        raise DataError(
            f"no anchor in a sequence of {len(batch)} tokens: no response in it has two tokens; "
            "drop responses shorter than that, or raise the sequence length"
        )
    if len(rows) > count:
        kept = torch.randperm(len(rows), generator=generator)[:count].sort().values
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


def shift_anchors(
    batch: Batch, anchors_A: torch.Tensor, accepted_A: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Move anchors past what was accepted, to the correction or bonus token.

    Returns:
        Packed rows `anchor + a + 1` of the anchors that are still anchors there, ascending, and
        which of the given anchors they come from.
    """
    shifted_A = anchors_A + accepted_A + 1
    inside_A = shifted_A.clamp(max=len(batch) - 1)
    document = batch.document_ids_T
    stays_A = (
        (shifted_A < len(batch))
        & anchor_candidates(batch)[inside_A]
        & (document[inside_A] == document[anchors_A])
    )
    kept = stays_A.nonzero().squeeze(1)
    kept = kept[shifted_A[kept].argsort(stable=True)]
    return shifted_A[kept], kept


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
