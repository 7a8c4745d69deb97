"""The shared index arithmetic against a brute-force model of a paged KV cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from plugin_scenes import Request, Scene, scenes

from carryover.vllm_plugin.rows import PAD_SLOT, mark_rows


@settings(max_examples=300, deadline=None)
@given(scenes(room=True))
def test_attention_sees_committed_carried_and_block_and_nothing_else(scene: Scene) -> None:
    """Replay the writes of one draft into a paged cache and read what attention would read."""
    cache: dict[int, tuple] = {}
    for number, request in enumerate(scene.requests):
        for position in range(request.committed + request.rejected - request.verified):
            cache[scene.slot(number, position)] = ("committed", number, position)
    scene.place()
    row = 0
    for number, request in enumerate(scene.requests):
        for position in scene.row_positions(request):
            kind = "committed" if position < request.committed else "carried"
            assert scene.context_positions[row] == position
            cache[int(scene.context_slots[row])] = (kind, number, position)
            row += 1
    for number, request in enumerate(scene.requests):
        for k in range(scene.num_query):
            slot = int(scene.query_slots[number * scene.num_query + k])
            cache[slot] = ("block", number, request.committed + k)

    for number, request in enumerate(scene.requests):
        seen = [cache[scene.slot(number, i)] for i in range(int(scene.seq_lens[number]))]
        n, r = request.committed, request.rejected
        assert seen == [
            *(("committed", number, position) for position in range(n)),
            *(("carried", number, position) for position in range(n, n + r)),
            *(("block", number, n + k) for k in range(scene.num_query)),
        ]


@settings(max_examples=300, deadline=None)
@given(scenes())
def test_rows_are_bounded_at_the_longest_sequence(scene: Scene) -> None:
    """Whatever the lengths, no slot outside the request's own blocks and length is written."""
    scene.place()
    for number, request in enumerate(scene.requests):
        n, r, q = request.committed, request.rejected, scene.num_query
        kept = max(0, min(r, scene.max_model_len - q - n))
        rows = range(scene.starts[number + 1] - r, scene.starts[number + 1])
        slots = [int(scene.context_slots[row]) for row in rows]
        assert [scene.owner(slot) for slot in slots[:kept]] == [
            (number, n + index) for index in range(kept)
        ]
        assert slots[kept:] == [PAD_SLOT] * (r - kept)
        block = scene.query_slots[number * q : (number + 1) * q].tolist()
        if kept:
            assert [scene.owner(slot) for slot in block] == [
                (number, n + kept + k) for k in range(q)
            ]
            assert scene.seq_lens[number] == n + kept + q <= scene.max_model_len
        else:
            untouched = Scene(scene.requests, q, scene.max_model_len, scene.block_size)
            assert block == untouched.query_slots[number * q : (number + 1) * q].tolist()
            assert scene.seq_lens[number] == min(n + q, scene.max_model_len)


@settings(max_examples=100, deadline=None)
@given(scenes(room=True))
def test_no_slot_past_what_vllm_reserved(scene: Scene) -> None:
    """vLLM reserves B+1 slots past the verified rows; carrying needs no more, at any r."""
    scene.place()
    for number, request in enumerate(scene.requests):
        reserved = request.committed + request.rejected + scene.num_query
        assert int(scene.seq_lens[number]) <= reserved


@settings(max_examples=100, deadline=None)
@given(scenes())
def test_placing_twice_is_placing_once(scene: Scene) -> None:
    """The V2 runner may place eagerly and again inside a CUDA graph."""
    scene.place()
    once = [t.clone() for t in (scene.context_slots, scene.query_slots, scene.seq_lens)]
    scene.place()
    for before, after in zip(
        once, (scene.context_slots, scene.query_slots, scene.seq_lens), strict=True
    ):
        assert torch.equal(before, after)


@settings(max_examples=200, deadline=None)
@given(scenes())
def test_exactly_the_carried_rows_are_marked(scene: Scene) -> None:
    """Also with bfloat16 states, and without touching any other row."""
    hidden = torch.randn(len(scene.positions), 3, dtype=torch.float64)
    marked = hidden.clone()
    marker = torch.tensor([1.0, -2.0, 4.0], dtype=torch.float64)
    carried = scene.find()
    mark_rows(marked, marker, carried)
    expected = hidden.clone()
    for number, request in enumerate(scene.requests):
        kept = max(
            0, min(request.rejected, scene.max_model_len - scene.num_query - request.committed)
        )
        first = scene.starts[number + 1] - request.rejected
        expected[first : first + kept] += marker
    assert torch.equal(marked, expected)


def test_a_missing_block_is_never_written() -> None:
    """Table entries of 0 name vLLM's null block, as in dummy batches: such rows are padding."""
    scene = Scene([Request(committed=5, verified=4, rejected=3)], 4, 32, 4)
    scene.table[0, 2] = 0
    scene.place()
    # Places 8 .. 11 lie in the missing block.
    assert scene.context_slots[1:].tolist() == [
        scene.slot(0, 5),
        scene.slot(0, 6),
        scene.slot(0, 7),
    ]
    assert scene.query_slots.tolist() == [PAD_SLOT] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_marking_keeps_the_dtype(dtype: torch.dtype) -> None:
    scene = Scene([Request(committed=5, verified=4, rejected=3)], 4, 32, 4)
    hidden = torch.zeros(4, 2, dtype=dtype)
    mark_rows(hidden, torch.ones(2, dtype=dtype), scene.find())
    assert hidden.dtype == dtype
    assert hidden[:, 0].tolist() == [0, 1, 1, 1]
