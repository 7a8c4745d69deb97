"""The two drafting regimes, as subclasses of speculators' models with the same parameters.

Both regimes use blocks `[anchor, mask x B]`; slot k of 1..B predicts the token at
`anchor + k`. DFlash picks all B tokens at once; Markov adds to the logits of slot k a bias of
rank 256 that depends on the token of slot k - 1, and picks from left to right.

Embedding rows enter unscaled, also for targets (Gemma) that scale their own: that is what
speculators trains and what vLLM serves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from speculators.models.dflash import DFlashDraftModel
from speculators.models.dspark import DSparkDraftModel
from torch import nn

from carryover.drafters.attention import plan_chunks
from carryover.drafters.blocks import Blocks, Context
from carryover.drafters.carried import CarriedSettings, Projector
from carryover.drafters.layer import BlockDecoderLayer, LayerInputs, Rope
from carryover.drafters.teacher import Teacher
from carryover.errors import CheckpointError, ConfigError

Result = TypeVar("Result")


class BlockDrafter(nn.Module):
    """What both regimes share: the backbone over many blocks at once. Mixed into both classes.

    Attributes:
        carried_settings: the interface of a Carryover drafter; None for a baseline.
        teacher_softcap: bound of the target's logits, if it has one.
        target_identity: `Target.identity()` of the target that it was made for.
    """

    carried_settings: CarriedSettings | None = None
    teacher_softcap: float | None = None
    target_identity: dict[str, Any] | None = None

    def _make_decoder_layer(self, config, layer_idx: int) -> nn.Module:
        layer = BlockDecoderLayer(config.transformer_layer_config, layer_idx)
        if layer.self_attn.sliding_window is not None:
            raise CheckpointError(
                f"layer {layer_idx} of the drafter uses sliding-window attention, which is not "
                "supported; use a drafter whose layer_types are all 'full_attention'"
            )
        return layer

    @property
    def proposal_length(self) -> int:
        """B: tokens proposed per round."""
        return self.config.block_size - 1

    @property
    def draft_to_target(self) -> torch.Tensor | None:
        """Target token id of each draft token id, [V]; None if the vocabularies are the same."""
        if self.d2t is None:
            return None
        return torch.arange(self.d2t.shape[0], device=self.d2t.device) + self.d2t

    @property
    def target_to_draft(self) -> torch.Tensor | None:
        """Draft token id of each target token id, -1 where there is none; None as above."""
        if self.t2d is None:
            return None
        return torch.where(self.t2d, self.t2d.long().cumsum(0) - 1, -1)

    def teacher(self, last_hidden_TD: torch.Tensor, rows_P: torch.Tensor) -> Teacher:
        """The target's distribution after each of the given rows, over the draft vocabulary.

        Args:
            last_hidden_TD: input of the target's final norm.
            rows_P: rows of it; row t predicts the token at t + 1.
        """
        hidden_PD = self.verifier_norm(last_hidden_TD[rows_P])
        weight_VD = self.verifier_lm_head.weight
        return Teacher(hidden_PD.to(weight_VD.dtype), weight_VD, self.teacher_softcap)

    def markov_factors(self, previous_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The bias after each previous token as two factors, [N, R] and [V, R]; None for DFlash."""
        if self.markov_head is None:
            return None
        return self.markov_head.markov_w1(previous_N), self.markov_head.markov_w2.weight

    def logits(self, hidden_ND: torch.Tensor, previous_N: torch.Tensor) -> torch.Tensor:
        """Logits over the draft vocabulary, [N, V].

        Args:
            hidden_ND: slots after the final norm.
            previous_N: the token before each slot's; DFlash does not look at it.
        """
        weight_VD = self.lm_head.weight
        logits_NV = hidden_ND.to(weight_VD.dtype) @ weight_VD.T
        markov = self.markov_factors(previous_N)
        return logits_NV if markov is None else logits_NV + markov[0] @ markov[1].T

    def forward(
        self,
        context: Context,
        blocks: Blocks,
        head: Callable[[BlockDrafter, torch.Tensor], Result],
    ) -> Result:
        """Run the backbone over all blocks and hand the result to `head`.

        Everything that uses parameters happens inside this call, so that wrappers which gather
        parameters or gradients around `forward` (FSDP, DDP) see all of it.

        Args:
            context: committed target states.
            blocks: the anchors, and what each may attend to.
            head: called with the drafter and the hidden states after the final norm,
                [A, S, D]; slot 0 is the anchor and predicts nothing.

        Returns:
            What `head` returns.
        """
        return head(self, self._backbone(context, blocks))

    @torch.no_grad()
    def project(self, context: Context) -> Context:
        """The same context with each layer's keys and values of it, for many drafts.

        They belong to these weights, which must be whole (not sharded), and send no gradient.
        """
        context_TD = self._fuse(context)
        rope = self._rope(context.positions_T, context_TD)
        projected = [layer.project(context_TD, rope) for layer in self.layers]
        return replace(context, projected=projected)

    def _fuse(self, context: Context) -> torch.Tensor:
        return self.hidden_norm(self.fc(context.hidden_TC.to(self.fc.weight.dtype)))

    def add_carried_context(self, settings: CarriedSettings) -> None:
        """Turn a baseline drafter into a Carryover drafter that, so far, does the same.

        The marker starts at zero and the projector as the identity.

        Raises:
            ConfigError: the drafter has carried context already, or nothing is to be carried.
        """
        if self.carried_settings is not None:
            raise ConfigError(
                "the drafter has carried context already; start from a baseline checkpoint"
            )
        if settings.carried == "nothing":
            raise ConfigError("carried=nothing is a baseline drafter: leave carried context out")
        like = self.fc.weight
        if settings.mark == "embedding":
            self.carryover_marker = nn.Parameter(torch.zeros_like(like[:, 0]))
        elif settings.mark == "projector":
            size = settings.projector_size or self.hidden_size * 3 // 2
            settings = settings.model_copy(update={"projector_size": size})
            self.carryover_projector = Projector(self.hidden_size, size).to(like)
        self.carried_settings = settings

    def _mark(self, x: torch.Tensor) -> torch.Tensor:
        """Tell carried rows [..., D] from committed ones."""
        if self.carried_settings.mark == "embedding":
            return x + self.carryover_marker
        if self.carried_settings.mark == "projector":
            return self.carryover_projector(x)
        return x

    def _backbone(self, context: Context, blocks: Blocks) -> torch.Tensor:
        slots = self.config.block_size
        positions_AS = blocks.positions_A[:, None] + torch.arange(
            slots, device=blocks.positions_A.device
        )
        hidden_ASD = self._embed(blocks)
        query_rope = own_rope = self._rope(positions_AS, hidden_ASD)
        carried_ARD = own_closed_ASO = None
        # Without carried rows this is the baseline's computation, bit by bit.
        if blocks.carried is not None:
            fused_ARD = self.fc(blocks.carried.hidden_ARC.to(self.fc.weight.dtype))
            carried_ARD = self.hidden_norm(self._mark(fused_ARD))
            own_rope = self._rope(
                torch.cat((blocks.carried.positions_AR, positions_AS), dim=1), hidden_ASD
            )
            own_closed_ASO = torch.cat(
                (~blocks.carried.valid_AR, torch.zeros_like(positions_AS, dtype=torch.bool)), dim=1
            )[:, None]
        context_TD = context_rope = None
        if context.projected is None:
            context_TD = self._fuse(context)
            context_rope = self._rope(context.positions_T, hidden_ASD)
        inputs = LayerInputs(
            context_TD=context_TD,
            projected=context.projected,
            carried_ARD=carried_ARD,
            context_rope=context_rope,
            query_rope=query_rope,
            own_rope=own_rope,
            chunks=plan_chunks(
                blocks.starts_A.tolist(),
                blocks.ends_A.tolist(),
                queries_per_block=slots * self.config.transformer_layer_config.num_attention_heads,
                device=hidden_ASD.device,
            ),
            own_closed_ASO=own_closed_ASO,
        )
        for layer in self.layers:
            hidden_ASD = layer(hidden_ASD, inputs)
        return self.norm(hidden_ASD)

    def _embed(self, blocks: Blocks) -> torch.Tensor:
        """Input of the first layer, [A, S, D]: anchor, masks, and carried tokens if any."""
        tokens_AS = blocks.tokens_A[:, None].repeat(1, self.config.block_size)
        tokens_AS[:, 1:] = self.mask_token_id
        if blocks.hints_AS is None:
            return self.embed_tokens(tokens_AS)
        hinted_AS = blocks.hints_AS >= 0
        hidden_ASD = self.embed_tokens(torch.where(hinted_AS, blocks.hints_AS, tokens_AS))
        return torch.where(hinted_AS[..., None], self._mark(hidden_ASD), hidden_ASD)

    def _rope(self, positions: torch.Tensor, like: torch.Tensor) -> Rope:
        cos, sin = self.rotary_emb(like, positions.reshape(1, -1))
        shape = (*positions.shape, 1, cos.shape[-1])
        return Rope(cos.view(shape), sin.view(shape))


class DFlashDrafter(BlockDrafter, DFlashDraftModel):
    """Predicts all tokens of a block in one parallel pass."""

    markov_head = None


class MarkovDrafter(BlockDrafter, DSparkDraftModel):
    """The same backbone with a first-order correction head; picks tokens left to right."""


DRAFTERS = {"dflash": DFlashDrafter, "markov": MarkovDrafter}
