"""Parallel verification equals running the target for every anchor alone."""

import pytest
import torch
from training_cases import LAYER_IDS, generator, random_batch, read_batch

from carryover.decoding.acceptance import accept_greedy
from carryover.errors import TargetError
from carryover.targets import resolve
from carryover.training.anchors import anchored_blocks
from carryover.training.verification import predictions, read_target, verify

ARCHITECTURES = ("llama", "qwen3", "gemma3", "gemma4")
DOCUMENTS = [(5, 95), (30, 70)]  # longer than the tiny Gemmas' sliding window of 64
ANCHORS = torch.tensor([5, 6, 62, 98, 130, 150, 199])
LENGTH = 7


@pytest.fixture(params=ARCHITECTURES)
def case(request, tiny):
    """A sharp target, so that its choices depend on what it attends to."""
    model = resolve(str(tiny(request.param, scale=3.0))).load_model()
    batch = read_batch(model, DOCUMENTS)
    tokens = torch.randint(5, 320, (len(ANCHORS), LENGTH), generator=generator(5))
    return model, batch, tokens


def verified(model, batch, tokens, anchors=ANCHORS, **settings):
    return verify(
        model,
        prefix=batch.prefix,
        blocks=anchored_blocks(batch, anchors),
        tokens_AB=tokens,
        layer_ids=LAYER_IDS,
        **settings,
    )


@torch.no_grad()
def alone(model, batch, anchor, tokens):
    """States and logits of one anchor's rows, by the target's own attention."""
    start = int(anchor - batch.position_ids_T[anchor])
    text = torch.cat((batch.input_ids_T[start : anchor + 1], tokens))
    out = model(text[None], output_hidden_states=True, use_cache=False)
    states = torch.cat([out.hidden_states[index][0] for index in LAYER_IDS], dim=-1)
    return states[-LENGTH:], out.logits[0, -LENGTH - 1 :]


def test_states_and_accepted_lengths(case):
    model, batch, tokens = case
    # Some proposals are the target's own choice, so that accepted lengths differ.
    for index, anchor in enumerate(ANCHORS.tolist()):
        for k in range(index % (LENGTH + 1)):
            tokens[index, k] = alone(model, batch, anchor, tokens[index])[1][k].argmax()
    found = verified(model, batch, tokens)
    best = torch.cat(
        [predictions(model, batch.last_hidden_TD[ANCHORS][:, None]),
         predictions(model, found.last_hidden_ND)], dim=1,
    )  # fmt: skip
    accepted = (tokens == best[:, :-1]).long().cumprod(1).sum(1)
    assert len(accepted.unique()) > 3
    for index, anchor in enumerate(ANCHORS.tolist()):
        states, logits = alone(model, batch, anchor, tokens[index])
        torch.testing.assert_close(found.hidden_NC[index], states, atol=1e-4, rtol=1e-4)
        by_hand = accept_greedy(tokens[index][None], logits[None])
        assert accepted[index] == by_hand.accepted_A[0]


def test_one_anchors_proposals_change_no_other_anchors_states(case):
    model, batch, tokens = case
    before = verified(model, batch, tokens).hidden_NC
    for index in range(len(ANCHORS)):
        other = tokens.clone()
        other[index] = (other[index] + 1) % 300 + 5
        after = verified(model, batch, other).hidden_NC
        same = [(before[i] == after[i]).all().item() for i in range(len(ANCHORS))]
        assert same == [i != index for i in range(len(ANCHORS))]


ACCEPTED = {
    "none": [0] * 7,
    "some": [0, 3, 7, 0, 1, 6, 0],
    "all": [7, 7, 7, 0, 7, 7, 0],
}


@pytest.mark.parametrize("accepted", ACCEPTED.values(), ids=ACCEPTED)
def test_accepted_proposals_are_read_from_the_recorded_text(case, accepted):
    """Their rows are the prefix's, so the rejected ones after them come out the same."""
    model, batch, tokens = case
    for index, (anchor, count) in enumerate(zip(ANCHORS.tolist(), accepted, strict=True)):
        tokens[index, :count] = batch.input_ids_T[anchor + 1 : anchor + 1 + count]
    whole = verified(model, batch, tokens)
    rows = []
    hook = model.get_decoder().layers[0].register_forward_pre_hook(
        lambda module, args: rows.append(args[0].shape[1])
    )
    found = verified(model, batch, tokens, accepted_A=torch.tensor(accepted))
    hook.remove()
    rejected = torch.arange(LENGTH) >= torch.tensor(accepted)[:, None]
    assert rows == [int(rejected.sum())]
    for name in ("hidden_NC", "last_hidden_ND"):
        one, other = getattr(found, name), getattr(whole, name)
        torch.testing.assert_close(one[rejected], other[rejected], atol=1e-4, rtol=1e-4)
        assert not one[~rejected].any()


