"""Draft-verify-draft: what is carried, where gradients go, and what the control arm does."""

from dataclasses import replace

import pytest
import torch
from training_cases import (
    block_hidden,
    carryover_drafter,
    generator,
    make_drafter,
    random_batch,
    read_batch,
)

from carryover.drafters.blocks import Carried
from carryover.drafters.carried import CarriedSettings, carry
from carryover.drafters.drafting import draft
from carryover.errors import ConfigError
from carryover.targets import resolve
from carryover.training import carryover as step_module
from carryover.training.anchors import anchored_blocks
from carryover.training.carryover import carryover_step
from carryover.training.losses import LossSettings
from carryover.training.step import StepSettings, supervise

REGIMES = ("dflash", "markov")
SETTINGS = StepSettings(num_anchors=20, loss=LossSettings(kl=1, ce=0.5))
ANCHORS = torch.tensor([8, 12, 44])


@pytest.fixture(scope="module")
def model(tiny):
    return resolve(str(tiny("llama"))).load_model()


@pytest.fixture
def batch(model):
    return read_batch(model, [(6, 34), (5, 40)])


def oracle(batch, accepted):
    """Draft 1 that reproduces the recording for `accepted[i]` tokens, then differs."""

    def draft_1(drafter, context, blocks):
        rows = blocks.ends_A[:, None] + torch.arange(1, drafter.proposal_length + 1)
        tokens = batch.input_ids_T[rows.clamp(max=len(batch) - 1)]
        wrong = torch.arange(drafter.proposal_length) >= torch.tensor(accepted)[:, None]
        return torch.where(wrong, (tokens + 1) % 300, tokens)

    return draft_1


def carried_rows(drafter, *, blocks=3, seed=0, valid=None):
    """Random carried rows for the blocks at ANCHORS."""
    hidden = torch.randn(blocks, 7, 128, generator=generator(seed))
    positions = torch.arange(1, 8) + torch.tensor([[7], [11], [3]])
    valid = torch.ones(blocks, 7, dtype=torch.bool) if valid is None else valid
    return Carried(hidden, positions, valid)


@pytest.mark.parametrize("mark", ["embedding", "none", "projector"])
@pytest.mark.parametrize("regime", REGIMES)
def test_nothing_carried_is_the_baseline_bit_by_bit(tiny_llama, batch, regime, mark):
    baseline = make_drafter(tiny_llama, regime)
    drafter = make_drafter(tiny_llama, regime, carried=CarriedSettings(mark=mark))
    blocks = anchored_blocks(batch, ANCHORS)
    assert torch.equal(block_hidden(baseline, batch, blocks), block_hidden(drafter, batch, blocks))
    assert torch.equal(
        draft(baseline, batch.context, blocks), draft(drafter, batch.context, blocks)
    )
    if mark == "embedding":
        assert not drafter.carryover_marker.any()


def test_carried_rows_are_seen_by_their_own_block_alone(tiny_llama, batch):
    drafter = carryover_drafter(tiny_llama)
    blocks = anchored_blocks(batch, ANCHORS)
    rows = carried_rows(drafter)
    before = block_hidden(drafter, batch, replace(blocks, carried=rows))
    changed = rows.hidden_ARC.clone()
    changed[1] += 1
    after = block_hidden(drafter, batch, replace(blocks, carried=replace(rows, hidden_ARC=changed)))
    assert torch.equal(before[0], after[0]) and torch.equal(before[2], after[2])
    assert (before[1] != after[1]).any(-1).all()


