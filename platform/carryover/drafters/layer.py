"""One drafter layer over many blocks. Parameters are those of speculators' DFlash layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from speculators.models.dflash.model_definitions import Qwen3DFlashDecoderLayer

from carryover.drafters.attention import Chunk, block_attention
from carryover.drafters.blocks import Projected


@dataclass(frozen=True)
class Rope:
    """Cosines and sines of some rows' positions, each [..., 1, E]."""

    cos: torch.Tensor
    sin: torch.Tensor

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the positions to heads [..., heads, E]."""
        low, high = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-high, low), dim=-1) * self.sin


@dataclass(frozen=True)
class LayerInputs:
    """What every layer of one forward pass shares.

    Attributes:
        context_TD: fused committed states; None, like their positions, with `projected`.
        projected: each layer's keys and values of them, if they were made before.
        carried_ARD: fused carried rows, or None.
        context_rope, query_rope, own_rope: positions of the context, of the slots, and of a
            block's own rows (carried rows, then slots).
        chunks, own_closed_ASO: see `attention.py`.
    """

    context_TD: torch.Tensor | None
    projected: Sequence[Projected] | None
    carried_ARD: torch.Tensor | None
    context_rope: Rope | None
    query_rope: Rope
    own_rope: Rope
    chunks: Sequence[Chunk]
    own_closed_ASO: torch.Tensor | None


class BlockDecoderLayer(Qwen3DFlashDecoderLayer):
    """speculators' DFlash layer whose attention never sees more than a block's own rows."""

    def forward(self, hidden_ASD: torch.Tensor, inputs: LayerInputs) -> torch.Tensor:
        """Return the slots' hidden states after this layer, [A, S, D]."""
        hidden_ASD = hidden_ASD + self._attend(self.input_layernorm(hidden_ASD), inputs)
        return hidden_ASD + self.mlp(self.post_attention_layernorm(hidden_ASD))

    def project(self, context_TD: torch.Tensor, rope: Rope) -> Projected:
        """Keys and values of fused committed states."""
        attention = self.self_attn
        key_TKE = attention.k_norm(self._heads(attention.k_proj(context_TD)))
        return rope.rotate(key_TKE), self._heads(attention.v_proj(context_TD))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.self_attn.head_dim))

    def _attend(self, slots_ASD: torch.Tensor, inputs: LayerInputs) -> torch.Tensor:
        attention, heads = self.self_attn, self._heads
        if inputs.projected is None:
            key_TKE, value_TKE = self.project(inputs.context_TD, inputs.context_rope)
        else:
            key_TKE, value_TKE = inputs.projected[attention.layer_idx]
        own_AOD = slots_ASD
        if inputs.carried_ARD is not None:
            own_AOD = torch.cat((inputs.carried_ARD, slots_ASD), dim=1)
        query_ASHE = attention.q_norm(heads(attention.q_proj(slots_ASD)))
        own_key_AOKE = attention.k_norm(heads(attention.k_proj(own_AOD)))
        out_ASHE = block_attention(
            inputs.query_rope.rotate(query_ASHE),
            key_TKE,
            value_TKE,
            inputs.own_rope.rotate(own_key_AOKE),
            heads(attention.v_proj(own_AOD)),
            chunks=inputs.chunks,
            own_closed_ASO=inputs.own_closed_ASO,
        )
        return attention.o_proj(out_ASHE.flatten(-2))
