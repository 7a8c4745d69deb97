"""Where carried rows go: the index arithmetic that both of vLLM's model runners share.

Of a request with n committed states whose last verification rejected r rows, vLLM's padded
drafter batch holds all verified rows, the rejected ones last. vLLM projects the rejected rows to
their natural slots n .. n+r-1 and then hides them: the block's B+1 query rows take the same slots.
Carried, they stay, and the query rows move behind them:

    slots        0 .. n-1      n .. n+r-1      n+r .. n+r+B
    rows         committed     carried         anchor and B masks
    positions    0 .. n-1      n .. n+r-1      n .. n+B

Positions carry the rotary embedding, and attention in the drafter is not causal, so the order of
slots does not matter. No slot is used that vLLM did not reserve: it reserves B+1 past the
verified rows, which are n+r, whatever r is.

Near the longest sequence L only L slots exist: of the r rows, the first L - (n+B+1) are kept.

T: verified rows of the batch, R: requests, Q: query rows (R times B+1), N: blocks of a request,
H: hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PAD_SLOT = -1
# vLLM never gives this block to a request; a table entry of 0 means "no block here".
NULL_BLOCK = 0


@dataclass(frozen=True)
class Carried:
    """Rows that a batch carries, per request; int64 tensors [R], on the batch's device.

    Attributes:
        committed_R: committed states n, which is also the anchor's position.
        first_R: index in the batch of the first rejected row.
        rejected_R: rejected rows r.
        kept_R: rows carried: r, or fewer near the longest sequence.
    """

    committed_R: torch.Tensor
    first_R: torch.Tensor
    rejected_R: torch.Tensor
    kept_R: torch.Tensor


def find_carried(
    *,
    positions_T: torch.Tensor,
    query_start_R1: torch.Tensor,
    num_rejected_R: torch.Tensor,
    num_query: int,
    max_model_len: int,
) -> Carried:
    """Find the rejected rows of each request, and how many of them can be carried.

    Args:
        positions_T: position of each verified row.
        query_start_R1: first row of each request, and the number of rows at the end [R+1].
        num_rejected_R: rejected rows of each request; at least one row of each is accepted.
        num_query: rows of a block, B+1.
        max_model_len: slots that a request can have.
    """
    rejected_R = num_rejected_R.long()
    first_R = query_start_R1[1:].long() - rejected_R
    committed_R = positions_T[first_R - 1].long() + 1
    room_R = (max_model_len - num_query - committed_R).clamp(min=0)
    return Carried(committed_R, first_R, rejected_R, torch.minimum(rejected_R, room_R))


def mark_rows(
    hidden_TH: torch.Tensor,
    marker_H: torch.Tensor,
    carried: Carried,
    *,
    query_start_R1: torch.Tensor,
) -> None:
    """Add the marker to the carried rows, in place."""
    offset_T, request_T = _offsets(hidden_TH.shape[0], carried, query_start_R1)
    carried_T = (offset_T >= 0) & (offset_T < carried.kept_R[request_T])
    hidden_TH.addcmul_(carried_T.to(hidden_TH.dtype).unsqueeze(1), marker_H)


def place_rows(
    carried: Carried,
    *,
    positions_T: torch.Tensor,
    query_start_R1: torch.Tensor,
    block_table_RN: torch.Tensor,
    block_size: int,
    num_query: int,
    max_model_len: int,
    context_positions_T: torch.Tensor,
    context_slots_T: torch.Tensor,
    query_slots_Q: torch.Tensor,
    seq_lens_R: torch.Tensor,
) -> None:
    """Give carried rows their slots, move query rows behind them, and lengthen the sequences.

    The last four tensors hold what vLLM computed without carried rows, and change in place. The
    entries of requests that carry nothing stay as they are, except that rejected rows which do
    not fit are not written at all. May be repeated: nothing is read from what it writes.
    """
    offset_T, request_T = _offsets(positions_T.shape[0], carried, query_start_R1)
    kept_T = carried.kept_R[request_T]
    carried_T = (offset_T >= 0) & (offset_T < kept_T)
    slots_T = _slots(block_table_RN, request_T, positions_T, block_size)
    context_positions_T.copy_(torch.where(carried_T, positions_T, context_positions_T))
    fitting_T = torch.where(offset_T >= kept_T, PAD_SLOT, context_slots_T)
    context_slots_T.copy_(torch.where(carried_T, slots_T, fitting_T))

    length_R = carried.committed_R + carried.kept_R
    device = positions_T.device
    index_RK = length_R.unsqueeze(1) + torch.arange(num_query, device=device)
    row_RK = torch.arange(length_R.shape[0], device=device).unsqueeze(1).expand_as(index_RK)
    slots_RK = _slots(block_table_RN, row_RK, index_RK, block_size)
    slots_RK = torch.where(index_RK < max_model_len, slots_RK, PAD_SLOT)
    moved_R = carried.kept_R > 0
    stock_RK = query_slots_Q.view_as(slots_RK)
    stock_RK.copy_(torch.where(moved_R.unsqueeze(1), slots_RK, stock_RK))
    seq_lens_R.copy_(torch.where(moved_R, length_R + num_query, seq_lens_R))


def _offsets(
    num_rows: int, carried: Carried, query_start_R1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row: its place after the first rejected row (negative: accepted), its request."""
    row_T = torch.arange(num_rows, device=query_start_R1.device)
    request_T = torch.searchsorted(query_start_R1[1:].long(), row_T, right=True)
    return row_T - carried.first_R[request_T], request_T


def _slots(
    block_table_RN: torch.Tensor, request: torch.Tensor, index: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Slot of the `index`-th token of a request, or PAD_SLOT where it has no block."""
    number = (index // block_size).clamp(max=block_table_RN.shape[1] - 1)
    block = block_table_RN[request, number].long()
    return torch.where(block == NULL_BLOCK, PAD_SLOT, block * block_size + index % block_size)