def test_rows_that_do_not_exist_are_not_seen(tiny_llama, batch):
    drafter = carryover_drafter(tiny_llama)
    blocks = anchored_blocks(batch, ANCHORS)
    valid = torch.arange(7) > torch.tensor([[6], [3], [-1]])  # none, three, all
    rows = carried_rows(drafter, valid=valid)
    before = block_hidden(drafter, batch, replace(blocks, carried=rows))
    noise = torch.where(valid[..., None], rows.hidden_ARC, 100.0)
    after = block_hidden(drafter, batch, replace(blocks, carried=replace(rows, hidden_ARC=noise)))
    assert torch.equal(before, after)
    baseline = block_hidden(drafter, batch, blocks)
    torch.testing.assert_close(before[0], baseline[0], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(before[1], baseline[1], atol=1e-3)


def test_carried_rows_are_marked(tiny_llama, batch):
    """The same states as committed and as carried rows differ by the marker alone."""
    drafter = carryover_drafter(tiny_llama)
    blocks = anchored_blocks(batch, torch.tensor([20]))
    as_context = block_hidden(drafter, batch, blocks)
    shorter = replace(blocks, ends_A=blocks.ends_A - 5)
    rows = Carried(
        batch.hidden_TC[None, 15:20], batch.position_ids_T[None, 15:20],
        torch.ones(1, 5, dtype=torch.bool),
    )  # fmt: skip
    marked = block_hidden(drafter, batch, replace(shorter, carried=rows))
    assert not torch.allclose(as_context, marked, atol=1e-3)
    with torch.no_grad():
        drafter.carryover_marker.zero_()
    unmarked = block_hidden(drafter, batch, replace(shorter, carried=rows))
    torch.testing.assert_close(as_context, unmarked, atol=1e-5, rtol=1e-4)


def test_the_marker_is_added_after_fc_and_before_the_norm(tiny_llama, batch):
    """So states whose fusion is longer by the marker do the same without it."""
    drafter = carryover_drafter(tiny_llama)
    blocks = anchored_blocks(batch, ANCHORS)
    rows = carried_rows(drafter)
    marked = block_hidden(drafter, batch, replace(blocks, carried=rows))
    with torch.no_grad():
        offset = torch.linalg.lstsq(drafter.fc.weight, drafter.carryover_marker[:, None]).solution
        drafter.carryover_marker.zero_()
    moved = replace(rows, hidden_ARC=rows.hidden_ARC + offset.squeeze(1))
    unmarked = block_hidden(drafter, batch, replace(blocks, carried=moved))
    torch.testing.assert_close(marked, unmarked, atol=1e-4, rtol=1e-3)


def test_positions_of_carried_rows_matter(tiny_llama, batch):
    drafter = carryover_drafter(tiny_llama)
    blocks = anchored_blocks(batch, ANCHORS)
    rows = carried_rows(drafter)
    before = block_hidden(drafter, batch, replace(blocks, carried=rows))
    shifted = replace(rows, positions_AR=rows.positions_AR + 1)
    assert not torch.allclose(
        before, block_hidden(drafter, batch, replace(blocks, carried=shifted)), atol=1e-4
    )


def test_a_round_leaves_its_rejected_rows_at_their_positions():
    hidden = torch.randn(3, 4, 6)
    fields = carry(
        CarriedSettings(),
        hidden_ABC=hidden,
        positions_A=torch.tensor([10, 20, 30]),
        proposals_AB=torch.zeros(3, 4, dtype=torch.long),
        predictions_AB=None,
        accepted_A=torch.tensor([0, 3, 4]),
    )
    rows = fields["carried"]
    assert rows.positions_AR.tolist() == [[11, 12, 13, 14], [21, 22, 23, 24], [31, 32, 33, 34]]
    assert rows.valid_AR.tolist() == [[True] * 4, [False, False, False, True], [False] * 4]
    assert rows.hidden_ARC is hidden


@pytest.mark.parametrize(
    ("carried", "expected"),
    [
        # next anchor at anchor + a + 1; slot k stands at anchor + a + 1 + k
        ("draft_tokens", [[-1, 12, 13, 14, -1], [-1, -1, -1, -1, -1], [-1, 34, -1, -1, -1]]),
        ("target_tokens", [[-1, 51, 52, 53, 54], [-1, -1, -1, -1, -1], [-1, 73, 74, -1, -1]]),
    ],
)
def test_a_round_leaves_tokens_at_their_slots(carried, expected):
    fields = carry(
        CarriedSettings(carried=carried),
        hidden_ABC=torch.zeros(3, 4, 2),
        positions_A=torch.zeros(3, dtype=torch.long),
        proposals_AB=torch.tensor([[11, 12, 13, 14], [21, 22, 23, 24], [31, 32, 33, 34]]),
        # The target's choice after each proposal: row j predicts the position behind proposal j.
        predictions_AB=torch.tensor([[51, 52, 53, 54], [61, 62, 63, 64], [71, 72, 73, 74]]),
        accepted_A=torch.tensor([0, 4, 2]),
    )
    assert fields["hints_AS"].tolist() == expected


def test_carried_tokens_replace_masks_at_their_slots(tiny_llama, batch):
    drafter = make_drafter(tiny_llama, carried=CarriedSettings(carried="draft_tokens"))
    blocks = anchored_blocks(batch, ANCHORS)
    none = torch.full((3, 8), -1)
    some = none.clone()
    some[1, 2] = 50
    before = block_hidden(drafter, batch, replace(blocks, hints_AS=none))
    assert torch.equal(before, block_hidden(drafter, batch, blocks))
    after = block_hidden(drafter, batch, replace(blocks, hints_AS=some))
    assert torch.equal(before[0], after[0]) and (before[1] != after[1]).any()


def captured_draft_2(monkeypatch):
    """Records the blocks and anchors that draft 2 is supervised on."""
    seen = {}

    def record(drafter, batch, anchors, blocks, settings):
        seen.update(anchors=anchors, blocks=blocks)
        return supervise(drafter, batch, anchors, blocks, settings)

    monkeypatch.setattr(step_module, "supervise", record)
    return seen


def test_anchors_shift_past_the_accepted_and_carry_the_rejected(
    tiny_llama, model, batch, monkeypatch
):
    drafter = carryover_drafter(tiny_llama)
    anchors, accepted = torch.tensor([8, 10, 12, 30, 50]), [0, 2, 7, 7, 3]
    monkeypatch.setattr(step_module, "draw_anchors", lambda *_, **__: anchors)
    monkeypatch.setattr(step_module, "draft", oracle(batch, accepted))
    seen = captured_draft_2(monkeypatch)
    result = carryover_step(drafter, model, batch, settings=SETTINGS, carry=True)
    # Sorted by row: 8+1, 10+3, 12+8, 30+8, 50+4.
    assert seen["anchors"].tolist() == [9, 13, 20, 38, 54]
    blocks = seen["blocks"]
    assert torch.equal(blocks.tokens_A, batch.input_ids_T[seen["anchors"]])
    assert blocks.ends_A.tolist() == [9, 13, 20, 38, 54]
    assert blocks.carried.valid_AR.sum(1).tolist() == [7, 5, 0, 0, 4]
    # Positions of the second document count from its own start (row 40).
    assert blocks.carried.positions_AR[:, 0].tolist() == [9, 11, 13, 31, 11]
    metrics = result.metrics
    assert metrics["accepted_length/draft_1"] == pytest.approx(19 / 5)
    assert metrics["fully_accepted"] == pytest.approx(2 / 5)
    assert metrics["carried_rows"] == pytest.approx(16 / 5)
    assert metrics["anchors"] == 5


def test_the_recorded_token_decides_at_every_temperature(tiny_llama, model, monkeypatch):
    """A sampled recording differs from the target's most likely tokens, and still rules."""
    drafter = carryover_drafter(tiny_llama)
    greedy = [9]
    for _ in range(39):
        with torch.no_grad():
            greedy.append(int(model(torch.tensor([greedy])).logits[0, -1].argmax()))
    sampled = torch.tensor(greedy)
    sampled[12] = (sampled[12] + 1) % 300
    at_zero = read_batch(model, [(4, 36)], input_ids=torch.tensor(greedy))
    above_zero = read_batch(model, [(4, 36)], input_ids=sampled)
    monkeypatch.setattr(step_module, "draw_anchors", lambda *_, **__: torch.tensor([8]))
    for batch, drafted, accepted in (
        (at_zero, torch.tensor(greedy), 7),
        (above_zero, sampled, 7),
        (above_zero, torch.tensor(greedy), 3),
    ):
        monkeypatch.setattr(step_module, "draft", lambda *_, d=drafted: d[None, 9:16])
        result = carryover_step(drafter, model, batch, settings=SETTINGS, carry=True)
        assert result.metrics["accepted_length/draft_1"] == accepted


def test_a_fully_accepted_anchor_carries_nothing_and_still_trains(
    tiny_llama, model, batch, monkeypatch
):
    drafter = carryover_drafter(tiny_llama)
    monkeypatch.setattr(step_module, "draw_anchors", lambda *_, **__: torch.tensor([10]))
    monkeypatch.setattr(step_module, "draft", oracle(batch, [7]))
    result = carryover_step(drafter, model, batch, settings=SETTINGS, carry=True)
    assert result.metrics["carried_rows"] == 0 and result.metrics["tokens"] == 7
    result.loss.backward()
    assert drafter.fc.weight.grad.any()
    assert not drafter.carryover_marker.grad.any()
    control = carryover_step(drafter, model, batch, settings=SETTINGS, carry=False)
    torch.testing.assert_close(result.loss, control.loss)


@pytest.mark.parametrize("regime", REGIMES)
def test_gradients_reach_the_drafter_and_the_marker_only(tiny_llama, tiny, batch, regime):
    own_model = resolve(str(tiny("llama"))).load_model().requires_grad_(True)
    drafter = carryover_drafter(tiny_llama, regime)
    result = carryover_step(
        drafter, own_model, batch, settings=SETTINGS, generator=generator(), carry=True
    )
    result.loss.backward()
    assert all(parameter.grad is None for parameter in own_model.parameters())
    for name, parameter in drafter.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and parameter.grad.any(), name
        else:
            assert parameter.grad is None, name


def test_gradients_come_from_draft_2_only(tiny_llama, model, batch, monkeypatch):
    """They equal those of supervising the shifted blocks with the carried rows as constants."""
    drafter = carryover_drafter(tiny_llama)
    seen = captured_draft_2(monkeypatch)
    carryover_step(
        drafter, model, batch, settings=SETTINGS, generator=generator(), carry=True
    ).loss.backward()
    found = {name: p.grad for name, p in drafter.named_parameters()}
    drafter.zero_grad()
    assert not seen["blocks"].carried.hidden_ARC.requires_grad
    supervise(drafter, batch, seen["anchors"], seen["blocks"], SETTINGS.loss).loss.backward()
    for name, parameter in drafter.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter.grad, found[name]), name


