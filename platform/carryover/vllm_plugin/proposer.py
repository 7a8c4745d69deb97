"""Drafting on vLLM's V1 model runner: carried rows for both regimes, and the Markov head.

R: requests, B: proposal length, Q: query rows (R times B+1), T: verified rows, V: vocabulary,
H: hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.dflash import DFlashProposer

from carryover.vllm_plugin import reading
from carryover.vllm_plugin.rows import Carried, find_carried, mark_rows, place_queries
from carryover.vllm_plugin.validation import UnsupportedEngine


@dataclass(frozen=True)
class DraftRound:
    """One draft step of the whole batch, as tests see it.

    Attributes:
        request_ids: in batch order.
        drafting: per request, whether its prompt was complete, so that the proposals count.
        anchors_R: last committed token of each request.
        proposals_RB: proposed tokens.
        carried: rows carried into this draft; None if no request of the batch was verified.
        context_TH: fused states of all verified rows, carried ones marked; None likewise.
    """

    request_ids: list[str]
    drafting: list[bool]
    anchors_R: torch.Tensor
    proposals_RB: torch.Tensor
    carried: Carried | None
    context_TH: torch.Tensor | None


class _Observable(DFlashProposer):
    """A proposer that can show its rounds; costs one comparison when nobody looks."""

    observer: Callable[[DraftRound], None] | None = None

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner)
        self._runner = runner
        self._carried: Carried | None = None
        self._context_TH: torch.Tensor | None = None

    def validate_same_kv_cache_group(self, kv_cache_config: Any) -> None:
        """Check that vLLM put all drafter layers into one KV cache group, which V1 needs.

        Raises:
            UnsupportedEngine: it did not, as happens where the target mixes attention types.
        """
        try:
            super().validate_same_kv_cache_group(kv_cache_config)
        except AssertionError:
            raise UnsupportedEngine(
                "the target mixes full and sliding-window attention, and vLLM's V1 runner spread "
                "the drafter's layers over several KV cache groups; set "
                "disable_hybrid_kv_cache_manager to true, or use the V2 runner"
            ) from None

    def propose(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Draft for the batch: [R, B] token ids."""
        self._carried = self._context_TH = None
        proposals_RB = super().propose(*args, **kwargs)
        if self.observer is not None:
            self._show(proposals_RB)
        return proposals_RB

    def _anchors(self, num_requests: int) -> torch.Tensor:
        """The first row of each block holds the last committed token."""
        width = 1 + self.num_speculative_tokens
        return self.input_ids[: num_requests * width].view(num_requests, width)[:, 0]

    def _show(self, proposals_RB: torch.Tensor) -> None:
        num_requests = proposals_RB.shape[0]
        discarded = self._runner.discard_request_mask.np[:num_requests]
        self.observer(
            DraftRound(
                request_ids=list(self._runner.input_batch.req_ids[:num_requests]),
                drafting=[not flag for flag in discarded.tolist()],
                anchors_R=self._anchors(num_requests).clone(),
                proposals_RB=proposals_RB.clone(),
                carried=self._carried,
                context_TH=self._context_TH,
            )
        )


class _CarriesRows(_Observable):
    """Keeps the rejected rows of the last verification as context of the next draft."""

    def set_inputs_first_pass(
        self,
        target_token_ids: torch.Tensor,
        next_token_ids: torch.Tensor,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,
        token_indices_to_sample: torch.Tensor | None,
        cad: CommonAttentionMetadata,
        num_rejected_tokens_gpu: torch.Tensor | None,
    ) -> tuple[int, torch.Tensor, CommonAttentionMetadata]:
        """Prepare the draft pass as stock vLLM does, then let the rejected rows stay."""
        num_rows, sample_indices, draft = super().set_inputs_first_pass(
            target_token_ids, next_token_ids, target_positions, target_hidden_states,
            token_indices_to_sample, cad, num_rejected_tokens_gpu,
        )  # fmt: skip
        if num_rejected_tokens_gpu is None:
            return num_rows, sample_indices, draft
        block = {"num_query": draft.max_query_len, "max_model_len": self.max_model_len}
        carried = find_carried(
            positions_T=target_positions,
            query_start_R1=cad.query_start_loc,
            num_rejected_R=num_rejected_tokens_gpu,
            **block,
        )
        mark_rows(target_hidden_states, self.model.carryover_marker, carried)
        place_queries(
            carried,
            block_table_RN=cad.block_table_tensor,
            block_size=self.block_size,
            query_slots_Q=draft.slot_mapping,
            seq_lens_R=draft.seq_lens,
            **block,
        )
        self._carried = carried
        self._context_TH = target_hidden_states
        return num_rows, sample_indices, draft


class _PicksLeftToRight(_Observable):
    """The Markov regime: each slot's logits get a bias from the token picked before it."""

    def _sample_draft_tokens(
        self, hidden_states: torch.Tensor, sampling_metadata: SamplingMetadata
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Pick B tokens per request, one slot of all requests at a time.

        Args:
            hidden_states: backbone states of the mask slots [R*B, H], request by request.
            sampling_metadata: per request.

        Returns:
            Token ids [R*B], and draft probabilities [R*B, V] where drafting is probabilistic.
        """
        length = self.num_speculative_tokens
        logits_SV = self.model.compute_draft_logits(hidden_states)
        logits_RBV = logits_SV.view(-1, length, logits_SV.shape[-1])
        token_R = self._anchors(logits_RBV.shape[0])
        tokens, probabilities = [], []
        for slot in range(length):
            bias_RV = self.model.markov_bias(self.model.markov_embed(token_R))
            picked_R, probabilities_RV = self._sample_from_logits(
                logits_RBV[:, slot] + bias_RV, sampling_metadata
            )
            token_R = self.model.map_draft_to_target(picked_R)
            tokens.append(token_R)
            if probabilities_RV is not None:
                probabilities.append(self._in_target_vocabulary(probabilities_RV))
        tokens_S = torch.stack(tokens, dim=1).view(-1)
        if not probabilities:
            return tokens_S, None
        return tokens_S, torch.stack(probabilities, dim=1).flatten(0, 1)

    def _in_target_vocabulary(self, probabilities_RV: torch.Tensor) -> torch.Tensor:
        """Spread probabilities over a reduced draft vocabulary to the target's token ids."""
        offsets = self.model.draft_id_to_target_id
        if offsets is None:
            return probabilities_RV
        targets = torch.arange(offsets.shape[0], device=offsets.device) + offsets
        spread = probabilities_RV.new_zeros(probabilities_RV.shape[0], self.model.target_vocab_size)
        return spread.index_copy_(1, targets, probabilities_RV)


class CarryoverDFlashProposer(_CarriesRows):
    """DFlash with carried rows."""


class MarkovProposer(_PicksLeftToRight):
    """The Markov baseline, which stock vLLM refuses on this runner."""


class CarryoverMarkovProposer(_CarriesRows, _PicksLeftToRight):
    """Markov with carried rows."""


def proposer_class(stock: type[DFlashProposer], vllm_config: VllmConfig) -> type[DFlashProposer]:
    """The class that drafts for this engine: `stock` unless the checkpoint needs one of ours."""
    speculative = vllm_config.speculative_config
    if stock is not DFlashProposer:
        return stock
    carries = reading.section_of(speculative) is not None
    if reading.is_markov(speculative):
        return CarryoverMarkovProposer if carries else MarkovProposer
    return CarryoverDFlashProposer if carries else stock
