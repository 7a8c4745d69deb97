"""Sampled requests with speculation on vLLM's CPU build.

vLLM 0.32 spreads each request's temperature, top-k and top-p over its proposals with a kernel
that, on CPU, converts its output to int64 and writes into the copy. The verification of every
sampled request then divides by, and cuts at, whatever the memory held: answers are not distributed
as the target's, greedy requests of the same batch can change, and an absurd top-k ends the engine.
So does top-k in a step without proposals, where a maximum of nothing is taken.

This concerns every drafter on CPU, baseline ones included; without it no answer sampled at a
temperature above 0 could be trusted there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def spreading(original: Callable) -> Callable:
    """Wrap `expand_batch_to_tokens`: on CPU, in plain torch."""

    def expand_batch_to_tokens(
        x: torch.Tensor,
        cu_num_tokens: torch.Tensor,
        num_tokens: int,
        replace_from: int = 0,
        replace_to: int = 0,
    ) -> torch.Tensor:
        if x.device.type != "cpu":
            return original(x, cu_num_tokens, num_tokens, replace_from, replace_to)
        counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
        values = torch.where(x == replace_from, replace_to, x)
        return values.repeat_interleave(counts, output_size=num_tokens)

    return expand_batch_to_tokens


def leaving_nothing_alone(original: Callable) -> Callable:
    """Wrap `apply_top_k_only`: no rows, nothing to cut."""

    def apply_top_k_only(logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return original(logits, k) if logits.shape[0] else logits

    return apply_top_k_only
