"""Blockwise attention equals one dense masked attention, forward and backward."""

import pytest
import torch

from carryover.drafters.attention import block_attention, plan_chunks

STARTS = [0, 0, 0, 20, 20, 41]
ENDS = [0, 5, 19, 20, 33, 60]  # the first and the fourth block see no context at all
ROWS, SLOTS, OWN, HEADS, KEY_HEADS, SIZE = 60, 4, 7, 6, 2, 8


def tensors(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (len(STARTS), SLOTS, HEADS, SIZE),
        (ROWS, KEY_HEADS, SIZE),
        (ROWS, KEY_HEADS, SIZE),
        (len(STARTS), OWN, KEY_HEADS, SIZE),
        (len(STARTS), OWN, KEY_HEADS, SIZE),
    ]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def closed(seed=1):
    """Hides some of the first three own rows (as carried rows would be), never the slots."""
    mask = torch.zeros(len(STARTS), SLOTS, OWN, dtype=torch.bool)
    rows = torch.rand(len(STARTS), 1, 3, generator=torch.Generator().manual_seed(seed)) < 0.5
    mask[..., :3] = rows
    return mask


def dense(query, key, value, own_key, own_value, own_closed, scale, window=None):
    """The same by one softmax over all keys of all blocks."""
    blocks = len(STARTS)
    repeat = HEADS // KEY_HEADS
    keys = torch.cat((key, own_key.flatten(0, 1))).repeat_interleave(repeat, 1)
    values = torch.cat((value, own_value.flatten(0, 1))).repeat_interleave(repeat, 1)
    rows = torch.arange(ROWS)
    starts, ends = torch.tensor(STARTS)[:, None], torch.tensor(ENDS)[:, None]
    context = ((rows >= starts) & (rows < ends))[:, None].expand(-1, SLOTS, -1).clone()
    if window is not None:
        own_row = ends[..., None] + torch.arange(SLOTS)[:, None]
        context &= rows > own_row - window
    own = torch.zeros(blocks, SLOTS, blocks, OWN, dtype=torch.bool)
    for index in range(blocks):
        own[index, :, index] = True if own_closed is None else ~own_closed[index]
    mask = torch.cat((context, own.flatten(2)), dim=-1)
    scores = torch.einsum("ashe,khe->ashk", query.float(), keys.float()) * scale
    scores = scores.masked_fill(~mask[:, :, None], float("-inf"))
    return torch.einsum("ashk,khe->ashe", scores.softmax(-1), values.float())


@pytest.mark.parametrize("max_elements", [1, 2000, 10**9])
@pytest.mark.parametrize("hide", [False, True])
def test_equals_dense_attention(max_elements, hide):
    ours, theirs = tensors(), tensors()
    mask = closed() if hide else None
    chunks = plan_chunks(
        STARTS, ENDS, queries_per_block=SLOTS * HEADS, device=torch.device("cpu"),
        max_elements=max_elements,
    )  # fmt: skip
    out = block_attention(*ours, chunks=chunks, own_closed_ASO=mask)
    expected = dense(*theirs, mask, SIZE**-0.5)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    out.backward(gradient)
    expected.backward(gradient)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, atol=1e-5, rtol=1e-5)
    assert (len(chunks) == len(STARTS)) == (max_elements == 1)


def test_chunks_never_hold_more_scores_than_allowed():
    starts, ends = [0] * 64, list(range(100, 164))
    chunks = plan_chunks(
        starts, ends, queries_per_block=10, device=torch.device("cpu"), max_elements=20_000
    )
    assert [c.first for c in chunks[1:]] == [c.last for c in chunks[:-1]]
    assert chunks[0].first == 0 and chunks[-1].last == 64
    assert all((c.last - c.first) * 10 * (c.high - c.low) <= 20_000 for c in chunks)


def test_bfloat16_is_near_float32():
    exact, rounded = tensors(), tensors(torch.bfloat16)
    chunks = plan_chunks(STARTS, ENDS, queries_per_block=24, device=torch.device("cpu"))
    expected = block_attention(*exact, chunks=chunks)
    out = block_attention(*rounded, chunks=chunks)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, atol=0.03, rtol=0.03)
    expected.sum().backward()
    out.float().sum().backward()
    for mine, other in zip(rounded, exact, strict=True):
        torch.testing.assert_close(mine.grad.float(), other.grad, atol=0.06, rtol=0.06)


@pytest.mark.parametrize("window", [SLOTS, 9, 100])
def test_window_and_causal_own_rows(window):
    query, key, value, own_key, own_value = tensors()
    own_key, own_value = own_key[:, :SLOTS], own_value[:, :SLOTS]
    later = torch.ones(SLOTS, SLOTS, dtype=torch.bool).triu(1)[None]
    chunks = plan_chunks(
        STARTS, ENDS, queries_per_block=24, device=torch.device("cpu"), window=window, slots=SLOTS
    )
    out = block_attention(
        query, key, value, own_key, own_value, chunks=chunks, own_closed_ASO=later, scale=0.7
    )
    padding = (0, 0, 0, 0, 0, OWN - SLOTS)
    padded = [torch.nn.functional.pad(x, padding) for x in (own_key, own_value)]
    mask = torch.ones(len(STARTS), SLOTS, OWN, dtype=torch.bool)
    mask[..., :SLOTS] = later
    expected = dense(query, key, value, *padded, mask, 0.7, window=window)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
