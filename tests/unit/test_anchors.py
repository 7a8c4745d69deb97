"""Anchors, labels and shifts stay inside one document's response."""

import pytest
import torch
from training_cases import generator, random_batch

from carryover.errors import DataError
from carryover.training.anchors import (
    anchor_candidates,
    anchored_blocks,
    block_labels,
    draw_anchors,
    shift_anchors,
)

DOCUMENTS = [(4, 6), (3, 1), (2, 5)]  # rows 0..9, 10..13, 14..20


@pytest.fixture
def batch():
    return random_batch(DOCUMENTS)


def test_an_anchor_and_its_successor_lie_in_one_response(batch):
    rows = anchor_candidates(batch).nonzero().squeeze(1).tolist()
    assert rows == [4, 5, 6, 7, 8, 16, 17, 18, 19]


def test_the_last_row_of_a_document_is_no_anchor_though_a_response_follows():
    batch = random_batch([(2, 3), (0, 3)])  # rows 0..4 and 5..7
    assert anchor_candidates(batch).nonzero().squeeze(1).tolist() == [2, 3, 5, 6]


def test_drawing_is_reproducible_distinct_and_bounded(batch):
    drawn = draw_anchors(batch, 4, generator=generator(1))
    assert torch.equal(drawn, draw_anchors(batch, 4, generator=generator(1)))
    assert len(drawn.unique()) == 4 and torch.equal(drawn, drawn.sort().values)
    assert len(draw_anchors(batch, 1000)) == 9
    seen = {tuple(draw_anchors(batch, 4, generator=generator(s)).tolist()) for s in range(20)}
    assert len(seen) > 10


def test_no_anchor_is_an_error():
    with pytest.raises(DataError, match="no response in it has two tokens"):
        draw_anchors(random_batch([(5, 1), (3, 1)]), 4)


def test_padding_holds_no_anchor(batch):
    padded = batch.document_ids_T.clone()
    padded[14:] = -1
    object.__setattr__(batch, "document_ids_T", padded)
    assert anchor_candidates(batch).nonzero().max() == 8


def test_context_is_the_document_strictly_before_the_anchor(batch):
    blocks = anchored_blocks(batch, torch.tensor([4, 8, 16]))
    assert blocks.starts_A.tolist() == [0, 0, 14]
    assert blocks.ends_A.tolist() == [4, 8, 16]
    assert blocks.positions_A.tolist() == [4, 8, 2]
    assert torch.equal(blocks.tokens_A, batch.input_ids_T[torch.tensor([4, 8, 16])])


def test_labels_follow_the_anchor_and_end_with_the_response(batch):
    rows, valid = block_labels(batch, torch.tensor([4, 8, 18]), 4)
    assert rows[0].tolist() == [5, 6, 7, 8]
    assert valid.tolist() == [[True] * 4, [True, False, False, False], [True, True, False, False]]
    assert rows.max() < len(batch)


def test_labels_end_where_the_next_document_begins_with_a_response():
    batch = random_batch([(2, 3), (0, 6)])
    _, valid = block_labels(batch, torch.tensor([3]), 4)
    assert valid.tolist() == [[True, False, False, False]]


def test_labels_end_where_the_response_does_inside_a_document(batch):
    """As with a second user turn behind the answer; what comes later never counts again."""
    batch.response_mask_T[6] = False
    _, valid = block_labels(batch, torch.tensor([4]), 4)
    assert valid.tolist() == [[True, False, False, False]]


def test_shift_goes_past_the_correction_token(batch):
    anchors = torch.tensor([4, 5, 8, 16, 17, 18])
    accepted = torch.tensor([2, 0, 0, 1, 2, 1])
    shifted, kept = shift_anchors(batch, anchors, accepted)
    # 8 -> 9 ends the response; 17 -> 20 likewise; 18 -> 20 too.
    assert kept.tolist() == [1, 0, 3]
    assert shifted.tolist() == [6, 7, 18]


def test_shift_never_enters_the_next_document():
    batch = random_batch([(2, 3), (0, 6)])  # the second document is a response from its first row
    shifted, kept = shift_anchors(batch, torch.tensor([2, 3, 9]), torch.tensor([2, 1, 1]))
    assert shifted.tolist() == kept.tolist() == []
