"""On-policy evaluation, on cases that can be counted by hand."""

import numpy as np
import pytest
import torch
from torch import nn
from training_cases import carryover_drafter, read_batch
from training_runs import table

from carryover.decoding.reference import decode
from carryover.targets import resolve
from carryover.training.evaluate import evaluate, evaluate_carrying, make_batch
from carryover.training.losses import LossSettings, StepSettings
from carryover.training.packing import Corpus
from carryover.training.states import OnlineStates, States
from carryover.training.step import baseline_step

CPU = torch.device("cpu")


class FakeStates:
    """States without content."""

    def __init__(self, corpus):
        self._corpus = corpus

    def states(self, rows):
        length = int(self._corpus.lengths(np.asarray(rows)).sum())
        return States(torch.zeros(length, 2), torch.zeros(length, 1))


class ScriptedDrafter(nn.Module):
    """Proposes the recorded tokens, wrong from a scripted place on.

    `right` maps the anchor's token to how many of its proposals are right; tokens of the corpus
    count upwards, so the right proposal is the anchor's token plus one, two, ...
    """

    proposal_length = 3

    def __init__(self, right):
        super().__init__()
        self.right = right
        self.anchors = []

    def forward(self, context, blocks, head):
        proposals = []
        for token in blocks.tokens_A.tolist():
            self.anchors.append(token)
            good = self.right[token]
            proposals.append([token + k if k <= good else 0 for k in range(1, 4)])
        return torch.tensor(proposals)


def counting_row(row_id, first, prompt, response, finish):
    """Tokens first, first + 1, ...: every token occurs once in the corpus."""
    tokens = list(range(first, first + prompt + response))
    return {
        "id": row_id, "source": "t", "category": "c", "temperature": 0.0, "finish": finish,
        "prompt_ids": tokens[:prompt], "response_ids": tokens[prompt:],
    }  # fmt: skip


def test_rounds_are_those_of_decoding_and_cut_ends_are_left_out():
    corpus = Corpus(
        table([
            counting_row(1, 100, 2, 8, "stop"),  # response 102..109
            counting_row(2, 200, 3, 7, "length"),  # response 203..209
        ]),
        max_tokens=99,
    )  # fmt: skip
    right = dict.fromkeys(range(300), 0)
    # Row 1: 102 accepts 2 (next anchor 105), 105 accepts 0 (106), 106 accepts 3, of which 107..109
    # are all that is left: the round ends the response, and no anchor follows.
    right |= {102: 2, 106: 3}
    # Row 2: 203 accepts 1 (next 205), 205 accepts 0 (206); its three labels are 207..209, all
    # known. 207 would need 210, which the cut hides: that round and those after it do not count.
    right |= {203: 1, 207: 1}
    drafter = ScriptedDrafter(right)
    found = evaluate(drafter, corpus, [np.array([0, 1])], FakeStates(corpus), device=CPU)
    accepted = [2, 0, 3, 1, 0, 0]
    assert found.rounds == 6
    assert found.reached_B.tolist() == [3, 2, 1]
    metrics = found.metrics()
    assert metrics["acceptance_length"] == pytest.approx(1 + sum(accepted) / 6)
    assert metrics["accepted/position_1"] == pytest.approx(3 / 6)
    assert metrics["accepted/position_3"] == pytest.approx(1 / 6)
    # Packed together or apart, and in any order.
    apart = [np.array([1]), np.array([0])]
    again = evaluate(ScriptedDrafter(right), corpus, apart, FakeStates(corpus), device=CPU)
    assert again.reached_B.tolist() == [3, 2, 1] and again.rounds == 6


def test_the_last_token_of_a_finished_response_can_be_proposed():
    corpus = Corpus(table([counting_row(1, 100, 2, 3, "stop")]), max_tokens=99)
    drafter = ScriptedDrafter(dict.fromkeys(range(200), 3))
    found = evaluate(drafter, corpus, [np.array([0])], FakeStates(corpus), device=CPU)
    # 102 proposes 103 and 104, and one past the end, which nothing can match.
    assert found.rounds == 1 and found.reached_B.tolist() == [1, 1, 0]
    assert drafter.anchors == [102, 103]


def test_a_batch_is_the_documents_one_after_another():
    corpus = Corpus(
        table([counting_row(1, 100, 2, 3, "stop"), counting_row(2, 200, 1, 2, "stop")]),
        max_tokens=99,
    )
    batch = make_batch(corpus, [1, 0], FakeStates(corpus), device=CPU)
    assert batch.input_ids_T.tolist() == [200, 201, 202, 100, 101, 102, 103, 104]
    assert batch.position_ids_T.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert batch.document_ids_T.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert batch.response_mask_T.int().tolist() == [0, 1, 1, 0, 0, 1, 1, 1]


def learn(drafter, model, texts, steps=25):
    """Half memorise some texts, so that some proposals pass and some do not."""
    ids = torch.tensor([token for text in texts for token in text])
    batch = read_batch(model, [(1, len(text) - 1) for text in texts], input_ids=ids)
    optimizer = torch.optim.Adam([p for p in drafter.parameters() if p.requires_grad], lr=3e-3)
    settings = StepSettings(num_anchors=99, loss=LossSettings(ce=1.0, kl=0.0))
    for _ in range(steps):
        baseline_step(drafter, batch, settings=settings).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("regime", ["dflash", "markov"])
@pytest.mark.parametrize("carry", [True, False])
def test_replaying_equals_decoding(tiny, regime, carry):
    """On greedy responses the replay takes the very rounds of the reference decoder."""
    folder = tiny("llama", scale=6.0)
    model = resolve(str(folder)).load_model(dtype=torch.float32)
    drafter = carryover_drafter(folder, regime, proposal_length=4, seed=3)
    random = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 300, (n,), generator=random).tolist() for n in (4, 9, 6)]
    learn(
        drafter, model, [one.tokens for one in decode(model, drafter, prompts, max_new_tokens=30)]
    )
    decoded = decode(model, drafter, prompts, max_new_tokens=30, carry=carry)
    values = [
        {
            "id": index, "source": "t", "category": "c", "temperature": 0.0, "finish": "length",
            "prompt_ids": prompt, "response_ids": found.tokens,
        }
        for index, (prompt, found) in enumerate(zip(prompts, decoded, strict=True))
    ]  # fmt: skip
    corpus = Corpus(table(values), max_tokens=99)
    source = OnlineStates(
        model, layer_ids=drafter.target_layer_ids, corpus=corpus, keep_prefix=True
    )
    packs = [np.array([0, 1]), np.array([2])]
    if carry:
        found = evaluate_carrying(drafter, model, corpus, packs, source, device=CPU)
    else:
        found = evaluate(drafter, corpus, packs, source, device=CPU)
    expected = [
        round_.accepted
        for prompt, one in zip(prompts, decoded, strict=True)
        for round_ in one.rounds
        # the replay stops where the cut hides labels
        if round_.anchor_position <= len(prompt) + 30 - 1 - 4
    ]
    assert found.rounds == len(expected)
    reached = [sum(accepted >= k for accepted in expected) for k in range(1, 5)]
    assert found.reached_B.tolist() == reached
    assert len(set(expected)) >= 3, "the case must have rounds of several lengths"
    if carry:
        without = evaluate(drafter, corpus, packs, source, device=CPU)
        assert without.reached_B.tolist() != reached, "what is carried must matter"
