"""Attention of many small blocks over one shared context, with memory linear in the blocks.

Every block attends to its own range of the shared context rows and to rows of its own (carried
rows and its own slots). One dense query-by-key matrix over all blocks would be quadratic, so
blocks are taken in chunks: only the output and the log-sum-exp of each query are kept, and the
backward pass recomputes the probabilities of a chunk at a time. Shapes: see `blocks.py`;
M blocks of a chunk, G = H / K query heads for each key head, X = S * G queries of a block that
meet the same keys, L context rows of a chunk, O rows of a block's own.
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

    Rows from `masked_from` on are open to some of the blocks only: `closed_MSL` marks, for the
    rows `masked_from <= row < high`, where they are closed (S is 1 if all slots see the same).
    """

    first: int
    last: int
    low: int
    high: int
    masked_from: int
    closed_MSL: torch.Tensor | None


def plan_chunks(
    starts: Sequence[int],
    ends: Sequence[int],
    *,
    queries_per_block: int,
    device: torch.device,
    window: int | None = None,
    slots: int = 1,
    max_elements: int | None = None,
) -> list[Chunk]:
    """Split blocks into chunks whose score matrices stay below a bound.

    Blocks that start at the same context row and have similar ends belong next to each other:
    order changes the work, never the result.

    Args:
        starts, ends: context range of each block; `start <= end`.
        queries_per_block: slots times query heads.
        device: where the masks go.
        window: slot s of a block stands at row `end + s` and sees only the last `window` rows up
            to its own; None: all. The block's own rows must fit into the window.
        slots: S, where there is a window.
        max_elements: bound on the scores of a chunk; at least one block is taken.
    """
    if max_elements is None:
        max_elements = _CPU_CHUNK if device.type == "cpu" else _GPU_CHUNK
    reach = [
        start if window is None else max(start, min(end, end - window + 1))
        for start, end in zip(starts, ends, strict=True)
    ]
    chunks = []
    first = 0
    while first < len(starts):
        last, low, high = first + 1, reach[first], ends[first]
        while last < len(starts) and starts[last] == starts[first]:
            wider = min(low, reach[last]), max(high, ends[last])
            if (last + 1 - first) * queries_per_block * (wider[1] - wider[0]) > max_elements:
                break
            (low, high), last = wider, last + 1
        # Below the first end, rows are open to all blocks, unless a window hides some.
        masked_from = min(ends[first:last]) if window is None else low
        closed = None
        if masked_from < high:
            rows_L = torch.arange(masked_from, high, device=device)
            ends_M11 = torch.tensor(ends[first:last], device=device)[:, None, None]
            closed = rows_L >= ends_M11
            if window is not None:
                oldest_S1 = torch.arange(slots, device=device)[:, None] - window + 1
                closed = closed | (rows_L < ends_M11 + oldest_S1)
        chunks.append(Chunk(first, last, low, high, masked_from, closed))
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
    own_closed_ASO: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Attend from each block to its context range and to its own rows.

    Args:
        query_ASHE: queries, positions already applied.
        key_TKE, value_TKE: the shared context.
        own_key_AOKE, own_value_AOKE: rows that only the block itself sees.
        chunks: from `plan_chunks` for the same blocks.
        own_closed_ASO: own rows to hide, with A and S 1 where they do not matter; every query
            must keep at least one. None hides none.
        scale: of the scores; default `E ** -0.5`.

    Returns:
        The attention output, [A, S, H, E], in the values' dtype.
    """
    dtype = value_TKE.dtype
    if own_closed_ASO is not None:
        own_closed_ASO = own_closed_ASO.expand(query_ASHE.shape[0], -1, -1)
    return _BlockAttention.apply(
        query_ASHE.to(dtype), key_TKE.to(dtype), value_TKE, own_key_AOKE.to(dtype),
        own_value_AOKE.to(dtype), chunks, own_closed_ASO,
        query_ASHE.shape[-1] ** -0.5 if scale is None else scale,
    )  # fmt: skip


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, own_key, own_value, chunks, own_closed, scale):
        S, K = query.shape[1], key.shape[1]
        # Key heads first, so that a chunk is one batched product without copies.
        query_KAXE = _heads_first(query * scale, K)
        key_KTE, value_KTE = (x.transpose(0, 1).contiguous() for x in (key, value))
        own_key_KAOE, own_value_KAOE = (
            x.permute(2, 0, 1, 3).contiguous() for x in (own_key, own_value)
        )
        out_KAXE = torch.empty_like(query_KAXE)
        lse_KAX = torch.empty(query_KAXE.shape[:3], dtype=torch.float32, device=query.device)
        for chunk in chunks:
            block = slice(chunk.first, chunk.last)
            scores, own_scores = _scores(
                query_KAXE[:, block], key_KTE, own_key_KAOE[:, block], chunk, own_closed, S
            )
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
                context = scores.to(value.dtype).flatten(1, 2) @ value_KTE[:, rows]
                out += context.view_as(out)
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
        grad = _heads_first(grad.to(value.dtype), query.shape[0])
        grad_query = torch.empty_like(query)
        # Many chunks add to the same context rows: float32, whatever the inputs are.
        grad_key, grad_value = (torch.zeros_like(x, dtype=torch.float32) for x in (key, value))
        grad_own_key, grad_own_value = torch.empty_like(own_key), torch.empty_like(own_value)
        for chunk in ctx.chunks:
            block = slice(chunk.first, chunk.last)
            query_c, grad_c = query[:, block], grad[:, block]
            scores, own_scores = _scores(
                query_c, key, own_key[:, block], chunk, own_closed, ctx.slots
            )
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
            None,
        )


def _scores(query_KMXE, key_KTE, own_key_KMOE, chunk, own_closed_ASO, slots):
    """Scores of a chunk: with its context rows [K, M, X, L] or None, with its own [K, M, X, O]."""
    own = (query_KMXE @ own_key_KMOE.transpose(-1, -2)).float()
    if own_closed_ASO is not None:
        _close(own, own_closed_ASO[chunk.first : chunk.last], slots)
    if chunk.high == chunk.low:
        return None, own
    K, M, X, _ = query_KMXE.shape
    rows = key_KTE[:, chunk.low : chunk.high]
    scores = (query_KMXE.flatten(1, 2) @ rows.transpose(-1, -2)).float().view(K, M, X, -1)
    if chunk.closed_MSL is not None:
        _close(scores[..., chunk.masked_from - chunk.low :], chunk.closed_MSL, slots)
    return scores, own


def _close(scores_KMXL: torch.Tensor, closed_MSL: torch.Tensor, slots: int) -> None:
    """Hide keys, in place."""
    by_slot_KMSGL = scores_KMXL.unflatten(2, (slots, -1))
    by_slot_KMSGL.masked_fill_(closed_MSL[None, :, :, None], float("-inf"))


def _heads_first(x_ASHE: torch.Tensor, key_heads: int) -> torch.Tensor:
    """[A, S, H, E] to [K, A, X, E]."""
    return x_ASHE.unflatten(2, (key_heads, -1)).permute(2, 0, 1, 3, 4).flatten(2, 3).contiguous()


def _slots_first(x_KAXE: torch.Tensor, slots: int) -> torch.Tensor:
    """[K, A, X, E] to [A, S, H, E]."""
    return x_KAXE.unflatten(2, (slots, -1)).permute(1, 2, 0, 3, 4).flatten(2, 3)
