"""Batches as vLLM's runners hand them to the drafter, for tests of the row arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from carryover.vllm_plugin.rows import Carried, find_carried, place_context, place_queries


@dataclass
class Request:
    """A request in the middle of generation, as the runner hands it to the drafter."""

    committed: int
    verified: int
    rejected: int


@dataclass
class Scene:
    """A batch with vLLM's own buffers before carried rows are placed."""

    requests: list[Request]
    num_query: int
    max_model_len: int
    block_size: int

    def __post_init__(self) -> None:
        self.starts = [0]
        positions: list[int] = []
        for request in self.requests:
            end = request.committed + request.rejected
            positions += range(end - request.verified, end)
            self.starts.append(len(positions))
        self.positions = torch.tensor(positions)
        self.query_start = torch.tensor(self.starts, dtype=torch.int32)
        self.rejected = torch.tensor([r.rejected for r in self.requests], dtype=torch.int32)
        width = -(-self.max_model_len // self.block_size)
        # Blocks are dealt out backwards, so that slots do not follow positions by accident.
        numbers = torch.arange(width * len(self.requests), 0, -1, dtype=torch.int32)
        self.table = numbers.view(len(self.requests), width)
        self.context_positions = self.positions.clone()
        self.context_slots = torch.tensor(
            [
                self.slot(number, position)
                for number, request in enumerate(self.requests)
                for position in self.row_positions(request)
            ]
        )
        self.query_slots = torch.tensor(
            [
                self.slot(number, min(request.committed + k, self.max_model_len - 1))
                for number, request in enumerate(self.requests)
                for k in range(self.num_query)
            ]
        )
        self.seq_lens = torch.tensor(
            [min(r.committed + self.num_query, self.max_model_len) for r in self.requests],
            dtype=torch.int32,
        )

    def row_positions(self, request: Request) -> range:
        end = request.committed + request.rejected
        return range(end - request.verified, end)

    def slot(self, number: int, index: int) -> int:
        block = int(self.table[number, index // self.block_size])
        return block * self.block_size + index % self.block_size

    def owner(self, slot: int) -> tuple[int, int]:
        """Which request a slot belongs to, and at what place of its sequence."""
        places = (self.table == slot // self.block_size).nonzero()
        assert len(places) == 1, f"slot {slot} is in no block of the table"
        number, block = places[0].tolist()
        return number, block * self.block_size + slot % self.block_size

    def place(self) -> None:
        carried = self.find()
        table = {"block_table_RN": self.table, "block_size": self.block_size}
        place_context(
            carried,
            positions_T=self.positions,
            context_positions_T=self.context_positions,
            context_slots_T=self.context_slots,
            **table,
        )
        place_queries(
            carried,
            num_query=self.num_query,
            max_model_len=self.max_model_len,
            query_slots_Q=self.query_slots,
            seq_lens_R=self.seq_lens,
            **table,
        )

    def find(self) -> Carried:
        return find_carried(
            positions_T=self.positions, query_start_R1=self.query_start,
            num_rejected_R=self.rejected, num_query=self.num_query,
            max_model_len=self.max_model_len,
        )  # fmt: skip


@st.composite
def scenes(draw: st.DrawFn, *, room: bool | None = None) -> Scene:
    """Batches of prefills, decodes and anything between, near and far from the longest length."""
    proposals = draw(st.integers(1, 9))
    max_model_len = draw(st.integers(4 * proposals + 8, 90))
    requests = []
    for _ in range(draw(st.integers(1, 6))):
        rejected = draw(st.integers(0, proposals))
        last = max_model_len - rejected
        if room:
            last -= proposals + 1
        committed = draw(st.integers(1, max(1, last)))
        # At least one verified row is accepted: the anchor of the round before.
        verified = rejected + draw(st.integers(1, committed))
        requests.append(Request(committed, verified, rejected))
    return Scene(requests, proposals + 1, max_model_len, draw(st.sampled_from([1, 4, 16, 128])))