def test_nothing_is_run_where_all_was_accepted(case):
    model, batch, tokens = case
    anchors = torch.tensor([6, 62])
    accepted = torch.full((2,), LENGTH)
    found = verified(model, batch, tokens[:2], anchors, accepted_A=accepted)
    shape = (2, LENGTH, model.get_decoder().config.hidden_size)
    assert found.last_hidden_ND.shape == shape and not found.hidden_NC.any()
    assert found.hidden_NC.shape == (*shape[:2], shape[2] * len(LAYER_IDS))


def test_the_pass_ends_with_the_last_layer_that_is_asked_for(case):
    model, batch, tokens = case
    whole = verified(model, batch, tokens)
    beyond = []
    decoder = model.get_decoder()
    hook = decoder.norm.register_forward_pre_hook(lambda *args: beyond.append(args))
    found = verified(model, batch, tokens, last_hidden=False)
    hook.remove()
    assert torch.equal(found.hidden_NC, whole.hidden_NC)
    assert found.last_hidden_ND is None and not beyond
    assert decoder.config._attn_implementation != "carryover"
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_proposals_are_causal(case):
    model, batch, tokens = case
    before = verified(model, batch, tokens).hidden_NC
    other = tokens.clone()
    other[:, 4] = (other[:, 4] + 1) % 300 + 5
    after = verified(model, batch, other).hidden_NC
    assert torch.equal(before[:, :4], after[:, :4])
    assert (before[:, 4:] != after[:, 4:]).any(-1).all()


def test_packed_documents_equal_each_alone(case):
    model, batch, _ = case
    with torch.no_grad():
        for rows in (slice(0, 100), slice(100, 200)):
            out = model(batch.input_ids_T[rows][None], output_hidden_states=True)
            expected = torch.cat([out.hidden_states[i][0] for i in LAYER_IDS], dim=-1)
            torch.testing.assert_close(batch.hidden_TC[rows], expected, atol=1e-4, rtol=1e-4)


def test_the_model_is_left_as_it_was(case):
    model, batch, tokens = case
    before = model.get_decoder().config._attn_implementation
    verified(model, batch, tokens)
    assert model.get_decoder().config._attn_implementation == before
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_memory_is_linear_in_anchors(tiny_llama, monkeypatch):
    """No tensor of a verification grows with the square of the anchors."""
    from test_step import LargestTensor

    from carryover.drafters import attention

    monkeypatch.setattr(attention, "_CPU_CHUNK", 20_000)
    model = resolve(str(tiny_llama)).load_model()
    batch = read_batch(model, [(20, 500)])

    def largest(count):
        anchors = torch.arange(20, 20 + count)
        with LargestTensor() as found:
            verified(model, batch, torch.full((count, LENGTH), 9), anchors)
        return found.elements

    assert largest(400) <= 2.2 * largest(200)
    assert largest(400) < (400 * LENGTH) ** 2 / 10


def test_unsupported_attention_is_refused(tiny_llama, tiny):
    model = resolve(str(tiny_llama)).load_model()
    batch = random_batch([(2, 20)])

    def read(of):
        read_target(
            of, input_ids_T=batch.input_ids_T, position_ids_T=batch.position_ids_T, layer_ids=[1]
        )

    model.config.attn_logit_softcapping = 50.0
    with pytest.raises(TargetError, match="caps its attention scores"):
        read(model)
    model.config.attn_logit_softcapping = None
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(TargetError, match="layers of type linear_attention"):
        read(model)
    gemma = resolve(str(tiny("gemma3"))).load_model()
    long = read_batch(gemma, [(2, 30)])
    with pytest.raises(TargetError, match="window of 64 rows is shorter than the 65 proposals"):
        verified(gemma, long, torch.full((1, 65), 9), torch.tensor([10]))
