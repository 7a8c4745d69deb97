"""The chunked loss equals the plain one, its gradients included."""

import pytest
import torch
from speculators.losses import resolve_loss_config
from speculators.losses.utils import loss_function
from torch.nn import functional as F

from carryover.drafters.teacher import Teacher
from carryover.training.losses import LossSettings, block_loss, position_weights

SLOTS, POSITIONS, SIZE, VOCAB, RANK = 23, 9, 12, 50, 5
POSITION_OF_SLOT = torch.tensor(sorted([index % POSITIONS for index in range(SLOTS)]))


class Case:
    """Random inputs; leaves that take gradients are made anew by `leaves`."""

    def __init__(self, seed=0, dtype=torch.float32):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(shape, generator=generator).to(dtype)

        self.hidden, self.weight = normal(SLOTS, SIZE), normal(VOCAB, SIZE)
        self.embedded, self.bias_weight = normal(SLOTS, RANK), normal(VOCAB, RANK)
        self.teacher_hidden, self.teacher_weight = normal(POSITIONS, SIZE), normal(VOCAB, SIZE)
        self.labels = torch.randint(VOCAB, (SLOTS,), generator=generator)
        self.weights = torch.rand(SLOTS, generator=generator)

    def leaves(self):
        tensors = (self.hidden, self.weight, self.embedded, self.bias_weight)
        return [tensor.clone().requires_grad_() for tensor in tensors]

    def ours(self, settings, leaves, *, markov, softcap=None, max_elements=None, labels=None):
        hidden, weight, embedded, bias_weight = leaves
        return block_loss(
            hidden,
            weight,
            settings=settings,
            labels_N=self.labels if labels is None else labels,
            weights_N=self.weights,
            positions_N=POSITION_OF_SLOT,
            teacher=Teacher(self.teacher_hidden, self.teacher_weight, softcap),
            markov=(embedded, bias_weight) if markov else None,
            max_elements=max_elements,
        )

    def logits(self, leaves, *, markov):
        hidden, weight, embedded, bias_weight = leaves
        logits = hidden @ weight.T
        return logits + embedded @ bias_weight.T if markov else logits

    def teacher_logits(self, softcap=None):
        logits = self.teacher_hidden @ self.teacher_weight.T
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return logits[POSITION_OF_SLOT]


def plain_loss(case, settings, leaves, *, markov, softcap=None, labels=None):
    labels = case.labels if labels is None else labels
    z = case.logits(leaves, markov=markov)
    p = case.teacher_logits(softcap).softmax(-1)
    log_q = z.log_softmax(-1)
    ce = F.nll_loss(log_q, labels.clamp(min=0), reduction="none") * (labels >= 0)
    kl = (p * (p.log() - log_q)).sum(-1)
    tv = 1 - torch.minimum(p, log_q.exp()).sum(-1)
    loss = settings.ce * ce + settings.kl * kl + settings.tv * tv
    return (loss * case.weights).sum(), loss


TERMS = [
    {"kl": 1.0},
    {"kl": 0.0, "ce": 1.0},
    {"kl": 0.0, "tv": 1.0},
    {"kl": 0.5, "ce": 0.3, "tv": 0.9},
]


@pytest.mark.parametrize("max_elements", [1, VOCAB * 4, 10**9])
@pytest.mark.parametrize("markov", [False, True])
@pytest.mark.parametrize("terms", TERMS)
def test_equals_plain_loss(terms, markov, max_elements):
    case, settings = Case(), LossSettings(**terms)
    mine, theirs = case.leaves(), case.leaves()
    loss, slots = case.ours(settings, mine, markov=markov, max_elements=max_elements)
    expected, by_slot = plain_loss(case, settings, theirs, markov=markov)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(slots.loss_N, by_slot.detach(), atol=2e-5, rtol=1e-4)
    assert torch.equal(slots.predicted_N, case.logits(theirs, markov=markov).argmax(-1))
    (3 * loss).backward()
    (3 * expected).backward()
    for own, other in zip(mine, theirs, strict=True):
        if other.grad is None:
            assert own.grad is None
        else:
            torch.testing.assert_close(own.grad, other.grad, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("name", "terms"), [("kl_div", {}), ("tv", {"kl": 0.0, "tv": 1.0})])
