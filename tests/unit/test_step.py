"""The baseline step: what a block sees, what it learns, and what that costs."""

import pytest
import torch
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashDraftModel
from speculators.models.dspark import DSparkDraftModel
from torch.utils._python_dispatch import TorchDispatchMode
from training_cases import block_hidden, generator, make_drafter, random_batch, read_batch

from carryover.drafters.drafting import draft
from carryover.targets import resolve
from carryover.training.anchors import anchored_blocks
from carryover.training.losses import LossSettings
from carryover.training.step import (
    StepSettings,
    baseline_step,
    recorded_acceptance,
    supervise,
)

DOCUMENTS = [(5, 30), (7, 18)]
ANCHORS = torch.tensor([6, 9, 10, 20, 30, 44, 45, 50])
REGIMES = ("dflash", "markov")
STOCK = {"dflash": DFlashDraftModel, "markov": DSparkDraftModel}


@pytest.fixture
def batch():
    return random_batch(DOCUMENTS)


def changed(batch, name, rows, value=None):
    """The batch with some rows of one field replaced (states: by noise)."""
    values = dict(batch.__dict__)
    values[name] = values[name].clone()
    if value is None:
        value = torch.randn(values[name][rows].shape, generator=generator(99))
    values[name][rows] = value
    return type(batch)(**values)


@pytest.mark.parametrize("loss", ["kl_div", "tv"])
@pytest.mark.parametrize("vocab", [None, 200])
@pytest.mark.parametrize("regime", REGIMES)
def test_equals_speculators(tiny_llama, batch, monkeypatch, regime, vocab, loss):
    drafter = make_drafter(
        tiny_llama, regime, draft_vocab_size=vocab, token_counts={i: 999 - i for i in range(5, 320)}
    )
    stock = STOCK[regime](drafter.config)
    stock.load_state_dict(drafter.state_dict())
    monkeypatch.setattr(
        "speculators.models.dflash.core.select_anchors",
        lambda mask, count, block: (ANCHORS, torch.ones(len(ANCHORS), dtype=torch.bool)),
    )
    extra = {}
    if regime == "markov":
        extra["tv_loss_fn"] = resolve_loss_config("tv", "eager")["tv"][0]
    _, expected, metrics = stock(
        hidden_states=batch.hidden_TC[None],
        input_ids=batch.input_ids_T[None],
        loss_mask=batch.response_mask_T[None].float(),
        verifier_last_hidden_states=batch.last_hidden_TD[None],
        document_ids=batch.document_ids_T[None],
        position_ids=batch.position_ids_T[None],
        loss_config=resolve_loss_config(loss, "eager"),
        gamma=4.0,
        max_anchors=len(ANCHORS),
        **extra,
    )
    expected.backward()
    settings = LossSettings(kl=float(loss == "kl_div"), tv=float(loss == "tv"), gamma=4.0)
    result = supervise(drafter, batch, ANCHORS, anchored_blocks(batch, ANCHORS), settings)
    result.loss.backward()
    torch.testing.assert_close(result.loss, expected, rtol=1e-5, atol=1e-6)
    theirs = dict(stock.named_parameters())
    for name, parameter in drafter.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(
                parameter.grad, theirs[name].grad, rtol=1e-3, atol=1e-7, msg=name
            )
    assert result.metrics["tokens"] == metrics["full_acc_total"]
    assert result.metrics["acceptance_length"] == pytest.approx(
        float(metrics["eal_sum"] / metrics["eal_total"])
    )
    for k in range(1, 8):
        share = metrics[f"position_{k}_acc_sum"] / metrics[f"position_{k}_acc_total"]
        assert result.metrics[f"accuracy/position_{k}"] == pytest.approx(float(share))


def test_context_is_strictly_before_the_anchor(tiny_llama, batch):
    drafter = make_drafter(tiny_llama)
    anchors = torch.tensor([12])
    before = block_hidden(drafter, batch, anchored_blocks(batch, anchors))
    at_and_after = changed(batch, "hidden_TC", slice(12, None))
    assert torch.equal(before, block_hidden(drafter, at_and_after, anchored_blocks(batch, anchors)))
    for row in range(12):
        other = changed(batch, "hidden_TC", slice(row, row + 1))
        seen = block_hidden(drafter, other, anchored_blocks(batch, anchors))
        assert (before != seen).any(), f"row {row} is not seen"


