"""The acceptance rule of speculative decoding, as pure functions.

Both rules leave the output exactly as the target alone would have made it: token for token at
temperature 0, in distribution above. Carried context plays no part here.

Shapes: A requests, B proposals each, V vocabulary. Row j of the target's B + 1 rows is its
distribution after the anchor and the first j proposals.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Acceptance:
    """Outcome of one round.

    Attributes:
        accepted_A: how many leading proposals pass, 0..B.
        next_A: the token after them: the correction, or with a = B the bonus.
    """

    accepted_A: torch.Tensor
    next_A: torch.Tensor


def accept_greedy(proposals_AB: torch.Tensor, target_logits_ARV: torch.Tensor) -> Acceptance:
    """Temperature 0: a proposal passes while it is the target's most likely token.

    Args:
        proposals_AB: proposed tokens.
        target_logits_ARV: the target's logits in R = B + 1 rows.
    """
    best_AR = target_logits_ARV.argmax(-1)
    accepted_A = _leading(proposals_AB == best_AR[:, :-1])
    return Acceptance(accepted_A, best_AR.gather(1, accepted_A[:, None]).squeeze(1))


def accept_sampled(
    proposals_AB: torch.Tensor,
    target_probs_ARV: torch.Tensor,
    draft_probs_ABV: torch.Tensor | None,
    *,
    generator: torch.Generator | None = None,
) -> Acceptance:
    """Temperature above 0: rejection sampling with residual correction.

    Proposal x passes with probability min(1, p(x) / q(x)); after the first that does not, the
    next token is drawn from the normalised residual max(p - q, 0), and after B that do, from p.

    Args:
        proposals_AB: proposed tokens.
        target_probs_ARV: p, in R = B + 1 rows, temperature applied.
        draft_probs_ABV: q that the proposals were drawn from; None if they were picked greedily,
            so that q is 1 at the proposal.
        generator: of the draws.
    """
    p_ABV = target_probs_ARV[:, :-1]
    picked_AB1 = proposals_AB[..., None]
    q_ABV = draft_probs_ABV
    if q_ABV is None:
        q_ABV = torch.zeros_like(p_ABV).scatter_(-1, picked_AB1, 1.0)
    ratio_AB = (p_ABV.gather(-1, picked_AB1) / q_ABV.gather(-1, picked_AB1)).squeeze(-1)
    draws_AB = torch.rand(
        proposals_AB.shape, generator=generator, dtype=ratio_AB.dtype, device=ratio_AB.device
    )
    accepted_A = _leading(draws_AB < ratio_AB)
    residual_ABV = (p_ABV - q_ABV).clamp(min=0)
    # Rounding can leave nothing where p equals q; p itself is then the residual's limit.
    empty_AB1 = residual_ABV.sum(-1, keepdim=True) <= 0
    residual_ABV = torch.where(empty_AB1, p_ABV, residual_ABV)
    rows_ARV = torch.cat((residual_ABV, target_probs_ARV[:, -1:]), dim=1)
    index_A11 = accepted_A[:, None, None].expand(-1, 1, rows_ARV.shape[-1])
    weights_AV = rows_ARV.gather(1, index_A11).squeeze(1)
    return Acceptance(accepted_A, torch.multinomial(weights_AV, 1, generator=generator).squeeze(1))


def _leading(passed_AB: torch.Tensor) -> torch.Tensor:
    """Number of proposals before the first that does not pass."""
    return passed_AB.long().cumprod(1).sum(1)
