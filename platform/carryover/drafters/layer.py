"""One drafter layer over many blocks. Parameters are those of speculators' DFlash layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from speculators.models.dflash.model_definitions import Qwen3DFlashDecoderLayer

from carryover.drafters.attention import Chunk, block_attention


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
        context_TD: fused committed states.
        carried_ARD: fused carried rows, or None.
        context_rope, query_rope, own_rope: positions of the context, of the slots, and of a
            block's own rows (carried rows, then slots).
        chunks, own_closed_ASO: see `attention.py`.
    """

    context_TD: torch.Tensor
    carried_ARD: torch.Tensor | None
    context_rope: Rope
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

    def _attend(self, slots_ASD: torch.Tensor, inputs: LayerInputs) -> torch.Tensor:
        attention = self.self_attn

        def heads(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(-1, (-1, attention.head_dim))

        own_AOD = slots_ASD
        if inputs.carried_ARD is not None:
            own_AOD = torch.cat((inputs.carried_ARD, slots_ASD), dim=1)
        query_ASHE = attention.q_norm(heads(attention.q_proj(slots_ASD)))
        key_TKE = attention.k_norm(heads(attention.k_proj(inputs.context_TD)))
        own_key_AOKE = attention.k_norm(heads(attention.k_proj(own_AOD)))
        out_ASHE = block_attention(
            inputs.query_rope.rotate(query_ASHE),
            inputs.context_rope.rotate(key_TKE),
            heads(attention.v_proj(inputs.context_TD)),
            inputs.own_rope.rotate(own_key_AOKE),
            heads(attention.v_proj(own_AOD)),
            chunks=inputs.chunks,
            own_closed_ASO=inputs.own_closed_ASO,
        )
        return attention.o_proj(out_ASHE.flatten(-2))
