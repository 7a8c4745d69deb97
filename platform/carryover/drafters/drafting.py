"""Picking proposals from a drafter's hidden states, without holding all logits at once."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from carryover.drafters.blocks import Blocks, Context
from carryover.drafters.models import BlockDrafter

# Logits held at a time, in elements: 64 MiB of float32.
_MAX_LOGITS = 16 << 20


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
    return drafter(context, blocks, partial(_pick, anchors_A=blocks.tokens_A))


def _pick(
    drafter: BlockDrafter, hidden_ASD: torch.Tensor, *, anchors_A: torch.Tensor
) -> torch.Tensor:
    weight_VD = drafter.lm_head.weight
    draft_to_target = drafter.draft_to_target
    blocks_at_once = max(1, _MAX_LOGITS // (drafter.proposal_length * weight_VD.shape[0]))
    picked = []
    for hidden_MBD, previous_M in zip(
        hidden_ASD[:, 1:].split(blocks_at_once), anchors_A.split(blocks_at_once), strict=True
    ):
        logits_MBV = hidden_MBD.to(weight_VD.dtype) @ weight_VD.T
        if drafter.markov_head is None:
            tokens_MB = logits_MBV.argmax(-1)
            picked.append(tokens_MB if draft_to_target is None else draft_to_target[tokens_MB])
            continue
        tokens = []
        for logits_MV in logits_MBV.unbind(1):
            bias_MV = drafter.markov_head.markov_w2(drafter.markov_head.markov_w1(previous_M))
            previous_M = (logits_MV + bias_MV).argmax(-1)
            if draft_to_target is not None:
                previous_M = draft_to_target[previous_M]
            tokens.append(previous_M)
        picked.append(torch.stack(tokens, dim=1))
    return torch.cat(picked)
