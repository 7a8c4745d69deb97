"""The V2 runner's Triton kernels against the torch arithmetic, in Triton's interpreter."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from plugin_scenes import Request, Scene, scenes

from carryover.vllm_plugin.rows import mark_rows

pytest.importorskip("triton")
MARKER = torch.tensor([1.0, -2.0, 4.0])
MAX_REQUESTS = 8


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    """The kernels as the interpreter runs them: Triton decides when it decorates."""
    os.environ["TRITON_INTERPRET"] = "1"
    module = importlib.reload(importlib.import_module("carryover.vllm_plugin.kernels"))
    yield module
    del os.environ["TRITON_INTERPRET"]
    importlib.reload(module)


def find_and_mark(kernels: ModuleType, buffers: object, scene: Scene, hidden: torch.Tensor) -> None:
    kernels.find_and_mark(
        buffers, hidden_TH=hidden, marker_H=MARKER.to(hidden.dtype), positions_T=scene.positions,
        query_start_R1=scene.query_start, num_rejected_R=scene.rejected,
        num_requests=len(scene.requests), num_query=scene.num_query,
        max_model_len=scene.max_model_len,
    )  # fmt: skip


def place(kernels: ModuleType, buffers: object, scene: Scene, num_requests: int) -> None:
    kernels.place(
        buffers, num_requests=num_requests, block_table_RN=scene.table,
        block_size=scene.block_size, num_query=scene.num_query,
        max_model_len=scene.max_model_len, context_positions_T=scene.context_positions,
        context_slots_T=scene.context_slots, query_slots_Q=scene.query_slots,
        seq_lens_R=scene.seq_lens,
    )  # fmt: skip


def copy_of(scene: Scene) -> Scene:
    return Scene(scene.requests, scene.num_query, scene.max_model_len, scene.block_size)


ALL_SCENES = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@ALL_SCENES
@given(scene=scenes())
def test_kernels_do_what_the_torch_arithmetic_does(kernels: ModuleType, scene: Scene) -> None:
    expected = copy_of(scene)
    hidden = torch.randn(len(scene.positions), 3)
    marked = hidden.clone()
    carried = expected.find()
    mark_rows(marked, MARKER, carried)
    expected.place()

    buffers = kernels.CarriedBuffers(MAX_REQUESTS, torch.device("cpu"))
    find_and_mark(kernels, buffers, scene, hidden)
    assert torch.equal(hidden, marked)
    count = len(scene.requests)
    for name in ("committed", "first", "rejected", "kept"):
        found = getattr(buffers, f"{name}_M")[:count].long()
        assert torch.equal(found, getattr(carried, f"{name}_R")), name
    assert not buffers.kept_M[count:].any()

    place(kernels, buffers, scene, count)
    place(kernels, buffers, scene, count)
    moved = carried.kept_R > 0
    assert torch.equal(scene.seq_lens, expected.seq_lens)
    assert torch.equal(scene.query_slots, expected.query_slots)
    for number, request in enumerate(scene.requests):
        # Rejected rows of a request that carries nothing are vLLM's own business on V2.
        end = scene.starts[number + 1] - (0 if moved[number] else request.rejected)
        rows = slice(scene.starts[number], end)
        assert torch.equal(scene.context_slots[rows], expected.context_slots[rows])
        assert torch.equal(scene.context_positions[rows], expected.context_positions[rows])


def test_padding_requests_of_a_graph_change_nothing(kernels: ModuleType) -> None:
    """A graph for four requests replays for one; what the last batch left must not act."""
    full = Scene([Request(9, 4, 3) for _ in range(4)], 5, 64, 16)
    buffers = kernels.CarriedBuffers(4, torch.device("cpu"))
    find_and_mark(kernels, buffers, full, torch.zeros(len(full.positions), 3))
    assert buffers.kept_M.tolist() == [3, 3, 3, 3]

    one = Scene([Request(9, 4, 3)], 5, 64, 16)
    find_and_mark(kernels, buffers, one, torch.zeros(len(one.positions), 3))
    assert buffers.kept_M.tolist() == [3, 0, 0, 0]
    stale = copy_of(full)
    place(kernels, buffers, stale, 4)
    expected = copy_of(full)
    assert torch.equal(stale.query_slots[5:], expected.query_slots[5:])
    assert torch.equal(stale.seq_lens[1:], expected.seq_lens[1:])
    assert stale.seq_lens[0] == 9 + 3 + 5


def test_wide_states_are_marked_whole(kernels: ModuleType) -> None:
    """More than one block of columns, bfloat16, rows with a stride."""
    scene = Scene([Request(9, 4, 3), Request(4, 4, 0)], 5, 64, 16)
    width = 1030
    wide = torch.zeros(len(scene.positions), width + 6, dtype=torch.bfloat16)
    hidden = wide[:, :width]
    kernels.find_and_mark(
        kernels.CarriedBuffers(2, torch.device("cpu")), hidden_TH=hidden,
        marker_H=torch.arange(width).to(torch.bfloat16), positions_T=scene.positions,
        query_start_R1=scene.query_start, num_rejected_R=scene.rejected, num_requests=2,
        num_query=5, max_model_len=64,
    )  # fmt: skip
    expected = torch.zeros_like(wide)
    expected[1:4, :width] = torch.arange(width).to(torch.bfloat16)
    assert torch.equal(wide, expected)
