"""Which tokens a training step sees: the held-out split, packing, and the order of packs.

Everything here is a function of the data, the seed and the step, so that a resumed run needs no
saved data position and a run on two workers sees what a run on one sees.

A *sequence* is one prompt with its response, cut at the packing capacity. A *pack* is a list of
sequences whose lengths add up to at most the capacity; it is the unit of work of one backward pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from carryover.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

MIN_RESPONSE_TOKENS = 2
"""An anchor and one token to predict."""


@dataclass(frozen=True)
class Sequence:
    """One prompt with its response.

    Attributes:
        row_id: the row's id in the responses.
        input_ids_T: int32, prompt then response.
        prompt_length: tokens of the prompt; the response starts there.
        greedy: whether the response was generated at temperature 0.
        complete: whether the response ends because the target ended it.
    """

    row_id: int
    input_ids_T: np.ndarray
    prompt_length: int
    greedy: bool
    complete: bool

    def __len__(self) -> int:
        return len(self.input_ids_T)


class Corpus:
    """The rows of a responses table that can be trained on, read without copying their tokens.

    Args:
        table: see `carryover.data.responses.read_responses`.
        max_tokens: longer sequences lose the end of their response.

    Raises:
        DataError: no row has a response of at least two tokens within `max_tokens`.
    """

    def __init__(self, table: pa.Table, *, max_tokens: int) -> None:
        self.row_ids = table["id"].to_numpy()
        self._greedy = table["temperature"].to_numpy() == 0
        stopped = np.array([reason == "stop" for reason in table["finish"].to_pylist()])
        self._prompts, self._prompt_ends = _flatten(table["prompt_ids"])
        self._responses, self._response_ends = _flatten(table["response_ids"])
        self._prompt_lengths = np.diff(self._prompt_ends)
        whole = np.diff(self._response_ends)
        self._response_lengths = np.minimum(whole, max_tokens - self._prompt_lengths)
        self._complete = stopped & (self._response_lengths == whole)
        usable = self._response_lengths >= MIN_RESPONSE_TOKENS
        self.usable = np.flatnonzero(usable)
        self.num_dropped = int((~usable).sum())
        self.num_cut = int((self._response_lengths < whole)[self.usable].sum())
        if not len(self.usable):
            raise DataError(
                f"none of the {len(whole)} rows fits: a row needs a response of at least "
                f"{MIN_RESPONSE_TOKENS} tokens within {max_tokens}; raise sequence_length"
            )

    def sequence(self, row: int) -> Sequence:
        """The sequence of the row at this position in the table."""
        prompt_start, response_start = self._prompt_ends[row], self._response_ends[row]
        prompt = self._prompts[prompt_start : prompt_start + self._prompt_lengths[row]]
        response = self._responses[response_start : response_start + self._response_lengths[row]]
        return Sequence(
            row_id=int(self.row_ids[row]),
            input_ids_T=np.concatenate([prompt, response]),
            prompt_length=len(prompt),
            greedy=bool(self._greedy[row]),
            complete=bool(self._complete[row]),
        )

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Tokens of each of these rows, prompt and response."""
        return (self._prompt_lengths + self._response_lengths)[rows]

    def num_response_tokens(self, rows: np.ndarray) -> int:
        """Tokens of these rows' responses."""
        return int(self._response_lengths[rows].sum())

    def greedy(self, rows: np.ndarray) -> np.ndarray:
        """Whether each of these rows was generated at temperature 0."""
        return self._greedy[rows]

    def token_counts(self, rows: np.ndarray, vocab_size: int) -> np.ndarray:
        """How often each token occurs in these rows' responses: [vocab_size] int64."""
        counts = np.zeros(vocab_size, dtype=np.int64)
        for row in rows:
            sequence = self.sequence(int(row))
            np.add.at(counts, sequence.input_ids_T[sequence.prompt_length :], 1)
        return counts

    def sha256(self, rows: np.ndarray) -> str:
        """Hash of these rows' ids and tokens, in order."""
        digest = hashlib.sha256()
        for row in rows:
            sequence = self.sequence(int(row))
            header = f"{sequence.row_id} {sequence.prompt_length} {len(sequence)};"
            digest.update(header.encode())
            digest.update(sequence.input_ids_T.tobytes())
        return digest.hexdigest()


