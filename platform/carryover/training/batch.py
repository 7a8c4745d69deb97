"""One packed training sequence with the frozen target's states. Shapes: see drafters/blocks.py."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from carryover.drafters.blocks import Context

if TYPE_CHECKING:
    from carryover.training.verification import Prefix


@dataclass(frozen=True)
class Batch:
    """Documents (prompt and response) one after another in a single row of T tokens.

    Attributes:
        input_ids_T: token ids.
        position_ids_T: position of each token in its own document, from 0.
        document_ids_T: ascending from 0, one id for each document; -1 marks padding at the end.
        response_mask_T: true where the target wrote the token (labels and anchors lie there).
        hidden_TC: the selected target layers' states, concatenated; id i is transformers'
            `hidden_states[i]`.
        last_hidden_TD: input of the target's final norm (the teacher); may be None if the loss
            uses recorded tokens alone.
        prefix: the target's keys and values of these rows, where the pass that made the states
            kept them; saves `carryover_step` a second pass.
    """

    input_ids_T: torch.Tensor
    position_ids_T: torch.Tensor
    document_ids_T: torch.Tensor
    response_mask_T: torch.Tensor
    hidden_TC: torch.Tensor
    last_hidden_TD: torch.Tensor | None
    prefix: Prefix | None = None

    def __len__(self) -> int:
        return self.input_ids_T.shape[0]

    @property
    def context(self) -> Context:
        """The committed states that blocks look at."""
        return Context(hidden_TC=self.hidden_TC, positions_T=self.position_ids_T)

    def to(self, device: torch.device | str) -> Batch:
        """Copy to a device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return Batch(**{name: _to(value, device) for name, value in values.items()})


def _to(value: torch.Tensor | Prefix | None, device: torch.device | str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    return None if value is None else value.to(device)
