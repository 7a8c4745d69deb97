"""Sampling settings of proposals on the CPU build."""

from __future__ import annotations

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops import topk_topp_sampler

from carryover.vllm_plugin import register

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="a fault of the CPU build")


@pytest.fixture(scope="module", autouse=True)
def plugin() -> None:
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    register()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (torch.tensor([0.5, 0.0, 1.5]), torch.tensor([0.5, 0.5, 1.0, 1.5])),
        (torch.tensor([4, 0, 7], dtype=torch.int32), torch.tensor([4, 4, 1, 7], dtype=torch.int32)),
    ],
    ids=["temperature", "top-k"],
)
def test_each_proposal_gets_its_requests_value(
    values: torch.Tensor, expected: torch.Tensor
) -> None:
    ends = torch.tensor([2, 3, 4], dtype=torch.int32)
    spread = rejection_sampler.expand_batch_to_tokens(values, ends, 4, replace_to=1)
    torch.testing.assert_close(spread, expected)


def test_requests_without_proposals_take_no_place() -> None:
    ends = torch.tensor([0, 2, 2], dtype=torch.int32)
    spread = rejection_sampler.expand_batch_to_tokens(torch.tensor([0.1, 0.2, 0.3]), ends, 2)
    torch.testing.assert_close(spread, torch.tensor([0.2, 0.2]))


def test_top_k_of_nothing_is_nothing() -> None:
    """A step in which no request has proposals, as the first of every prompt."""
    cut = topk_topp_sampler.apply_top_k_only(torch.empty(0, 9), torch.empty(0, dtype=torch.int32))
    assert cut.shape == (0, 9)
    cut = topk_topp_sampler.apply_top_k_only(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([2]))
    assert cut.tolist() == [[-torch.inf, 3.0, 2.0]]


def test_upstream_still_needs_it() -> None:
    """When this fails, vLLM has repaired its kernel, and the patch should go."""
    upstream = rejection_sampler.expand_batch_to_tokens.__wrapped__
    ends = torch.tensor([64], dtype=torch.int32)
    values = torch.tensor([123456], dtype=torch.int32)
    assert not (upstream(values, ends, 64) == 123456).all()
    with pytest.raises(RuntimeError):
        topk_topp_sampler.apply_top_k_only.__wrapped__(
            torch.empty(0, 9), torch.empty(0, dtype=torch.int32)
        )
