"""Attention of many small blocks over one shared context, with memory linear in the blocks.

Every block attends to its own range of the shared context rows and to rows of its own (carried
rows and its own slots). One dense query-by-key matrix over all blocks would be quadratic, so
blocks are taken in chunks: only the output and the log-sum-exp of each query are kept, and the
backward pass recomputes the probabilities of a chunk at a time. Shapes: see `blocks.py`;
G = H / K query heads share a key head, X = S * G queries of a block meet the same keys, and
O is the number of a block's own rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

# Scores of one chunk, in elements: 16 MiB of float32 stay near the cores on CPU; a GPU wants
# fewer, larger kernels.
_CPU_CHUNK = 4 << 20
_GPU_CHUNK = 64 << 20


@dataclass(frozen=True)
class Chunk:
    """Blocks `first <= block < last`, which attend to context rows within `low <= row < high`.

    Rows below `high_all` are open to every block of the chunk; `blocked_ML`, over the rows
    `high_all <= row < high`, marks those that are closed to a block.
    """

    first: int
    last: int
    low: int
    high_all: int
    high: int
    closed_ML: torch.Tensor | None


def plan_chunks(
    starts: Sequence[int],
    ends: Sequence[int],
    *,
    queries_per_block: int,
    device: torch.device,
    max_elements: int | None = None,
) -> list[Chunk]:
    """Split blocks into chunks whose score matrices stay below a bound.

    Blocks that start at the same context row and have similar ends belong next to each other:
    order changes the work, never the result.

    Args:
        starts, ends: context range of each block; `start <= end`.
        queries_per_block: slots times query heads.
        device: where the masks go.
        max_elements: bound on the scores of a chunk; at least one block is taken.
    """
    if max_elements is None:
        max_elements = _CPU_CHUNK if device.type == "cpu" else _GPU_CHUNK
    chunks = []
    first = 0
    while first < len(starts):
        last, high = first + 1, ends[first]
        while last < len(starts) and starts[last] == starts[first]:
            widest = max(high, ends[last]) - starts[first]
            if (last + 1 - first) * queries_per_block * widest > max_elements:
                break
            high = max(high, ends[last])
            last += 1
        high_all = min(ends[first:last])
        closed = None
        if high_all < high:
            rows = torch.arange(high_all, high, device=device)
            closed = rows[None, :] >= torch.tensor(ends[first:last], device=device)[:, None]
        chunks.append(Chunk(first, last, starts[first], high_all, high, closed))
        first = last
    return chunks


def block_attention(
    query_ASHE: torch.Tensor,
    key_TKE: torch.Tensor,
    value_TKE: torch.Tensor,
    own_key_AOKE: torch.Tensor,
    own_value_AOKE: torch.Tensor,
    *,
    chunks: Sequence[Chunk],
    own_closed_AO: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from each block to its context range and to its own rows, not causally.

    Args:
        query_ASHE: queries, positions already applied; scores are scaled by `E ** -0.5`.
        key_TKE, value_TKE: the shared context.
        own_key_AOKE, own_value_AOKE: rows that only the block itself sees.
        chunks: from `plan_chunks` for the same blocks.
        own_closed_AO: own rows to hide; every block must keep at least one. None hides none.

    Returns:
        The attention output, [A, S, H, E], in the values' dtype.
    """
    dtype = value_TKE.dtype
    return _BlockAttention.apply(
        query_ASHE.to(dtype), key_TKE.to(dtype), value_TKE, own_key_AOKE.to(dtype),
        own_value_AOKE.to(dtype), chunks, own_closed_AO,
    )  # fmt: skip


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, own_key, own_value, chunks, own_closed):
        A, S, H, E = query.shape
        K = key.shape[1]
        scale = E**-0.5
        # Key heads first, so that a chunk is one batched product without copies.
        query_KAXE = (
            (query * scale).view(A, S, K, H // K, E).permute(2, 0, 1, 3, 4).reshape(K, A, -1, E)
        )
        key_KTE, value_KTE = (x.transpose(0, 1).contiguous() for x in (key, value))
        own_key_KAOE, own_value_KAOE = (
            x.permute(2, 0, 1, 3).contiguous() for x in (own_key, own_value)
        )
        out_KAXE = torch.empty_like(query_KAXE)
        lse_KAX = torch.empty(query_KAXE.shape[:3], dtype=torch.float32, device=query.device)
        for chunk in chunks:
            block = slice(chunk.first, chunk.last)
            scores, own_scores = _scores(
                query_KAXE[:, block], key_KTE, own_key_KAOE[:, block], chunk,
                None if own_closed is None else own_closed[block],
            )  # fmt: skip
            top = own_scores.amax(-1, keepdim=True)
            if scores is not None:
                top = torch.maximum(top, scores.amax(-1, keepdim=True))
                scores.sub_(top).exp_()
            own_scores.sub_(top).exp_()
            total = own_scores.sum(-1, keepdim=True)
            out = own_scores.to(value.dtype) @ own_value_KAOE[:, block]
            if scores is not None:
                total += scores.sum(-1, keepdim=True)
                rows = slice(chunk.low, chunk.high)
                out += (scores.to(value.dtype).flatten(1, 2) @ value_KTE[:, rows]).view_as(out)
            out_KAXE[:, block] = out / total
            lse_KAX[:, block] = (top + total.log()).squeeze(-1)
        ctx.save_for_backward(
            query_KAXE, key_KTE, value_KTE, own_key_KAOE, own_value_KAOE, out_KAXE, lse_KAX,
            own_closed,
        )  # fmt: skip
        ctx.chunks, ctx.slots, ctx.scale = chunks, S, scale
        return _slots_first(out_KAXE, S)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        query, key, value, own_key, own_value, out, lse, own_closed = ctx.saved_tensors
        K, A, X, E = query.shape
        grad = (
            grad.to(value.dtype)
            .view(A, ctx.slots, K, -1, E)
            .permute(2, 0, 1, 3, 4)
            .reshape(K, A, X, E)
        )
        grad_query = torch.empty_like(query)
        # Many chunks add to the same context rows: float32, whatever the inputs are.
        grad_key, grad_value = (torch.zeros_like(x, dtype=torch.float32) for x in (key, value))
        grad_own_key, grad_own_value = torch.empty_like(own_key), torch.empty_like(own_value)
        for chunk in ctx.chunks:
            block = slice(chunk.first, chunk.last)
            query_c, grad_c = query[:, block], grad[:, block]
            scores, own_scores = _scores(
                query_c, key, own_key[:, block], chunk,
                None if own_closed is None else own_closed[block],
            )  # fmt: skip
            lse_c = lse[:, block, :, None]
            delta = (grad_c.float() * out[:, block].float()).sum(-1, keepdim=True)

            own_p = own_scores.sub_(lse_c).exp_()
            grad_own_value[:, block] = own_p.to(value.dtype).transpose(-1, -2) @ grad_c
            own_ds = (grad_c @ own_value[:, block].transpose(-1, -2)).float()
            own_ds = own_ds.sub_(delta).mul_(own_p).to(value.dtype)
            grad_own_key[:, block] = own_ds.transpose(-1, -2) @ query_c
            grad_q = own_ds @ own_key[:, block]

            if scores is not None:
                rows = slice(chunk.low, chunk.high)
                p = scores.sub_(lse_c).exp_().flatten(1, 2)
                query_f, grad_f = query_c.flatten(1, 2), grad_c.flatten(1, 2)
                grad_value[:, rows] += p.to(value.dtype).transpose(-1, -2) @ grad_f
                ds = (grad_f @ value[:, rows].transpose(-1, -2)).float()
                ds = ds.sub_(delta.flatten(1, 2)).mul_(p).to(value.dtype)
                grad_key[:, rows] += ds.transpose(-1, -2) @ query_f
                grad_q += (ds @ key[:, rows]).view_as(grad_q)
            grad_query[:, block] = grad_q
        return (
            _slots_first(grad_query, ctx.slots) * ctx.scale,
            grad_key.transpose(0, 1).to(key.dtype),
            grad_value.transpose(0, 1).to(value.dtype),
            grad_own_key.permute(1, 2, 0, 3),
            grad_own_value.permute(1, 2, 0, 3),
            None,
            None,
        )


def _scores(query_KMXE, key_KTE, own_key_KMOE, chunk, own_closed_MO):
    """Scores of a chunk: with its context rows [K, M, X, L] or None, with its own [K, M, X, O]."""
    own = (query_KMXE @ own_key_KMOE.transpose(-1, -2)).float()
    if own_closed_MO is not None:
        own.masked_fill_(own_closed_MO[None, :, None, :], float("-inf"))
    if chunk.high == chunk.low:
        return None, own
    K, M, X, _ = query_KMXE.shape
    rows = key_KTE[:, chunk.low : chunk.high]
    scores = (query_KMXE.flatten(1, 2) @ rows.transpose(-1, -2)).float().view(K, M, X, -1)
    if chunk.closed_ML is not None:
        scores[..., chunk.high_all - chunk.low :].masked_fill_(
            chunk.closed_ML[None, :, None, :], float("-inf")
        )
    return scores, own


def _slots_first(x_KAXE: torch.Tensor, slots: int) -> torch.Tensor:
    K, A, _, E = x_KAXE.shape
    return x_KAXE.view(K, A, slots, -1, E).permute(1, 2, 0, 3, 4).reshape(A, slots, -1, E)
