"""Triton kernels of the row arithmetic in `rows.py`, for the V2 runner and its CUDA graphs.

Two kernels: one finds and marks the carried rows right after the states are fused, eagerly; the
other gives rows their slots, from buffers with fixed addresses, so that it can be captured in a
graph and replayed. Both do nothing for a request that carries nothing.

Shapes as in `rows.py`; M: requests that the buffers hold.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from carryover.vllm_plugin.rows import NULL_BLOCK, PAD_SLOT

_BLOCK_H = 1024


class CarriedBuffers:
    """Where the first kernel leaves what the second one reads: int32 [M] each.

    Attributes:
        committed_M: committed states n.
        first_M: index of the first rejected row.
        rejected_M: rejected rows r.
        kept_M: rows carried; 0 past the batch.
    """

    def __init__(self, max_num_requests: int, device: torch.device) -> None:
        self.all_4M = torch.zeros(4, max_num_requests, dtype=torch.int32, device=device)
        self.committed_M, self.first_M, self.rejected_M, self.kept_M = self.all_4M

    def clear(self) -> None:
        """Carry nothing."""
        self.all_4M.zero_()


def find_and_mark(
    buffers: CarriedBuffers,
    *,
    hidden_TH: torch.Tensor,
    marker_H: torch.Tensor,
    positions_T: torch.Tensor,
    query_start_R1: torch.Tensor,
    num_rejected_R: torch.Tensor,
    num_requests: int,
    num_query: int,
    max_model_len: int,
) -> None:
    """`find_carried` and `mark_rows` in one kernel; fills the buffers and adds the marker."""
    max_num_requests = buffers.kept_M.shape[0]
    _find_and_mark_kernel[(num_requests, num_query - 1)](
        hidden_TH,
        hidden_TH.stride(0),
        marker_H,
        positions_T,
        query_start_R1,
        num_rejected_R,
        buffers.committed_M,
        buffers.first_M,
        buffers.rejected_M,
        buffers.kept_M,
        num_requests,
        max_num_requests,
        num_query,
        max_model_len,
        hidden_TH.shape[1],
        BLOCK_H=_BLOCK_H,
        BLOCK_M=triton.next_power_of_2(max_num_requests),
    )


def place(
    buffers: CarriedBuffers,
    *,
    num_requests: int,
    block_table_RN: torch.Tensor,
    block_size: int,
    num_query: int,
    max_model_len: int,
    context_positions_T: torch.Tensor,
    context_slots_T: torch.Tensor,
    query_slots_Q: torch.Tensor,
    seq_lens_R: torch.Tensor,
) -> None:
    """`place_context` and `place_queries` in one kernel; once captured, it serves later batches."""
    _place_kernel[(num_requests,)](
        buffers.committed_M,
        buffers.first_M,
        buffers.rejected_M,
        buffers.kept_M,
        block_table_RN,
        block_table_RN.stride(0),
        block_table_RN.shape[1],
        block_size,
        num_query,
        max_model_len,
        context_positions_T,
        context_slots_T,
        query_slots_Q,
        seq_lens_R,
        PAD=PAD_SLOT,
        NULL=NULL_BLOCK,
        BLOCK_Q=triton.next_power_of_2(num_query),
    )


@triton.jit
def _find_and_mark_kernel(
    hidden_ptr,  # [T, H]
    hidden_stride,
    marker_ptr,  # [H]
    positions_ptr,  # [T]
    query_start_ptr,  # [R + 1]
    num_rejected_ptr,  # [R]
    committed_ptr,  # [M] (output)
    first_ptr,  # [M] (output)
    rejected_ptr,  # [M] (output)
    kept_ptr,  # [M] (output)
    num_requests,
    max_num_requests,
    num_query,
    max_model_len,
    hidden_size,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """One program per request and possible carried row."""
    request = tl.program_id(0)
    row = tl.program_id(1)
    rejected = tl.load(num_rejected_ptr + request).to(tl.int32)
    first = tl.load(query_start_ptr + request + 1).to(tl.int32) - rejected
    committed = tl.load(positions_ptr + first - 1).to(tl.int32) + 1
    room = tl.maximum(max_model_len - num_query - committed, 0)
    kept = tl.minimum(rejected, room)
    if row == 0:
        tl.store(committed_ptr + request, committed)
        tl.store(first_ptr + request, first)
        tl.store(rejected_ptr + request, rejected)
        tl.store(kept_ptr + request, kept)
        if request == num_requests - 1:
            # A replayed graph also runs for the requests that pad it.
            index = tl.arange(0, BLOCK_M)
            padding = (index >= num_requests) & (index < max_num_requests)
            tl.store(kept_ptr + index, 0, mask=padding)
    if row < kept:
        base = hidden_ptr + (first + row).to(tl.int64) * hidden_stride
        for start in range(0, hidden_size, BLOCK_H):
            column = start + tl.arange(0, BLOCK_H)
            inside = column < hidden_size
            hidden = tl.load(base + column, mask=inside)
            marker = tl.load(marker_ptr + column, mask=inside)
            tl.store(base + column, hidden + marker, mask=inside)


@triton.jit
def _place_kernel(
    committed_ptr,  # [M]
    first_ptr,  # [M]
    rejected_ptr,  # [M]
    kept_ptr,  # [M]
    block_table_ptr,  # [R, N]
    block_table_stride,
    num_blocks,
    block_size,
    num_query,
    max_model_len,
    context_positions_ptr,  # [T] (output)
    context_slots_ptr,  # [T] (output)
    query_slots_ptr,  # [Q] (output)
    seq_lens_ptr,  # [R] (output)
    PAD: tl.constexpr,
    NULL: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """One program per request. At most B rows are rejected, so one block of B+1 covers them."""
    request = tl.program_id(0)
    kept = tl.load(kept_ptr + request)
    if kept > 0:
        committed = tl.load(committed_ptr + request)
        first = tl.load(first_ptr + request)
        rejected = tl.load(rejected_ptr + request)
        table = block_table_ptr + request.to(tl.int64) * block_table_stride
        offset = tl.arange(0, BLOCK_Q)

        carried = offset < kept
        index = committed + offset
        number = tl.minimum(index // block_size, num_blocks - 1)
        block = tl.load(table + number, mask=carried, other=NULL).to(tl.int64)
        slot = tl.where(block == NULL, PAD, block * block_size + index % block_size)
        slot = tl.where(carried, slot, PAD)
        tl.store(context_slots_ptr + first + offset, slot, mask=offset < rejected)
        position = index.to(tl.int64)
        tl.store(context_positions_ptr + first + offset, position, mask=carried)

        in_block = offset < num_query
        index = committed + kept + offset
        writable = in_block & (index < max_model_len)
        number = tl.minimum(index // block_size, num_blocks - 1)
        block = tl.load(table + number, mask=writable, other=NULL).to(tl.int64)
        slot = tl.where(block == NULL, PAD, block * block_size + index % block_size)
        slot = tl.where(writable, slot, PAD)
        tl.store(query_slots_ptr + request * num_query + offset, slot, mask=in_block)
        tl.store(seq_lens_ptr + request, committed + kept + num_query)
