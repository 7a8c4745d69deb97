"""The reference decoder: rounds, carried rows, and their agreement with training."""

from dataclasses import replace

import pytest
import torch
from training_cases import LAYER_IDS, block_hidden, carryover_drafter, generator, read_batch

from carryover.decoding import reference
from carryover.decoding.reference import decode
from carryover.drafters.drafting import draft, draft_sampled
from carryover.targets import resolve
from carryover.training import carryover as step_module
from carryover.training.carryover import carryover_step
from carryover.training.step import StepSettings

PROMPTS = [[9, 30, 41, 7], [100, 22, 57, 8, 65, 11, 90, 12, 200]]


@pytest.fixture(scope="module")
def model(tiny):
    return resolve(str(tiny("llama", scale=4.0))).load_model()


@pytest.fixture
def drafter(tiny):
    return lively(carryover_drafter(tiny("llama", scale=4.0)))


def lively(drafter):
    """Makes an untrained drafter's proposals depend on what it sees."""
    with torch.no_grad():
        for parameter in drafter.layers.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)
    return drafter


@torch.no_grad()
def greedy(model, prompt, count):
    text = list(prompt)
    for _ in range(count):
        text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(prompt) :]


def spy_on_drafts(monkeypatch, proposals=None):
    """Records what each draft is given; `proposals(blocks)` replaces what it proposes."""
    calls = []

    def record(drafter, context, blocks):
        calls.append((context, blocks))
        return draft(drafter, context, blocks) if proposals is None else proposals(blocks)

    monkeypatch.setattr(reference, "draft", record)
    return calls


def corrupted(model, prompt, accepted, count=60):
    """Proposes the target's own tokens, wrong from the accepted length of each round on."""
    text = torch.tensor([*prompt, *greedy(model, prompt, count)])
    rounds = iter(accepted)

    def proposals(blocks):
        start = int(blocks.positions_A[0]) + 1
        tokens = text[start : start + 7].clone()
        tokens[next(rounds, 0) :] += 1
        return tokens[None] % 320

    return proposals


def test_rounds_follow_the_method(model, drafter, monkeypatch):
    prompt, accepted = PROMPTS[0], [2, 0, 7, 5]
    calls = spy_on_drafts(monkeypatch, corrupted(model, prompt, accepted))
    (out,) = decode(model, drafter, [prompt], max_new_tokens=1 + sum(a + 1 for a in accepted))
    assert out.tokens == greedy(model, prompt, 19)
    assert [r.accepted for r in out.rounds] == accepted
    assert out.acceptance_length == pytest.approx(1 + sum(accepted) / 4)
    anchors = [4, 7, 8, 16]
    assert [r.anchor_position for r in out.rounds] == anchors
    for (context, blocks), before, anchor in zip(
        calls, [None, *out.rounds[:-1]], anchors, strict=True
    ):
        # Committed context: one state for each committed token, at its position; never more.
        assert context.positions_T.tolist() == list(range(anchor))
        assert (blocks.starts_A.tolist(), blocks.ends_A.tolist()) == ([0], [anchor])
        assert blocks.positions_A.tolist() == [anchor]
        if before is None or before.accepted == 7:
            assert blocks.carried is None
            continue
        # Carried: the rejected rows of the round just before, at their own positions.
        valid = blocks.carried.valid_AR
        first = before.anchor_position + before.accepted + 1
        expected = list(range(first, before.anchor_position + 8))
        assert blocks.carried.positions_AR[valid].tolist() == expected
        assert before.carried_positions == expected
        assert first == anchor