def test_equals_speculators_losses(name, terms):
    case = Case(3)
    leaves = case.leaves()
    loss, _ = case.ours(LossSettings(**terms), leaves, markov=False)
    ((function, _),) = resolve_loss_config(name, "eager").values()
    theirs = function(case.logits(leaves, markov=False)[None], case.teacher_logits()[None])
    torch.testing.assert_close(loss, (theirs[0] * case.weights).sum(), atol=1e-5, rtol=1e-4)


def test_ce_equals_speculators_where_the_label_is_the_teachers_choice():
    case = Case(4)
    leaves = case.leaves()
    labels = case.teacher_logits().argmax(-1)
    loss, slots = case.ours(LossSettings(kl=0, ce=1), leaves, markov=False, labels=labels)
    ((function, _),) = resolve_loss_config("ce", "eager").values()
    theirs = function(case.logits(leaves, markov=False)[None], case.teacher_logits()[None])
    torch.testing.assert_close(loss, (theirs[0] * case.weights).sum(), atol=1e-5, rtol=1e-4)
    assert slots.truth_P is None


def test_position_weights_are_speculators():
    """One slot's weight alone, through their masked and decayed mean."""
    ((function, _),) = resolve_loss_config("kl_div", "eager").values()
    block = 6
    z, t = torch.randn(1, block, VOCAB), torch.randn(1, block, VOCAB)
    from speculators.losses import dflash_loss_decay

    for k in range(1, block):
        mask = torch.zeros(1, block)
        mask[0, k] = 1
        theirs = loss_function(
            z, t, mask, torch.arange(block)[None], loss_fn=function,
            decay_fn=lambda p, **_: dflash_loss_decay(p, 4.0),
        )  # fmt: skip
        ours = function(z, t)[0, k] * position_weights(torch.tensor(k), 4.0)
        torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)


def test_tokens_outside_the_draft_vocabulary_give_no_cross_entropy():
    case, settings = Case(5), LossSettings(kl=0.0, ce=1.0)
    labels = torch.where(torch.arange(SLOTS) % 2 == 0, -1, case.labels)
    mine, theirs = case.leaves(), case.leaves()
    loss, slots = case.ours(settings, mine, markov=True, labels=labels)
    expected, _ = plain_loss(case, settings, theirs, markov=True, labels=labels)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert (slots.loss_N[::2] == 0).all() and (slots.loss_N[1::2] > 0).all()
    assert not mine[0].grad[::2].any() and mine[0].grad[1::2].any(-1).all()


def test_soft_cap_bounds_the_teacher():
    case, settings = Case(6), LossSettings(kl=1, tv=0.5)
    mine, theirs = case.leaves(), case.leaves()
    loss, _ = case.ours(settings, mine, markov=False, softcap=2.0)
    expected, _ = plain_loss(case, settings, theirs, markov=False, softcap=2.0)
    torch.testing.assert_close(loss, expected)
    uncapped, _ = plain_loss(case, settings, theirs, markov=False)
    assert abs(float(uncapped - expected)) > 0.1


def test_without_gradients_the_loss_is_the_same():
    case, settings = Case(7), LossSettings(kl=1, ce=1)
    leaves = case.leaves()
    loss, _ = case.ours(settings, leaves, markov=True)
    with torch.no_grad():
        again, _ = case.ours(settings, leaves, markov=True)
    assert not again.requires_grad
    assert torch.equal(loss.detach(), again)


def test_bfloat16_is_near_float32():
    exact, rounded = Case(8), Case(8, torch.bfloat16)
    settings = LossSettings(kl=1, ce=0.5, tv=0.5)
    losses = [case.ours(settings, case.leaves(), markov=True)[0] for case in (exact, rounded)]
    torch.testing.assert_close(losses[1], losses[0], atol=0.3, rtol=0.03)


def test_settings_need_a_term():
    with pytest.raises(ValueError, match="all loss weights are 0"):
        LossSettings(kl=0)
