"""The frozen target as a teacher: its next-token distribution over the draft vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Teacher:
    """Where the teacher's logits come from.

    Attributes:
        hidden_PD: normalised last hidden states at the positions that predict.
        weight_VD: rows of its LM head for the draft vocabulary.
        softcap: bound of its logits (`final_logit_softcapping`), or None.
    """

    hidden_PD: torch.Tensor
    weight_VD: torch.Tensor
    softcap: float | None
