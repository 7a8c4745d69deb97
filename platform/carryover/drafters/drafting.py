"""Picking proposals from a drafter's hidden states, without holding all logits at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from carryover.drafters.blocks import Blocks, Context
from carryover.drafters.models import BlockDrafter

# Logits held at a time, in elements: 64 MiB of float32.
MAX_LOGITS = 16 << 20


@torch.no_grad()
def draft(drafter: nn.Module, context: Context, blocks: Blocks) -> torch.Tensor:
    """Propose greedily at every anchor at once.

    Args:
        drafter: a drafter, wrapped (DDP, FSDP) or not.
        context: committed target states.
        blocks: the anchors.

    Returns:
        Target token ids, [A, B].
    """

    def best(logits_MV: torch.Tensor) -> torch.Tensor:
        return logits_MV.argmax(-1)

    return drafter(context, blocks, partial(_pick, anchors_A=blocks.tokens_A, choose=best))


@torch.no_grad()
def draft_sampled(
    drafter: nn.Module,
    context: Context,
    blocks: Blocks,
    *,
    temperature: float,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw proposals from the drafter's distribution, for few anchors and small vocabularies.

    Args:
        drafter: a drafter.
        context: committed target states.
        blocks: the anchors.
        temperature: of the drafter, above 0.
        generator: of the draws.

    Returns:
        Target token ids [A, B], and the distributions they were drawn from over the target's
        vocabulary [A, B, V].
    """
    drawn_from: list[torch.Tensor] = []

    def draw(logits_AV: torch.Tensor) -> torch.Tensor:
        probs_AV = (logits_AV.float() / temperature).softmax(-1)
        drawn_from.append(probs_AV)
        return torch.multinomial(probs_AV, 1, generator=generator).squeeze(1)

    head = partial(
        _pick, anchors_A=blocks.tokens_A, choose=draw, blocks_at_once=max(1, len(blocks))
    )
    tokens_AB = drafter(context, blocks, head)
    probs_ABV = torch.stack(drawn_from, dim=1)
    draft_to_target = getattr(drafter, "module", drafter).draft_to_target
    if draft_to_target is not None:
        size = getattr(drafter, "module", drafter).verifier_vocab_size
        wide = probs_ABV.new_zeros(*probs_ABV.shape[:2], size)
        wide[..., draft_to_target] = probs_ABV
        probs_ABV = wide
    return tokens_AB, probs_ABV


def _pick(
    drafter: BlockDrafter,
    hidden_ASD: torch.Tensor,
    *,
    anchors_A: torch.Tensor,
    choose: Callable[[torch.Tensor], torch.Tensor],
    blocks_at_once: int | None = None,
) -> torch.Tensor:
    """Tokens of slots 1..B; for Markov, left to right with the previous token's bias."""
    weight_VD = drafter.lm_head.weight
    draft_to_target = drafter.draft_to_target
    if blocks_at_once is None:
        blocks_at_once = max(1, MAX_LOGITS // (drafter.proposal_length * weight_VD.shape[0]))
    picked = []
    for hidden_MBD, previous_M in zip(
        hidden_ASD[:, 1:].split(blocks_at_once), anchors_A.split(blocks_at_once), strict=True
    ):
        tokens = []
        # Flat: a product of three dimensions would copy the head once for each block.
        logits_MBV = (hidden_MBD.flatten(0, 1).to(weight_VD.dtype) @ weight_VD.T).unflatten(
            0, hidden_MBD.shape[:2]
        )
        for logits_MV in logits_MBV.unbind(1):
            markov = drafter.markov_factors(previous_M)
            if markov is not None:
                embedded_MR, weight_VR = markov
                logits_MV = logits_MV + embedded_MR @ weight_VR.T
            previous_M = choose(logits_MV)
            if draft_to_target is not None:
                previous_M = draft_to_target[previous_M]
            tokens.append(previous_M)
        picked.append(torch.stack(tokens, dim=1))
    return torch.cat(picked)
