"""The optimizer and its learning-rate schedule, both plain functions of their settings.

The learning rate is a function of the step, not an object with state, so a resumed run has nothing
to restore and nothing to get wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from pydantic import Field
from torch import nn

from carryover.config import Config
from carryover.drafters.carried import MARKER

# Of the marker alone, which is then as large as a fused state after 25 steps.
_MARKER_ONLY_LR = 0.04


class OptimizerSettings(Config):
    """AdamW and its schedule."""

    lr: float = Field(6e-4, gt=0, description="Peak learning rate.")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's decay of the mean gradient.")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW's decay of the squared gradient.")
    weight_decay: float = Field(
        0.01, ge=0, description="Decay of matrices; norms and single vectors never decay."
    )
    warmup_ratio: float = Field(
        0.04, ge=0, lt=1, description="Share of the steps in which the rate rises from 0 to lr."
    )
    final_lr_ratio: float = Field(
        0.0, ge=0, le=1, description="The cosine ends at this share of lr."
    )
    clip_norm: float = Field(
        1.0, gt=0, description="Largest global gradient norm; a larger one is scaled down to it."
    )
    marker_lr_scale: float | None = Field(
        None,
        gt=0,
        description="The marker of carried rows learns so many times faster than the weights; "
        "null: as many as a fused state's entry is large (about 40), or it would stay too small "
        "to be seen.",
    )
    marker_only_steps: int = Field(
        50,
        ge=0,
        description="In its first so many steps Carryover training moves the marker alone, by a "
        "25th of a fused state's size each. A drafter takes carried rows, which it has never seen, "
        "for committed ones; a marker of that size tells them apart, and its weights need not "
        "learn from the harm. The control trains its weights in these steps too.",
    )
    max_skipped_steps: int = Field(
        10,
        ge=0,
        description="Steps with a non-finite loss or gradient that are skipped before giving up.",
    )


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]], settings: OptimizerSettings
) -> torch.optim.AdamW:
    """AdamW over the parameters that require a gradient.

    Adam moves every entry by about the rate, whatever its gradient. The marker is added to fused
    states, whose entries are a thousand times as large as a weight's.

    Args:
        named_parameters: of the drafter, wrapped or not.
        settings: rates and decay; a `marker_lr_scale` that is still null counts as 1.
    """
    trainable = [(name, p) for name, p in named_parameters if p.requires_grad]
    marker = [p for name, p in trainable if name.endswith(MARKER)]
    others = [p for name, p in trainable if not name.endswith(MARKER)]
    groups = [
        {"params": [p for p in others if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
        {"params": marker, "weight_decay": 0.0, "lr_scale": settings.marker_lr_scale or 1.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        foreach=True,
    )


def learning_rate(step: int, *, num_steps: int, settings: OptimizerSettings) -> float:
    """Rate of this step (from 0): linear warm-up to the peak, then half a cosine to the end."""
    warmup = math.ceil(settings.warmup_ratio * num_steps)
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    share = settings.final_lr_ratio + (1 - settings.final_lr_ratio) * (
        0.5 + 0.5 * math.cos(math.pi * progress)
    )
    return settings.lr * share


def set_learning_rate(
    optimizer: torch.optim.Optimizer, lr: float, *, marker_only: bool = False
) -> None:
    """Use this rate in the next step, and the marker its multiple.

    Args:
        optimizer: from `build_optimizer`.
        lr: from `learning_rate`.
        marker_only: if there is a marker, it moves at a rate of its own, and the weights stay.
    """
    alone = marker_only and any("lr_scale" in group for group in optimizer.param_groups)
    for group in optimizer.param_groups:
        if not alone:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        else:
            group["lr"] = _MARKER_ONLY_LR * group.get("lr_scale", 0.0)