def test_carried_rows_are_the_targets_states_of_the_rejected_proposals(model, drafter, monkeypatch):
    prompt = PROMPTS[1]
    spy_on_drafts(monkeypatch, corrupted(model, prompt, [3, 1, 6]))
    (out,) = decode(model, drafter, [prompt], max_new_tokens=14)
    text = [*prompt, *out.tokens]
    for played in out.rounds:
        seen = [*text[: played.anchor_position + 1], *played.proposals]
        with torch.no_grad():
            hidden = model(torch.tensor([seen]), output_hidden_states=True).hidden_states
        states = torch.cat([hidden[index][0] for index in LAYER_IDS], dim=-1)
        torch.testing.assert_close(
            played.carried_RC, states[played.carried_positions], atol=1e-4, rtol=1e-4
        )


def test_carried_rows_never_reach_the_committed_context(model, drafter, monkeypatch):
    """The committed states of every draft are those of the text alone."""
    calls = spy_on_drafts(monkeypatch, corrupted(model, PROMPTS[0], [2, 0, 4, 1]))
    (out,) = decode(model, drafter, [PROMPTS[0]], max_new_tokens=12)
    text = torch.tensor([[*PROMPTS[0], *out.tokens]])
    with torch.no_grad():
        hidden = model(text, output_hidden_states=True).hidden_states
    states = torch.cat([hidden[index][0] for index in LAYER_IDS], dim=-1)
    for context, _ in calls:
        torch.testing.assert_close(
            context.hidden_TC, states[: len(context.hidden_TC)], atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_training_carries_what_decoding_carries(tiny, monkeypatch, architecture):
    """The same trajectory, position by position: rows, positions, and the next draft's states."""
    folder = tiny(architecture, scale=4.0)
    model, drafter = resolve(str(folder)).load_model(), carryover_drafter(folder)
    prompt, accepted = PROMPTS[1], [2, 0, 7, 5, 1]
    calls = spy_on_drafts(monkeypatch, corrupted(model, prompt, accepted))
    (out,) = decode(model, drafter, [prompt], max_new_tokens=40)

    recorded = torch.tensor([*prompt, *out.tokens])
    batch = read_batch(model, [(len(prompt), 40)], input_ids=recorded)
    rounds = out.rounds[: len(accepted) - 1]
    anchors = torch.tensor([played.anchor_position for played in rounds])
    proposals = torch.tensor([played.proposals for played in rounds])
    monkeypatch.setattr(step_module, "draw_anchors", lambda *_, **__: anchors)
    monkeypatch.setattr(step_module, "draft", lambda *_: proposals)
    seen = {}

    def capture(drafter, batch, anchors, blocks, settings):
        seen.update(anchors=anchors, blocks=blocks)
        return supervise(drafter, batch, anchors, blocks, settings)

    supervise = step_module.supervise
    monkeypatch.setattr(step_module, "supervise", capture)
    carryover_step(drafter, model, batch, settings=StepSettings(), carry=True)

    hidden = block_hidden(drafter, batch, seen["blocks"])
    rows = seen["blocks"].carried
    for index, played in enumerate(rounds):
        context, blocks = calls[index + 1]
        assert seen["anchors"][index] == blocks.positions_A[0]
        assert seen["blocks"].tokens_A[index] == blocks.tokens_A[0]
        valid = rows.valid_AR[index]
        assert rows.positions_AR[index][valid].tolist() == played.carried_positions
        torch.testing.assert_close(
            rows.hidden_ARC[index][valid], played.carried_RC, atol=1e-4, rtol=1e-4
        )
        decoded = drafter(context, blocks, lambda _, states: states)[0]
        torch.testing.assert_close(hidden[index], decoded, atol=1e-3, rtol=1e-3)


def test_requests_of_a_batch_do_not_influence_each_other(model, drafter):
    together = decode(model, drafter, PROMPTS, max_new_tokens=25, stop_token_ids=[2])
    for prompt, found in zip(PROMPTS, together, strict=True):
        (alone,) = decode(model, drafter, [prompt], max_new_tokens=25, stop_token_ids=[2])
        assert found.tokens == alone.tokens
        assert [r.proposals for r in found.rounds] == [r.proposals for r in alone.rounds]
        assert [r.carried_positions for r in found.rounds] == [
            r.carried_positions for r in alone.rounds
        ]


def test_stop_inside_a_block(model, drafter, monkeypatch):
    prompt = PROMPTS[0]
    expected = greedy(model, prompt, 20)
    stop = expected[5]
    monkeypatch.setattr(reference, "draft", lambda *_: torch.tensor([expected[1:8]]))
    (out,) = decode(model, drafter, [prompt], max_new_tokens=20, stop_token_ids=[stop])
    assert out.finish == "stop"
    assert out.tokens == expected[: expected.index(stop) + 1]
    (cut,) = decode(model, drafter, [prompt], max_new_tokens=4)
    assert cut.finish == "length" and cut.tokens == expected[:4]
    (one,) = decode(model, drafter, [prompt], max_new_tokens=1)
    assert one.tokens == expected[:1] and not one.rounds


def test_switched_off_it_is_the_baseline(model, drafter, tiny):
    baseline = lively(carryover_drafter(tiny("llama", scale=4.0)))
    baseline.carried_settings = None
    off = decode(model, drafter, PROMPTS, max_new_tokens=20, carry=False)
    plain = decode(model, baseline, PROMPTS, max_new_tokens=20)
    for one, other in zip(off, plain, strict=True):
        assert [r.proposals for r in one.rounds] == [r.proposals for r in other.rounds]
        assert all(r.carried_RC is None and not r.carried_positions for r in one.rounds)
    on = decode(model, drafter, PROMPTS, max_new_tokens=20)
    assert [r.proposals for o in on for r in o.rounds] != [
        r.proposals for o in off for r in o.rounds
    ]


def test_sampled_drafts_come_from_the_distribution_they_report(tiny, model):
    """Reduced vocabulary and Markov head included."""
    drafter = carryover_drafter(
        tiny("llama", scale=4.0), "markov", draft_vocab_size=6,
        token_counts={index: 9 for index in range(50, 56)},
    )  # fmt: skip
    with torch.no_grad():
        drafter.markov_head.markov_w1.weight.normal_()
    batch = read_batch(model, [(4, 10)])
    from carryover.training.anchors import anchored_blocks

    blocks = anchored_blocks(batch, torch.full((4000,), 6))
    tokens, probs = draft_sampled(
        drafter, batch.context, blocks, temperature=0.7, generator=generator(1)
    )
    assert probs.shape == (4000, 7, 320)
    torch.testing.assert_close(probs.sum(-1), torch.ones(4000, 7))
    assert (probs[..., :50] == 0).all() and (probs[..., 56:] == 0).all()
    frequency = torch.bincount(tokens[:, 0], minlength=320) / 4000
    torch.testing.assert_close(frequency, probs[0, 0], atol=0.03, rtol=0)
    greedy_tokens = draft(drafter, batch.context, blocks)
    # The second slot's distribution depends on the first slot's token, as Markov's must.
    followers = {int(t): probs[i, 1] for i, t in enumerate(tokens[:, 0])}
    assert len(followers) > 1
    one, other = list(followers.values())[:2]
    assert not torch.allclose(one, other, atol=1e-3)
    cold, _ = draft_sampled(drafter, batch.context, blocks, temperature=1e-4)
    assert torch.equal(cold, greedy_tokens)


def test_contexts_of_requests_stay_apart(model, drafter, monkeypatch):
    calls = spy_on_drafts(monkeypatch)
    decode(model, drafter, PROMPTS, max_new_tokens=6)
    context, blocks = calls[1]
    before = drafter(context, blocks, lambda _, states: states)
    noise = context.hidden_TC.clone()
    noise[: int(blocks.ends_A[0])] += 1
    after = drafter(replace(context, hidden_TC=noise), blocks, lambda _, states: states)
    assert torch.equal(before[1], after[1]) and not torch.equal(before[0], after[0])
