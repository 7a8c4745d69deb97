"""The acceptance rule: greedy by example, sampled in distribution."""

import pytest
import torch
from training_cases import generator

from carryover.decoding.acceptance import accept_greedy, accept_sampled

VOCAB, LENGTH, TRIALS = 5, 3, 60_000
# Upper 1e-4 quantiles of chi-square by degrees of freedom, tabulated.
CHI_SQUARE_LIMIT = {4: 23.51, 24: 58.61}


def distributions(rows, seed):
    return (1.5 * torch.randn(rows, VOCAB, generator=generator(seed))).softmax(-1)


def chi_square(observed, expected_probs):
    expected = expected_probs * observed.sum()
    return float(((observed - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("proposals", "accepted", "after"),
    [([1, 2, 3], 3, 4), ([1, 2, 0], 2, 3), ([0, 2, 3], 0, 1), ([1, 0, 3], 1, 2)],
)
def test_greedy(proposals, accepted, after):
    logits = torch.nn.functional.one_hot(torch.tensor([[1, 2, 3, 4]]), VOCAB).float()
    found = accept_greedy(torch.tensor([proposals]), logits)
    assert found.accepted_A.tolist() == [accepted] and found.next_A.tolist() == [after]


@pytest.mark.parametrize("sampled", [False, True])
def test_the_first_token_has_the_targets_distribution(sampled):
    """Whatever proposes: the token at the first position is a sample of p."""
    target = distributions(LENGTH + 1, 1)
    draft = distributions(LENGTH, 2)
    draws = generator(3)
    if sampled:
        proposals = torch.multinomial(draft, TRIALS, replacement=True, generator=draws).T
        q = draft.expand(TRIALS, -1, -1)
    else:
        proposals, q = draft.argmax(-1).expand(TRIALS, -1), None
    found = accept_sampled(proposals, target.expand(TRIALS, -1, -1), q, generator=draws)
    first = torch.where(found.accepted_A > 0, proposals[:, 0], found.next_A)
    assert 0 < (found.accepted_A > 0).sum() < TRIALS
    assert chi_square(torch.bincount(first, minlength=VOCAB), target[0]) < CHI_SQUARE_LIMIT[4]
    # And the second, where the first proposal passed: independent of it, from its own row.
    passed = found.accepted_A > 0
    second = torch.where(found.accepted_A > 1, proposals[:, 1], found.next_A)[passed]
    assert chi_square(torch.bincount(second, minlength=VOCAB), target[1]) < CHI_SQUARE_LIMIT[4]


def test_the_bonus_token_comes_from_the_last_row():
    target = distributions(LENGTH + 1, 4)
    sure = torch.nn.functional.one_hot(torch.tensor([0, 1, 2]), VOCAB).float()
    rows = torch.cat((sure, target[-1:])).expand(TRIALS, -1, -1)
    proposals = torch.tensor([0, 1, 2]).expand(TRIALS, -1)
    found = accept_sampled(proposals, rows, None, generator=generator(5))
    assert (found.accepted_A == LENGTH).all()
    counts = torch.bincount(found.next_A, minlength=VOCAB)
    assert chi_square(counts, target[-1]) < CHI_SQUARE_LIMIT[4]


def test_a_greedy_proposal_is_never_its_own_correction():
    target = distributions(2, 6)
    proposals = torch.full((TRIALS, 1), 2)
    found = accept_sampled(proposals, target.expand(TRIALS, -1, -1), None, generator=generator(7))
    rejected = found.accepted_A == 0
    assert rejected.any() and (found.next_A[rejected] != 2).all()


def test_equal_distributions_accept_everything():
    draft = distributions(LENGTH, 8)
    target = torch.cat((draft, draft[:1])).expand(TRIALS, -1, -1)
    proposals = torch.multinomial(draft, TRIALS, replacement=True, generator=generator(9)).T
    found = accept_sampled(proposals, target, draft.expand(TRIALS, -1, -1), generator=generator(1))
    assert (found.accepted_A == LENGTH).all()


def test_an_impossible_proposal_is_always_rejected():
    target = torch.tensor([[0.0, 0.5, 0.5, 0.0, 0.0], [0.2] * 5])
    found = accept_sampled(
        torch.zeros(TRIALS, 1, dtype=torch.long), target.expand(TRIALS, -1, -1), None,
        generator=generator(2),
    )  # fmt: skip
    assert (found.accepted_A == 0).all() and set(found.next_A.tolist()) == {1, 2}
