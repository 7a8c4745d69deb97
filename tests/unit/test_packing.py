"""Split, packing and order: functions of the data, the seed and the step alone."""

import numpy as np
import pytest
from training_runs import rows, table

from carryover.errors import DataError
from carryover.training.packing import Corpus, Schedule, pack, split


def test_a_sequence_is_the_prompt_and_then_the_response():
    values = rows(5)
    corpus = Corpus(table(values), max_tokens=1000)
    for index, row in enumerate(values):
        sequence = corpus.sequence(index)
        assert sequence.row_id == row["id"]
        assert sequence.input_ids_T.tolist() == row["prompt_ids"] + row["response_ids"]
        assert sequence.prompt_length == len(row["prompt_ids"])
        assert sequence.greedy == (row["temperature"] == 0)
        assert sequence.complete == (row["finish"] == "stop")


def test_rows_are_read_right_from_a_table_of_several_chunks_and_from_a_slice():
    import pyarrow as pa

    values = rows(9)
    pieces = pa.concat_tables([table(values[:4]), table(values[4:])]).slice(2, 6)
    corpus = Corpus(pieces, max_tokens=1000)
    for index, row in enumerate(values[2:8]):
        assert (
            corpus.sequence(index).input_ids_T.tolist() == row["prompt_ids"] + row["response_ids"]
        )


def test_long_responses_are_cut_and_counted_and_no_longer_complete():
    values = [
        {**rows(1)[0], "id": 1, "prompt_ids": [5] * 6, "response_ids": [7] * 10, "finish": "stop"},
        {**rows(1)[0], "id": 2, "prompt_ids": [5] * 6, "response_ids": [7] * 4, "finish": "stop"},
        {**rows(1)[0], "id": 3, "prompt_ids": [5] * 9, "response_ids": [7] * 4, "finish": "stop"},
        {**rows(1)[0], "id": 4, "prompt_ids": [5] * 2, "response_ids": [7], "finish": "stop"},
    ]
    corpus = Corpus(table(values), max_tokens=10)
    assert corpus.usable.tolist() == [0, 1]
    assert (corpus.num_cut, corpus.num_dropped) == (1, 2)
    assert len(corpus.sequence(0)) == 10 and not corpus.sequence(0).complete
    assert corpus.sequence(1).complete
    assert corpus.token_counts(corpus.usable, 10).tolist() == [0] * 7 + [8, 0, 0]


def test_data_without_a_usable_row_is_refused():
    with pytest.raises(DataError, match="raise sequence_length"):
        Corpus(table([{**rows(1)[0], "prompt_ids": [5] * 30}]), max_tokens=30)
    with pytest.raises(DataError, match="at least 2 usable rows"):
        split(Corpus(table(rows(1)), max_tokens=99), fraction=0.5, max_held_out=9)


def test_the_split_depends_on_ids_alone_and_prefers_greedy_rows():
    values = rows(40)
    corpus = Corpus(table(values), max_tokens=99)
    parts = split(corpus, fraction=0.25, max_held_out=8)
    held_out = set(corpus.row_ids[parts.held_out_N].tolist())
    assert len(held_out) == 8
    assert corpus.greedy(parts.held_out_N).all()
    assert not held_out & set(corpus.row_ids[parts.train_N].tolist())
    assert len(parts.train_N) + len(parts.held_out_N) == 40

    turned = Corpus(table(values[::-1]), max_tokens=99)
    again = split(turned, fraction=0.25, max_held_out=8)
    assert set(turned.row_ids[again.held_out_N].tolist()) == held_out
    fewer = Corpus(table([row for row in values if row["id"] not in (100, 139)]), max_tokens=99)
    kept = set(fewer.row_ids[split(fewer, fraction=0.25, max_held_out=8).held_out_N].tolist())
    assert len(kept & held_out) >= 6


def test_packs_are_full_and_hold_every_sequence_once():
    lengths = np.random.default_rng(1).integers(1, 100, 500)
    packs = pack(lengths, 100, seed=3)
    assert sorted(np.concatenate(packs).tolist()) == list(range(500))
    assert max(lengths[members].sum() for members in packs) <= 100
    assert len(packs) <= 1.05 * np.ceil(lengths.sum() / 100)
    assert [p.tolist() for p in packs] == [p.tolist() for p in pack(lengths, 100, seed=3)]
    assert [p.tolist() for p in packs] != [p.tolist() for p in pack(lengths, 100, seed=4)]
    with pytest.raises(ValueError, match="exceeds the capacity"):
        pack([101], 100)


def test_every_epoch_is_another_permutation_and_steps_know_theirs():
    schedule = Schedule(7, packs_per_step=3, seed=5)
    stream = [number for step in range(14) for number in schedule.packs_of(step)]
    epochs = [stream[start : start + 7] for start in range(0, 42, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6
    # A step's packs do not depend on the steps asked for before it.
    fresh = Schedule(7, packs_per_step=3, seed=5)
    assert [fresh.packs_of(step) for step in (13, 2, 5)] == [
        stream[3 * step : 3 * step + 3] for step in (13, 2, 5)
    ]
    assert Schedule(7, packs_per_step=3, seed=6).packs_of(0) != stream[:3]
    assert schedule.steps_in(1) == 3 and schedule.steps_in(3) == 7
    assert schedule.epoch_of(7) == 3
