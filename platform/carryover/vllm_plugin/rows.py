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
from functools import cached_property

import torch

PAD_SLOT = -1
# vLLM never gives this block to a request; a table entry of 0 means "no block here".
NULL_BLOCK = 0


@dataclass(frozen=True)
class Carried:
    """Rows that a batch carries; int64 tensors on the batch's device.

    Attributes:
        committed_R: committed states n, which is also the anchor's position.
        first_R: index in the batch of the first rejected row.
        rejected_R: rejected rows r.
        kept_R: rows carried: r, or fewer near the longest sequence.
        request_T: the request of each row.
        offset_T: place of each row after its request's first rejected one; negative: accepted.
    """

    committed_R: torch.Tensor
    first_R: torch.Tensor
    rejected_R: torch.Tensor
    kept_R: torch.Tensor
    request_T: torch.Tensor
    offset_T: torch.Tensor

    @cached_property
    def carried_T(self) -> torch.Tensor:
        """Whether each row is carried."""
        return (self.offset_T >= 0) & (self.offset_T < self.kept_R[self.request_T])


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
    ends_R = query_start_R1[1:].long()
    first_R = ends_R - rejected_R
    committed_R = positions_T[first_R - 1].long() + 1
    room_R = (max_model_len - num_query - committed_R).clamp(min=0)
    kept_R = torch.minimum(rejected_R, room_R)
    row_T = torch.arange(positions_T.shape[0], device=positions_T.device)
    request_T = torch.searchsorted(ends_R, row_T, right=True)
    return Carried(committed_R, first_R, rejected_R, kept_R, request_T, row_T - first_R[request_T])


def mark_rows(hidden_TH: torch.Tensor, marker_H: torch.Tensor, carried: Carried) -> None:
    """Add the marker to the carried rows, in place."""
    hidden_TH.addcmul_(carried.carried_T.to(hidden_TH.dtype).unsqueeze(1), marker_H)


def place_queries(
    carried: Carried,
    *,
    block_table_RN: torch.Tensor,
    block_size: int,
    num_query: int,
    max_model_len: int,
    query_slots_Q: torch.Tensor,
    seq_lens_R: torch.Tensor,
) -> None:
    """Move query rows behind the carried ones, and lengthen the sequences, in place.

    The last two tensors hold what vLLM computed without carried rows; entries of requests that
    carry nothing stay as they are. May be repeated: nothing is read from what it writes.
    """
    length_R = carried.committed_R + carried.kept_R
    index_RK = length_R.unsqueeze(1) + torch.arange(num_query, device=length_R.device)
    number_RK = (index_RK // block_size).clamp(max=block_table_RN.shape[1] - 1)
    slots_RK = _slots(block_table_RN.gather(1, number_RK), index_RK, block_size)
    slots_RK = torch.where(index_RK < max_model_len, slots_RK, PAD_SLOT)
    moved_R = carried.kept_R > 0
    stock_RK = query_slots_Q.view_as(slots_RK)
    stock_RK.copy_(torch.where(moved_R.unsqueeze(1), slots_RK, stock_RK))
    seq_lens_R.copy_(torch.where(moved_R, length_R + num_query, seq_lens_R))


def place_context(
    carried: Carried,
    *,
    positions_T: torch.Tensor,
    block_table_RN: torch.Tensor,
    block_size: int,
    context_positions_T: torch.Tensor,
    context_slots_T: torch.Tensor,
) -> None:
    """Give carried rows their own positions and slots, and write no other rejected row.

    The last two tensors change in place. The V1 runner has no need of it: vLLM's own kernel there
    gives every rejected row its position and slot, and it drafts only where all of them fit.
    """
    kept_T = carried.kept_R[carried.request_T]
    number_T = (positions_T // block_size).clamp(max=block_table_RN.shape[1] - 1)
    slots_T = _slots(block_table_RN[carried.request_T, number_T], positions_T, block_size)
    context_positions_T.copy_(torch.where(carried.carried_T, positions_T, context_positions_T))
    fitting_T = torch.where(carried.offset_T >= kept_T, PAD_SLOT, context_slots_T)
    context_slots_T.copy_(torch.where(carried.carried_T, slots_T, fitting_T))


def _slots(block: torch.Tensor, index: torch.Tensor, block_size: int) -> torch.Tensor:
    """Slot of the `index`-th token of a request, given its block; PAD_SLOT where it has none."""
    slots = block.long() * block_size + index % block_size
    return torch.where(block == NULL_BLOCK, PAD_SLOT, slots)