def test_documents_never_see_each_other(tiny_llama, batch):
    drafter = make_drafter(tiny_llama)
    first, second = torch.tensor([8, 30]), torch.tensor([43, 55])
    other_first = changed(batch, "hidden_TC", slice(0, 35))
    other_second = changed(batch, "hidden_TC", slice(35, None))
    for anchors, changed_batch in ((first, other_second), (second, other_first)):
        blocks = anchored_blocks(batch, anchors)
        assert torch.equal(
            block_hidden(drafter, batch, blocks), block_hidden(drafter, changed_batch, blocks)
        )


def test_blocks_never_see_each_other(tiny_llama, batch):
    drafter = make_drafter(tiny_llama)
    together = block_hidden(drafter, batch, anchored_blocks(batch, ANCHORS))
    for index, anchor in enumerate(ANCHORS):
        alone = block_hidden(drafter, batch, anchored_blocks(batch, anchor[None]))
        torch.testing.assert_close(together[index], alone[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("regime", REGIMES)
def test_loss_reads_the_labels_of_the_response_and_no_others(tiny_llama, batch, regime):
    drafter = make_drafter(tiny_llama, regime)
    anchors, settings = torch.tensor([30]), LossSettings(kl=0, ce=1)
    blocks = anchored_blocks(batch, anchors)

    def loss(of):
        return float(supervise(drafter, of, anchors, blocks, settings).loss)

    before = loss(batch)
    # Slots 1..4 predict rows 31..34; the response ends there and the next document begins.
    assert supervise(drafter, batch, anchors, blocks, settings).metrics["tokens"] == 4
    for row in range(31, 35):
        assert loss(changed(batch, "input_ids_T", row, 7)) != before
    for row in (*range(30), *range(35, 60)):
        assert loss(changed(batch, "input_ids_T", row, 7)) == before


def test_label_of_a_slot_is_the_token_at_its_own_position(tiny_llama, batch):
    """Cross-entropy of slot k alone, computed by hand from the block's hidden state."""
    drafter = make_drafter(tiny_llama)
    anchors = torch.tensor([9])
    blocks = anchored_blocks(batch, anchors)
    hidden = block_hidden(drafter, batch, blocks)[0]
    logits = hidden @ drafter.lm_head.weight.T
    result = supervise(drafter, batch, anchors, blocks, LossSettings(kl=0, ce=1))
    for k in range(1, 8):
        by_hand = -logits[k].log_softmax(-1)[batch.input_ids_T[9 + k]]
        torch.testing.assert_close(result.metrics[f"loss/position_{k}"], by_hand)


def test_markov_bias_of_slot_k_uses_the_token_of_slot_k_minus_1(tiny_llama, batch):
    drafter = make_drafter(tiny_llama, "markov")
    with torch.no_grad():
        drafter.markov_head.markov_w1.weight.normal_()
    anchors = torch.tensor([9])
    blocks = anchored_blocks(batch, anchors)
    hidden = block_hidden(drafter, batch, blocks)[0]
    result = supervise(drafter, batch, anchors, blocks, LossSettings(kl=0, ce=1))
    for k in range(1, 8):
        bias = drafter.markov_head.markov_w2(
            drafter.markov_head.markov_w1(batch.input_ids_T[9 + k - 1])
        )
        logits = hidden[k] @ drafter.lm_head.weight.T + bias
        by_hand = -logits.log_softmax(-1)[batch.input_ids_T[9 + k]]
        torch.testing.assert_close(result.metrics[f"loss/position_{k}"], by_hand)


def test_markov_drafting_goes_left_to_right(tiny_llama, batch):
    drafter = make_drafter(tiny_llama, "markov")
    with torch.no_grad():
        drafter.markov_head.markov_w1.weight.normal_()
    blocks = anchored_blocks(batch, ANCHORS)
    hidden = block_hidden(drafter, batch, blocks)
    tokens = draft(drafter, batch.context, blocks)
    for index, anchor in enumerate(ANCHORS):
        previous = batch.input_ids_T[anchor]
        for k in range(1, 8):
            bias = drafter.markov_head.markov_w2(drafter.markov_head.markov_w1(previous))
            previous = (hidden[index, k] @ drafter.lm_head.weight.T + bias).argmax()
            assert tokens[index, k - 1] == previous


def test_drafts_speak_the_targets_vocabulary(tiny_llama, batch):
    counts = {i: 999 - i for i in range(100, 320)}
    drafter = make_drafter(tiny_llama, draft_vocab_size=50, token_counts=counts)
    tokens = draft(drafter, batch.context, anchored_blocks(batch, ANCHORS))
    assert ((tokens >= 100) & (tokens < 150)).all()
    to_draft, to_target = drafter.target_to_draft, drafter.draft_to_target
    assert to_target.tolist() == list(range(100, 150))
    assert to_draft[to_target].tolist() == list(range(50))
    assert (to_draft[:100] == -1).all() and (to_draft[150:] == -1).all()


def test_acceptance_on_the_recording_is_a_run_of_equal_tokens(batch):
    anchors = torch.tensor([9, 32])
    tokens = torch.stack([batch.input_ids_T[10:17], batch.input_ids_T[33:40]])
    assert recorded_acceptance(batch, anchors, tokens).tolist() == [7, 2]  # row 35: next document
    tokens[0, 3] += 1
    assert recorded_acceptance(batch, anchors, tokens).tolist() == [3, 2]


@pytest.mark.parametrize("regime", REGIMES)
def test_every_trainable_parameter_moves_and_nothing_frozen_does(tiny_qwen3, batch, regime):
    drafter = make_drafter(
        tiny_qwen3, regime, draft_vocab_size=200,
        token_counts={i: 999 - i for i in range(5, 320)},
    )  # fmt: skip
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    frozen = {name for name, p in drafter.named_parameters() if not p.requires_grad}
    assert frozen == {
        "embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"
    }  # fmt: skip
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=1e-2)
    for step in range(2):
        settings = StepSettings(num_anchors=16)
        baseline_step(drafter, batch, settings=settings, generator=generator(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in drafter.named_parameters():
        assert torch.equal(before[name], parameter) == (name in frozen), name


@pytest.mark.parametrize("regime", REGIMES)
def test_one_sample_can_be_overfitted(tiny_llama, regime):
    model = resolve(str(tiny_llama)).load_model()
    drafter = make_drafter(tiny_llama, regime)
    batch = read_batch(model, [(6, 42)])
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=3e-3)
    settings = StepSettings(num_anchors=100, loss=LossSettings(kl=0, ce=1, gamma=50))
    for _ in range(160):
        baseline_step(drafter, batch, settings=settings).loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    anchors = torch.arange(6, 40)
    tokens = draft(drafter, batch.context, anchored_blocks(batch, anchors))
    accepted = recorded_acceptance(batch, anchors, tokens).float().mean()
    assert accepted > 0.95 * drafter.proposal_length


class LargestTensor(TorchDispatchMode):
    """Records the largest tensor that any operation returns, in elements."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // 4)
        return out


@pytest.mark.parametrize("regime", REGIMES)
def test_memory_is_linear_in_anchors(tiny_llama, monkeypatch, regime):
    """Kept for backward: doubles with the anchors. Made on the way: bounded, never dense."""
    from carryover.drafters import attention
    from carryover.training import losses

    monkeypatch.setattr(attention, "_CPU_CHUNK", 50_000)
    monkeypatch.setattr(losses, "_CPU_CHUNK", 30_000)
    drafter, batch = make_drafter(tiny_llama, regime), random_batch([(20, 700)])

    def cost(num_anchors):
        kept = {}

        def pack(tensor):
            if tensor.grad_fn is not None or not tensor.requires_grad:
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            LargestTensor() as largest,
        ):
            settings = StepSettings(num_anchors=num_anchors)
            result = baseline_step(drafter, batch, settings=settings, generator=generator())
            result.loss.backward()
        return sum(kept.values()), largest.elements

    costs = [cost(count) for count in (80, 160, 320)]
    first, second = costs[1][0] - costs[0][0], costs[2][0] - costs[1][0]
    assert second <= 2.2 * first
    slots = 320 * drafter.config.block_size
    dense_mask = slots * (len(batch) + slots)
    all_logits = slots * drafter.draft_vocab_size
    assert costs[2][1] < min(dense_mask, all_logits) / 2
