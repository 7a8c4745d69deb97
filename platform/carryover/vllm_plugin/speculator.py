"""Drafting on vLLM's V2 model runner: carried rows for both regimes, CUDA graphs kept.

The stock speculator writes states, slots and lengths into buffers of its own, and replays a graph
that reads them. Here the states of carried rows are marked as soon as they are fused, and slots
and lengths are corrected before anything reads them: eagerly where the stock code is eager, and
inside the graph where it replays one.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

from carryover.vllm_plugin import kernels, reading


class _CarriesRows(DFlashSpeculator):
    """Keeps the rejected rows of the last verification as context of the next draft."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._carried = kernels.CarriedBuffers(self.max_num_reqs, device)
        self._num_requests = 0

    def prepare_context_anchor(self, input_batch: InputBatch, num_rejected: torch.Tensor) -> None:
        """Mark the carried rows; vLLM calls this when it has fused the target's states."""
        super().prepare_context_anchor(input_batch, num_rejected)
        self._num_requests = input_batch.num_reqs
        kernels.find_and_mark(
            self._carried,
            hidden_TH=self.hidden_states,
            marker_H=self.model.carryover_marker,
            positions_T=input_batch.positions,
            query_start_R1=input_batch.query_start_loc,
            num_rejected_R=num_rejected,
            num_requests=input_batch.num_reqs,
            num_query=self.num_query_per_req,
            max_model_len=self.max_model_len,
        )

    def capture(self) -> None:
        """Capture the graphs, on batches that carry nothing."""
        self._carried.clear()
        super().capture()

    def _prepare_graph_forward(self, num_reqs: int, attn_metadata: dict[str, Any] | None) -> None:
        self._num_requests = num_reqs
        super()._prepare_graph_forward(num_reqs, attn_metadata)

    def _precompute_context_kv(self, start: int, end: int, dummy_run: bool = False) -> None:
        if not dummy_run:
            self._place()
        super()._precompute_context_kv(start, end, dummy_run)

    def _build_uniform_attn_metadata(self, *args: Any, **kwargs: Any) -> dict[str, Any] | None:
        self._place()
        return super()._build_uniform_attn_metadata(*args, **kwargs)

    def _place(self) -> None:
        """Correct slots and lengths; repeating it changes nothing."""
        for row, group in enumerate(self.draft_kv_cache_group_ids):
            kernels.place(
                self._carried,
                num_requests=self._num_requests,
                block_table_RN=self.block_tables.input_block_tables[group],
                block_size=self.block_tables.block_sizes[group],
                num_query=self.num_query_per_req,
                max_model_len=self.max_model_len,
                context_positions_T=self.context_positions,
                context_slots_T=self._context_slot_mappings[row],
                query_slots_Q=self.block_tables.slot_mappings[group],
                seq_lens_R=self.input_buffers.seq_lens,
            )


class CarryoverDFlashSpeculator(_CarriesRows):
    """DFlash with carried rows."""


class CarryoverMarkovSpeculator(_CarriesRows, DSparkSpeculator):
    """Markov with carried rows; the head's left-to-right pick is stock vLLM's."""


_OURS = {
    DFlashSpeculator: CarryoverDFlashSpeculator,
    DSparkSpeculator: CarryoverMarkovSpeculator,
}


def speculator_class(
    stock: type[DFlashSpeculator], vllm_config: VllmConfig
) -> type[DFlashSpeculator]:
    """The class that drafts for this engine: `stock` unless the checkpoint is a Carryover one."""
    if reading.section_of(vllm_config.speculative_config) is None:
        return stock
    return _OURS.get(stock, stock)