def test_the_prefix_is_computed_where_the_batch_lacks_it(tiny_llama, model, batch):
    drafter = carryover_drafter(tiny_llama)

    def loss(of):
        return carryover_step(
            drafter, model, of, settings=SETTINGS, generator=generator(), carry=True
        ).loss

    torch.testing.assert_close(loss(batch), loss(replace(batch, prefix=None)))


@pytest.mark.parametrize("regime", REGIMES)
def test_control_shifts_alike_and_never_asks_the_target(tiny_llama, model, batch, regime):
    drafter = carryover_drafter(tiny_llama, regime)
    with_rows, without = (
        carryover_step(
            drafter, target, batch, settings=SETTINGS, generator=generator(), carry=carry
        )
        for target, carry in ((model, True), (None, False))
    )
    for name in ("anchors", "tokens", "accepted_length/draft_1", "fully_accepted"):
        assert with_rows.metrics[name] == without.metrics[name]
    assert without.metrics["carried_rows"] == 0 < with_rows.metrics["carried_rows"]


def test_a_baseline_drafter_cannot_carry(tiny_llama, model, batch):
    with pytest.raises(ConfigError, match="no carried context"):
        carryover_step(make_drafter(tiny_llama), model, batch, settings=SETTINGS, carry=True)
    drafter = carryover_drafter(tiny_llama)
    with pytest.raises(ConfigError, match="already"):
        drafter.add_carried_context(CarriedSettings())
    with pytest.raises(ConfigError, match="baseline drafter"):
        make_drafter(tiny_llama).add_carried_context(CarriedSettings(carried="nothing"))


