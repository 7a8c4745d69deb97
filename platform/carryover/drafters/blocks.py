"""What a drafter reads: committed target states, and the blocks that look at parts of them.

Shape legend, used throughout the package:
    T  committed rows, documents or requests one after another
    A  anchors, one block each          S  slots of a block: the anchor and B masks
    B  proposal length                  R  carried rows of a block, at most B
    C  concatenated target layers       D  hidden size
    H  query heads   K  key/value heads   E  head size   V  (draft) vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Keys and values of the context in one drafter layer, each [T, K, E], RoPE applied.
Projected = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Context:
    """Committed target states.

    Attributes:
        hidden_TC: the selected target layers' states, concatenated.
        positions_T: position of each row in its own document (RoPE).
        projected: what each drafter layer makes of it (`BlockDrafter.project`), to be read by
            many drafts with the same weights.
    """

    hidden_TC: torch.Tensor
    positions_T: torch.Tensor
    projected: Sequence[Projected] | None = None


@dataclass(frozen=True)
class Carried:
    """Target states of the last round's rejected proposals, one set for each block.

    Attributes:
        hidden_ARC: the selected target layers' states, concatenated.
        positions_AR: the positions that the rejected proposals had (RoPE).
        valid_AR: which rows exist; the rest of a block's R rows is padding.
    """

    hidden_ARC: torch.Tensor
    positions_AR: torch.Tensor
    valid_AR: torch.Tensor


@dataclass(frozen=True)
class Blocks:
    """One block for each anchor, with the rows that it may attend to.

    Attributes:
        tokens_A: the anchor tokens.
        positions_A: their positions (RoPE); slot k of the block is at `positions_A + k`.
        starts_A, ends_A: the block attends to the context rows `starts <= row < ends`.
        carried: rows that only the block itself sees.
        hints_AS: carried tokens, which replace the mask at their slots; -1 where there is none.
    """

    tokens_A: torch.Tensor
    positions_A: torch.Tensor
    starts_A: torch.Tensor
    ends_A: torch.Tensor
    carried: Carried | None = None
    hints_AS: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.tokens_A.shape[0]