def _flatten(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """Values and offsets of a list column; row i is values[offsets[i] : offsets[i + 1]]."""
    array = column.combine_chunks()
    return array.values.to_numpy(), array.offsets.to_numpy()


@dataclass(frozen=True)
class Split:
    """Positions of rows: `train_N` and `held_out_N`, without overlap."""

    train_N: np.ndarray
    held_out_N: np.ndarray


def split(corpus: Corpus, *, fraction: float, max_held_out: int) -> Split:
    """Hold out rows by the hash of their id: the same rows whatever the seed, order or other rows.

    Greedy rows are held out first, because against them acceptance is what decoding would give.

    Args:
        corpus: the rows.
        fraction: share of the rows to hold out, at least one.
        max_held_out: no more than this many.

    Raises:
        DataError: fewer than two rows.
    """
    rows = corpus.usable
    if len(rows) < 2:
        raise DataError("training needs at least 2 usable rows, one of them held out; got 1")
    count = min(max(1, round(fraction * len(rows))), max_held_out, len(rows) - 1)
    digests = [
        hashlib.sha256(f"held-out {row_id}".encode()).digest() for row_id in corpus.row_ids[rows]
    ]
    sampled = ~corpus.greedy(rows)
    order = sorted(range(len(rows)), key=lambda i: (sampled[i], digests[i]))
    held_out = np.sort(rows[order[:count]])
    return Split(train_N=np.setdiff1d(rows, held_out), held_out_N=held_out)


def pack(lengths: List[int] | np.ndarray, capacity: int, *, seed: int = 0) -> list[np.ndarray]:
    """Best-fit decreasing: few packs, each at most `capacity` long.

    Args:
        lengths: of the sequences, each at most `capacity`.
        capacity: tokens of a pack.
        seed: decides which of several sequences of one length share a pack.

    Returns:
        For each pack the indices into `lengths`, in no meaningful order.
    """
    lengths = np.asarray(lengths)
    if len(lengths) and lengths.max() > capacity:
        raise ValueError(f"a sequence of {lengths.max()} tokens exceeds the capacity {capacity}")
    shuffled = np.random.default_rng(seed).permutation(len(lengths))
    order = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    packs: list[list[int]] = []
    # Bit r of `room` is set while some pack has exactly r tokens left; `open_packs[r]` lists them.
    open_packs: dict[int, list[int]] = {}
    room = 0
    for index in order.tolist():
        length = int(lengths[index])
        fitting = room >> length
        if fitting:
            left = length + (fitting & -fitting).bit_length() - 1
            number = open_packs[left].pop()
            if not open_packs[left]:
                room ^= 1 << left
        else:
            left, number = capacity, len(packs)
            packs.append([])
        packs[number].append(index)
        left -= length
        if left:
            open_packs.setdefault(left, []).append(number)
            room |= 1 << left
    return [np.array(members) for members in packs]


class Schedule:
    """Which packs each step takes: a new permutation every epoch, without end.

    Args:
        num_packs: packs in one epoch.
        packs_per_step: packs that one optimizer step averages over, on all workers together.
        seed: of the permutations.
    """

    def __init__(self, num_packs: int, *, packs_per_step: int, seed: int) -> None:
        self.num_packs = num_packs
        self.packs_per_step = packs_per_step
        self.seed = seed
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def steps_in(self, epochs: float) -> int:
        """Steps that see every pack `epochs` times, the last one rounded up."""
        return max(1, int(np.ceil(epochs * self.num_packs / self.packs_per_step)))

    def packs_of(self, step: int) -> list[int]:
        """Pack numbers of this step (from 0), in the order of their micro-batches."""
        first = step * self.packs_per_step
        return [self._pack_at(place) for place in range(first, first + self.packs_per_step)]

    def epoch_of(self, step: int) -> float:
        """Epochs completed when this step begins."""
        return step * self.packs_per_step / self.num_packs

    def _pack_at(self, place: int) -> int:
        epoch, offset = divmod(place, self.num_packs)
        if epoch != self._epoch:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.num_packs)
            self._epoch = epoch
        return int(self._order[offset])