def test_anchors_that_run_out_of_response_are_left_out(tiny_llama, model, monkeypatch):
    batch = read_batch(model, [(6, 4)])
    drafter = carryover_drafter(tiny_llama)
    monkeypatch.setattr(step_module, "draft", oracle(batch, [7, 7, 7]))
    result = carryover_step(drafter, model, batch, settings=SETTINGS, carry=True)
    assert result.metrics["anchors"] == 0 and result.loss == 0
    result.loss.backward()


@pytest.mark.parametrize("regime", REGIMES)
def test_one_sample_can_be_overfitted(tiny_llama, regime):
    """Draft 2 learns to continue from any rejected round."""
    model = resolve(str(tiny_llama)).load_model()
    drafter = make_drafter(tiny_llama, regime, carried=CarriedSettings())
    batch = read_batch(model, [(6, 42)])
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=3e-3)
    settings = StepSettings(num_anchors=100, loss=LossSettings(kl=0, ce=1, gamma=50))
    lengths = []
    for _ in range(200):
        result = carryover_step(drafter, model, batch, settings=settings, carry=True)
        result.loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        lengths.append(float(result.metrics["accepted_length/draft_2"]))
    # Blocks near the end of the response have fewer than 7 tokens to predict.
    longest = sum(min(7, 47 - row) for row in range(14, 47)) / 33
    assert lengths[0] < 0.5 and lengths[-1] > 0.9 * longest
    assert drafter.carryover_marker.norm() > 0


def test_packed_batch_moves_with_its_prefix(batch):
    moved = batch.to("cpu")
    assert moved.prefix is not None and torch.equal(moved.hidden_TC, batch.hidden_TC)
    assert random_batch([(2, 3)]).to("cpu").prefix is None
