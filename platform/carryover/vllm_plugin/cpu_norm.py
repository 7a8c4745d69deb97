"""The drafter's key norm on vLLM's CPU build.

DFlash normalises the context keys of all drafter layers in one call, with one weight vector per
layer. vLLM 0.32's CPU kernel reads the first layer's vector for all of them, so that a trained
drafter of more than one layer proposes something else than on a GPU. The keys of each layer get
their own call here. This holds for baseline drafters too: were only Carryover drafters served as
trained, every comparison on CPU would be biased.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def layer_by_layer(original: Callable) -> Callable:
    """Wrap `DFlashQwen3Model._normalize_context_k`: one call per layer on CPU."""
    from vllm import _custom_ops as ops

    def _normalize_context_k(self: Any, all_k: torch.Tensor) -> torch.Tensor:
        if all_k.device.type != "cpu":
            return original(self, all_k)
        normed = torch.empty_like(all_k)
        for layer, weight in enumerate(self._k_norm_weights):
            ops.rms_norm(normed[layer], all_k[layer], weight, self._rms_norm_eps)
        return normed

    return _normalize_context_k
