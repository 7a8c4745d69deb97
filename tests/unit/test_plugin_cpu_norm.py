"""Context keys of every drafter layer get that layer's norm on the CPU build."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import rms_norm
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
from vllm.platforms import current_platform

from carryover.vllm_plugin import register

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="a fault of the CPU build")


@pytest.fixture(scope="module")
def drafter() -> SimpleNamespace:
    current_platform.import_kernels()
    return SimpleNamespace(
        _k_norm_weights=torch.tensor([1.0, 2.0, 5.0]).unsqueeze(1).expand(3, 32).contiguous(),
        _rms_norm_eps=1e-6,
    )


def test_each_layer_has_its_own_norm(drafter: SimpleNamespace) -> None:
    register()
    keys = torch.randn(3, 7, 2, 32)
    normed = DFlashQwen3Model._normalize_context_k(drafter, keys)
    for layer in range(3):
        weight = drafter._k_norm_weights[layer]
        torch.testing.assert_close(normed[layer], rms_norm(keys[layer], (32,), weight, 1e-6))


def test_upstream_still_needs_it(drafter: SimpleNamespace) -> None:
    """When this fails, vLLM has repaired its kernel, and the patch should go."""
    register()
    keys = torch.randn(3, 7, 2, 32)
    normed = DFlashQwen3Model._normalize_context_k.__wrapped__(drafter, keys)
    first = drafter._k_norm_weights[0]
    torch.testing.assert_close(normed[2], rms_norm(keys[2], (32,), first, 1e-6))
