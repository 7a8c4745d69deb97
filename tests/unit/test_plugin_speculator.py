"""The V2 speculator's steps without a GPU: stock `propose` around our overrides.

vLLM's input kernel is replaced by a plain loop, its CUDA graph by a function that is recorded once
and replayed, its drafter by one that looks at the buffers when it would run. Everything between is
vLLM's own code and ours, with our kernels in Triton's interpreter.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plugin_scenes import Request, Scene
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.spec_decode.dflash import speculator as stock

pytest.importorskip("triton")
LENGTH, MAX_MODEL_LEN, BLOCK_SIZE, MAX_REQUESTS, PAD = 4, 64, 16, 4, -1
WIDTH = LENGTH + 1
MARKER = torch.tensor([100.0, 200.0])


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> Iterator[None]:
    from carryover.vllm_plugin import kernels

    os.environ["TRITON_INTERPRET"] = "1"
    importlib.reload(kernels)
    yield
    del os.environ["TRITON_INTERPRET"]
    importlib.reload(kernels)


class Drafter:
    """Sees what attention would see at the moment it runs."""

    carryover_marker = MARKER

    def __init__(self) -> None:
        self.written: dict[int, tuple[int, float]] = {}

    def combine_hidden_states(self, states: torch.Tensor) -> torch.Tensor:
        return states.clone()

    def precompute_and_store_context_kv(self, states: Any, positions: Any, slots: Any) -> None:
        for state, position, slot in zip(states, positions, slots, strict=True):
            if slot != PAD:
                self.written[int(slot)] = (int(position), float(state[0]))


def stock_inputs(*args: Any) -> None:
    """What vLLM's own kernel writes: rejected rows are padding, the block follows the committed."""
    buffers, query_slots, context_positions, context_slots = args[:4]
    batch, num_rejected, table = args[9], args[11], args[16]
    query_slots.fill_(PAD)
    buffers.seq_lens.zero_()
    for request in range(batch.num_reqs):
        start, end = batch.query_start_loc[request : request + 2].tolist()
        valid = end - int(num_rejected[request])
        context_positions[start:end] = 0
        context_slots[start:end] = PAD
        for row in range(start, valid):
            position = int(batch.positions[row])
            context_positions[row] = position
            context_slots[row] = slot_of(table, request, position)
        committed = int(batch.positions[valid - 1]) + 1
        for k in range(WIDTH):
            position = min(committed + k, MAX_MODEL_LEN - 1)
            buffers.positions[request * WIDTH + k] = position
            query_slots[request * WIDTH + k] = slot_of(table, request, position)
        buffers.seq_lens[request] = min(committed + WIDTH, MAX_MODEL_LEN)


