"""What a drafter reads: committed target states, and the blocks that look at parts of them.

Shape legend, used throughout the package:
    T  committed rows, documents or requests one after another
    A  anchors, one block each          S  slots of a block: the anchor and B masks
    B  proposal length                  R  carried rows of a block, at most B
    C  concatenated target layers       D  hidden size
    H  query heads   K  key/value heads   E  head size   V  (draft) vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Context:
    """Committed target states.

    Attributes:
        hidden_TC: the selected target layers' states, concatenated.
        positions_T: position of each row in its own document (RoPE).
    """

    hidden_TC: torch.Tensor
    positions_T: torch.Tensor


@dataclass(frozen=True)
class Blocks:
    """One block for each anchor, with the committed rows it may attend to.

    Attributes:
        tokens_A: the anchor tokens.
        positions_A: their positions (RoPE); slot k of the block is at `positions_A + k`.
        starts_A, ends_A: the block attends to the context rows `starts <= row < ends`.
    """

    tokens_A: torch.Tensor
    positions_A: torch.Tensor
    starts_A: torch.Tensor
    ends_A: torch.Tensor

    def __len__(self) -> int:
        return self.tokens_A.shape[0]
