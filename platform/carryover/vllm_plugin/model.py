"""Drafter models with a marker, for vLLM.

H: the drafter's hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM

from carryover.vllm_plugin.reading import UnsupportedCheckpoint

MARKER = "carryover_marker"


class _HasMarker(nn.Module):
    """Adds the marker [H], which tells carried rows from committed rows, to a stock drafter."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        # NaN until loaded: a missing tensor cannot pass for a trained one. Without a mark, zero.
        initial = 0.0 if self.config.carryover["mark"] == "none" else float("nan")
        self.carryover_marker = nn.Parameter(
            torch.full((self.config.hidden_size,), initial), requires_grad=False
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the stock drafter's weights and the marker.

        Raises:
            UnsupportedCheckpoint: the marker is missing, has the wrong size, or is not finite.
        """

        def others() -> Iterable[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                if name == MARKER:
                    self._set_marker(tensor)
                else:
                    yield name, tensor

        super().load_weights(others())
        if not torch.isfinite(self.carryover_marker).all():
            raise UnsupportedCheckpoint(
                f"the checkpoint declares a carryover section, and its tensor {MARKER} is missing "
                "or not finite; save it again, or remove the section to serve it as a baseline"
            )

    def _set_marker(self, tensor: torch.Tensor) -> None:
        if tensor.shape != self.carryover_marker.shape:
            raise UnsupportedCheckpoint(
                f"{MARKER} has shape {list(tensor.shape)}, expected "
                f"{list(self.carryover_marker.shape)}: the drafter's hidden size"
            )
        self.carryover_marker.data.copy_(tensor)


class CarryoverDFlashForCausalLM(_HasMarker, DFlashQwen3ForCausalLM):
    """A DFlash drafter with a marker."""


class CarryoverMarkovForCausalLM(_HasMarker, Qwen3DSparkForCausalLM):
    """A DFlash backbone with a first-order correction head and a marker."""