def slot_of(table: torch.Tensor, request: int, place: int) -> int:
    return int(table[request, place // BLOCK_SIZE]) * BLOCK_SIZE + place % BLOCK_SIZE


class Graphs:
    """A CUDA graph manager that records a function for all requests and replays it."""

    def __init__(self, full: bool) -> None:
        self.full = full
        self.replay: Callable[[], None] | None = None

    def run_fullgraph(self, _: Any) -> None:
        self.replay()


def make(monkeypatch: pytest.MonkeyPatch, *, full: bool) -> Any:
    from carryover.vllm_plugin.kernels import CarriedBuffers
    from carryover.vllm_plugin.speculator import CarryoverDFlashSpeculator

    monkeypatch.setattr(stock, "prepare_dflash_inputs", stock_inputs)
    monkeypatch.setattr(stock, "build_slot_mappings_by_layer", lambda *_: {})
    monkeypatch.setattr(
        stock,
        "dispatch_cg_and_sync_dp",
        lambda manager, num_reqs, num_tokens, **_: (
            SimpleNamespace(
                num_tokens=MAX_REQUESTS * WIDTH if manager.full else num_tokens,
                num_reqs=MAX_REQUESTS if manager.full else num_reqs,
                cg_mode=CUDAGraphMode.FULL if manager.full else CUDAGraphMode.NONE,
            ),
            None,
        ),
    )
    one = object.__new__(CarryoverDFlashSpeculator)
    rows = 128
    scene = Scene([Request(1, 1, 0)] * MAX_REQUESTS, WIDTH, MAX_MODEL_LEN, BLOCK_SIZE)
    one.__dict__.update(
        num_query_per_req=WIDTH, num_speculative_steps=LENGTH, max_model_len=MAX_MODEL_LEN,
        max_num_reqs=MAX_REQUESTS, max_num_tokens=rows, model=Drafter(), pcp_manager=None,
        hidden_states=torch.zeros(rows, 2), draft_kv_cache_group_id=0,
        draft_kv_cache_group_ids=[0], _layer_group_idx=None, _group_causal=False, dcp_size=1,
        dp_size=1, dp_rank=0, sample_from_anchor=False, parallel_drafting_token_id=7,
        context_positions=torch.zeros(rows, dtype=torch.long),
        _context_slot_mappings=torch.zeros(1, rows, dtype=torch.long),
        sample_indices=None, sample_pos=None, sample_idx_mapping=None, temperature=None,
        seeds=None, eplb_state=None, kv_cache_config=None, supports_decode_metadata_update=True,
        draft_tokens=torch.zeros(MAX_REQUESTS, LENGTH, dtype=torch.long),
        input_buffers=SimpleNamespace(
            positions=torch.zeros(rows, dtype=torch.long),
            seq_lens=torch.zeros(MAX_REQUESTS, dtype=torch.int32),
        ),
        block_tables=SimpleNamespace(
            slot_mappings=torch.zeros(1, rows, dtype=torch.long), input_block_tables=[scene.table],
            block_sizes=[BLOCK_SIZE], cp_rank=0, cp_interleave=1, cp_size=1,
        ),
        query_cudagraph_manager=Graphs(full), attn_groups=[],
        _carried=CarriedBuffers(MAX_REQUESTS, torch.device("cpu")), _num_requests=0,
    )  # fmt: skip
    one.seen = []
    monkeypatch.setattr(one, "_generate_draft", lambda *_, **__: look(one), raising=False)
    # Builders are handed the live buffer; what counts is what it holds when attention runs.
    monkeypatch.setattr(
        stock.DraftModelSpeculator, "_build_uniform_attn_metadata", lambda *_, **__: {}
    )
    if full:

        def replay() -> None:
            one._prepare_graph_forward(MAX_REQUESTS, {})
            look(one)

        one.query_cudagraph_manager.replay = replay
    return one


def look(one: Any) -> None:
    """Keep what the drafter would attend to: per request, (position, state) of each place."""
    table, slots = one.block_tables.input_block_tables[0], one.block_tables.slot_mappings[0]
    batch = []
    for request in range(one.requests_in_batch):
        cache = dict(one.model.written)
        for k in range(WIDTH):
            index = request * WIDTH + k
            position = int(one.input_buffers.positions[index])
            cache[int(slots[index])] = (position, "block")
        length = int(one.input_buffers.seq_lens[request])
        batch.append([cache.get(slot_of(table, request, place)) for place in range(length)])
    one.seen.append(batch)


def propose(one: Any, requests: list[Request]) -> list[list[tuple]]:
    scene = Scene(requests, WIDTH, MAX_MODEL_LEN, BLOCK_SIZE)
    lengths = torch.tensor([r.committed + r.rejected for r in requests])
    batch = SimpleNamespace(
        num_reqs=len(requests), num_tokens=len(scene.positions), positions=scene.positions,
        query_start_loc=scene.query_start, seq_lens_cpu_upper_bound=lengths, idx_mapping=None,
        num_scheduled_tokens=None,
    )  # fmt: skip
    one.requests_in_batch = len(requests)
    # A state tells the position it was made at; the marker then tells carried from committed.
    states = scene.positions.float().unsqueeze(1).expand(-1, 2)
    one.propose(batch, {}, {}, states, [states], None, scene.rejected, None, None, None, None)
    return one.seen[-1]


def expected(request: Request, committed_before: int) -> list[tuple]:
    n, r = request.committed, request.rejected
    return [
        *((p, float(p)) for p in range(committed_before, n)),
        *((p, p + 100.0) for p in range(n, n + r)),
        *((n + k, "block") for k in range(WIDTH)),
    ]


@pytest.mark.parametrize("full", [False, True], ids=["eager", "graph"])
def test_the_drafter_sees_committed_carried_and_block(
    monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    one = make(monkeypatch, full=full)
    prefill = [Request(committed=20, verified=20, rejected=0), Request(9, 9, 0)]
    seen = propose(one, prefill)
    assert seen == [expected(request, 0) for request in prefill]

    verify = [Request(committed=22, verified=5, rejected=3), Request(14, 5, 0)]
    seen = propose(one, verify)
    assert seen[0] == [*((p, float(p)) for p in range(20)), *expected(verify[0], 20)]
    assert seen[1] == [*((p, float(p)) for p in range(9)), *expected(verify[1], 9)]

    # One round later the carried rows are gone, overwritten by what was committed and rejected.
    again = [Request(committed=23, verified=5, rejected=4), Request(15, 5, 4)]
    seen = propose(one, again)
    assert seen[0] == [*((p, float(p)) for p in range(22)), *expected(again[0], 22)]
    assert seen[1] == [*((p, float(p)) for p in range(14)), *expected(again[1], 14)]


@pytest.mark.parametrize("full", [False, True], ids=["eager", "graph"])
def test_a_smaller_batch_after_a_larger_one(monkeypatch: pytest.MonkeyPatch, full: bool) -> None:
    """Requests that pad a graph must not write, whatever the last batch carried in their place."""
    one = make(monkeypatch, full=full)
    propose(one, [Request(9, 9, 0)] * 3)
    propose(one, [Request(10, 5, 4)] * 3)
    seen = propose(one, [Request(11, 5, 4)])
    assert seen[0][-WIDTH - 4 :] == expected(Request(11, 5, 4), 11)
    assert (one.block_tables.slot_mappings[0, WIDTH:] == PAD).all()
    assert not one.input_buffers.seq_lens[1:].any()


@pytest.mark.parametrize("full", [False, True], ids=["eager", "graph"])
def test_near_the_longest_sequence_fewer_rows_are_carried(
    monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    one = make(monkeypatch, full=full)
    propose(one, [Request(57, 57, 0)])
    (seen,) = propose(one, [Request(committed=58, verified=4, rejected=3)])
    assert len(seen) == MAX_MODEL_LEN
    assert seen[58:] == [(58, 158.0), *((58 + k, "block") for k in range(WIDTH))]


def test_stock_classes_are_kept_for_everything_else() -> None:
    from carryover.vllm_plugin import speculator

    baseline = SimpleNamespace(speculative_config=SimpleNamespace(draft_model_config=None))
    hf_config = SimpleNamespace(carryover={})
    ours = SimpleNamespace(
        speculative_config=SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=hf_config))
    )
    for stock_class, expected_class in (
        (speculator.DFlashSpeculator, speculator.CarryoverDFlashSpeculator),
        (speculator.DSparkSpeculator, speculator.CarryoverMarkovSpeculator),
    ):
        assert speculator.speculator_class(stock_class, baseline) is stock_class
        assert speculator.speculator_class(stock_class, ours) is expected_class
