"""Carried context: what of a rejected round the next draft may see, and how it is marked.

The default is the method itself: the target's hidden states of the rejected proposals, fused
like committed states, with one learned embedding (the marker) added before `hidden_norm`. The
other choices are those of the interface ablation: tokens instead of states enter through the
embeddings of the mask slots at the same positions, and a projector replaces the marker.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn

from carryover.config import Config
from carryover.drafters.blocks import Carried
from carryover.errors import CheckpointError

FORMAT_VERSION = 1
MARKER = "carryover_marker"
PROJECTOR = "carryover_projector"


class CarriedSettings(Config):
    """The interface between a rejected round and the next draft."""

    carried: Literal["hidden_states", "target_tokens", "draft_tokens", "nothing"] = Field(
        default="hidden_states",
        description="states of the rejected rows; the tokens that the target predicts there; the "
        "rejected tokens themselves; or nothing",
    )
    mark: Literal["embedding", "none", "projector"] = Field(
        default="embedding",
        description="one learned vector is added to what is carried; nothing is; or it passes "
        "through a learned residual module",
    )
    projector_size: int | None = Field(
        default=None,
        ge=1,
        description="inner width of the projector; default: 1.5 times the hidden size "
        "(19.7M parameters for Qwen3-4B, as in the paper's ablation)",
    )

    @property
    def carries_tokens(self) -> bool:
        """Whether tokens are carried, in place of states."""
        return self.carried in ("target_tokens", "draft_tokens")


class Projector(nn.Module):
    """A residual two-layer module; the identity before training."""

    def __init__(self, hidden_size: int, inner_size: int) -> None:
        super().__init__()
        self.down_proj = nn.Linear(hidden_size, inner_size, bias=False)
        self.up_proj = nn.Linear(inner_size, hidden_size, bias=False)
        nn.init.normal_(self.down_proj.weight, std=hidden_size**-0.5)
        nn.init.zeros_(self.up_proj.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., D] to [..., D]."""
        return x + self.up_proj(nn.functional.silu(self.down_proj(x)))


def carry(
    settings: CarriedSettings,
    *,
    hidden_ABC: torch.Tensor | None,
    positions_A: torch.Tensor,
    proposals_AB: torch.Tensor,
    predictions_AB: torch.Tensor | None,
    accepted_A: torch.Tensor,
) -> dict[str, Carried | torch.Tensor]:
    """What a verified round leaves to the next draft, as fields of `Blocks`.

    Row j = 1..B of a round is the target's state at proposal j, at position `anchor + j`. Rows up
    to the accepted length `a` are committed; rows `a+1 .. B` are carried. The next anchor stands
    at `anchor + a + 1`, so its slot k meets proposal `a+1+k`, and the prediction of row `a+k`.

    Args:
        settings: what is carried.
        hidden_ABC: the target's states at the proposals; needed for `hidden_states` alone, and
            nothing is read of the rows up to the accepted length.
        positions_A: the anchors' positions in this round.
        proposals_AB: the proposals.
        predictions_AB: the target's most likely token after each proposal; needed for
            `target_tokens` alone.
        accepted_A: accepted lengths.
    """
    length = proposals_AB.shape[1]
    row_B = torch.arange(1, length + 1, device=proposals_AB.device)
    if not settings.carries_tokens:
        return {
            "carried": Carried(
                hidden_ARC=hidden_ABC,
                positions_AR=positions_A[:, None] + row_B,
                valid_AR=row_B > accepted_A[:, None],
            )
        }
    tokens_AB = proposals_AB if settings.carried == "draft_tokens" else predictions_AB
    first_A = accepted_A + 1 if settings.carried == "draft_tokens" else accepted_A
    rows_AB = first_A[:, None] + row_B
    tokens_AB = tokens_AB.gather(1, rows_AB.clamp(max=length) - 1)
    hints_AB = torch.where(rows_AB <= length, tokens_AB, -1)
    return {"hints_AS": torch.nn.functional.pad(hints_AB, (1, 0), value=-1)}


def config_section(settings: CarriedSettings, target_identity: dict[str, Any]) -> dict[str, Any]:
    """The `carryover` section of a checkpoint's config."""
    section = {
        "format_version": FORMAT_VERSION,
        "carried": settings.carried,
        "mark": settings.mark,
        "target": target_identity,
    }
    if settings.mark == "projector":
        section["projector_size"] = settings.projector_size
    return section


def read_section(section: dict[str, Any]) -> CarriedSettings:
    """Settings of a checkpoint's `carryover` section.

    Raises:
        CheckpointError: written by a newer version, or malformed.
    """
    if section.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"carryover.format_version is {section.get('format_version')!r} in the checkpoint's "
            f"config.json; this version reads {FORMAT_VERSION}: update carryover"
        )
    known = {name: section[name] for name in CarriedSettings.model_fields if name in section}
    try:
        return CarriedSettings(**known)
    except ValueError as error:
        raise CheckpointError(f"the checkpoint's carryover section is not valid: {error}") from None
