"""Headroom and matched-anchor replay, held to what decoding round by round gives."""

import json
from collections import Counter
from dataclasses import replace
from itertools import chain

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from training_cases import carryover_drafter, make_drafter
from training_runs import rows, table
from typer.testing import CliRunner

from carryover.cli import app
from carryover.diagnostics import headroom as headrooms
from carryover.diagnostics.headroom import headroom
from carryover.diagnostics.replay import replay
from carryover.drafters import checkpoint
from carryover.drafters.drafting import draft
from carryover.errors import CheckpointError, DataError
from carryover.results import records
from carryover.results.runs import RunReader
from carryover.targets import resolve
from carryover.tracking import Tracker
from carryover.training.evaluate import carrying_rounds, decoding_rounds
from carryover.training.packing import Corpus
from carryover.training.states import OnlineStates
from carryover.training.step import recorded_acceptance

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def responses(tiny_llama):
    """What the target says greedily: half of the rows of `rows`, answered anew."""
    model = resolve(str(tiny_llama)).load_model()
    made = []
    for row in rows(12, longest=10):
        ids = torch.tensor([row["prompt_ids"]])
        out = model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)
        response = out[0, ids.shape[1] :].tolist()
        if len(response) > 3:
            made.append({**row, "temperature": 0.0, "response_ids": response, "finish": "stop"})
    return table(made)


def prepare(folder, responses, drafter):
    model = resolve(str(folder)).load_model()
    corpus = Corpus(responses, max_tokens=128)
    source = OnlineStates(
        model, layer_ids=list(drafter.target_layer_ids), corpus=corpus, keep_prefix=True
    )
    return model, corpus, [corpus.usable[:5], corpus.usable[5:]], source


@pytest.mark.parametrize("regime", ["dflash", "markov"])
def test_drafts_at_matched_anchors_are_those_of_drafting(tiny_llama, responses, regime):
    drafter = carryover_drafter(tiny_llama, regime)
    baseline = make_drafter(tiny_llama, regime, seed=1)
    model, corpus, packs, source = prepare(tiny_llama, responses, drafter)
    found = replay(drafter, model, corpus, packs, source, device=CPU, baseline=baseline)
    # the same by drafting, which picks tokens instead of ranking the recorded one
    accepted = {"on": [], "off": [], "baseline": []}
    for taken in carrying_rounds(drafter, model, corpus, packs, source, device=CPU):
        if taken.blocks.carried is None:
            continue
        has = taken.blocks.carried.valid_AR.any(1)
        plain = replace(taken.blocks, carried=None)
        context = taken.batch.context
        for name, proposals in {
            "on": draft(drafter, context, taken.blocks),
            "off": draft(drafter, context, plain),
            "baseline": draft(baseline, context, plain),
        }.items():
            count = recorded_acceptance(taken.batch, taken.anchors_A, proposals)
            accepted[name] += count[has].tolist()
    assert found.rounds == len(accepted["on"]) < found.all_rounds
    for name, counts in accepted.items():
        assert found.acceptance_length[name] == pytest.approx(1 + np.mean(counts))
    for name, gain in found.acceptance_gain.items():
        more = np.subtract(accepted["on"], accepted[name])
        assert gain.value == pytest.approx(more.mean())
        assert gain.error == pytest.approx(1.96 * more.std(ddof=1) / len(more) ** 0.5)
    assert (found.carried, found.mark) == ("hidden_states", "embedding")
    first = next(r for r in found.recalls if (r.position, r.top) == (1, 1))
    for name, counts in accepted.items():
        assert first.rates[name] == pytest.approx(np.mean([count > 0 for count in counts]))


def test_recalls_rise_with_k_and_count_only_matched_rounds(tiny_llama, responses):
    drafter = carryover_drafter(tiny_llama)
    model, corpus, packs, source = prepare(tiny_llama, responses, drafter)
    found = replay(drafter, model, corpus, packs, source, device=CPU)
    by = {(recall.position, recall.top): recall for recall in found.recalls}
    for position in range(1, drafter.proposal_length + 1):
        for name in ("on", "off"):
            if by[position, 1].rounds:
                assert by[position, 1].rates[name] <= by[position, 16].rates[name]
        assert by[position, 1].rounds == by[position, 16].rounds
    # ON and OFF have both matched wherever a position is counted
    counts = [by[position, 1].rounds for position in range(1, drafter.proposal_length + 1)]
    assert counts == sorted(counts, reverse=True)
    assert set(found.acceptance_length) == {"on", "off"}


def test_without_a_marker_and_projections_of_rejected_rows_nothing_differs(tiny_llama, responses):
    """A fresh Carryover drafter whose carried rows are copies of nothing: OFF equals Baseline."""
    baseline = make_drafter(tiny_llama)
    drafter = carryover_drafter(tiny_llama)  # the same weights, and a marker
    model, corpus, packs, source = prepare(tiny_llama, responses, drafter)
    found = replay(drafter, model, corpus, packs, source, device=CPU, baseline=baseline)
    assert found.acceptance_length["off"] == found.acceptance_length["baseline"]
    assert all(
        recall.rates["off"] == recall.rates["baseline"] for recall in found.recalls if recall.rounds
    )


def test_wrong_input_is_refused(tiny_llama, responses):
    drafter, plain = carryover_drafter(tiny_llama), make_drafter(tiny_llama)
    model, corpus, packs, source = prepare(tiny_llama, responses, drafter)
    arguments = (model, corpus, packs, source)
    with pytest.raises(CheckpointError, match="no carried context"):
        replay(plain, *arguments, device=CPU)
    shorter = make_drafter(tiny_llama, proposal_length=3)
    with pytest.raises(CheckpointError, match="differs in proposal_length: 3"):
        replay(drafter, *arguments, device=CPU, baseline=shorter)
    sampled = Corpus(table(rows(6)), max_tokens=128)
    with pytest.raises(DataError, match="temperature 0"):
        replay(drafter, model, sampled, [sampled.usable], source, device=CPU)


def few_token_drafter(folder, responses, regime="dflash"):
    """One that proposes the commonest tokens of the responses alone, and so hits some by chance."""
    counts = Counter(chain.from_iterable(responses["response_ids"].to_pylist()))
    return make_drafter(folder, regime, token_counts=counts, draft_vocab_size=6)


@pytest.mark.parametrize("regime", ["dflash", "markov"])
def test_what_rejected_rows_predict_is_what_the_target_says_after_them(
    tiny_llama, responses, regime
):
    drafter = few_token_drafter(tiny_llama, responses, regime)
    model, corpus, packs, source = prepare(tiny_llama, responses, drafter)
    found = headroom(drafter, model, corpus, packs, source, device=CPU)

    length = drafter.proposal_length
    rounds = rejected = rows_seen = exactly = near = after = outside = 0
    proposable = set(drafter.draft_to_target.tolist())
    met = np.zeros((4, length))
    followed = []
    for taken in decoding_rounds(drafter, corpus, packs, source, device=CPU):
        batch = taken.batch
        ids, documents = batch.input_ids_T.tolist(), batch.document_ids_T.tolist()
        anchors, accepted = taken.anchors_A.tolist(), taken.accepted_A.tolist()
        proposals = draft(drafter, batch.context, taken.blocks).tolist()
        rounds += len(anchors)
        for place, (anchor, count, proposed) in enumerate(
            zip(anchors, accepted, proposals, strict=True)
        ):
            last = place + 1 == len(anchors) or documents[anchors[place + 1]] != documents[anchor]
            if last or count == length:
                continue
            start, end = documents.index(documents[anchor]), anchor + 1
            while end < len(ids) and documents[end] == documents[anchor]:
                end += 1
            # one plain pass over the text so far and the proposals
            text = torch.tensor([ids[start : anchor + 1] + proposed])
            with torch.no_grad():
                told = model(text).logits[0].argmax(-1).tolist()[-length:]
            followed.append(accepted[place + 1])
            following = proposals[place + 1]
            for row in range(count + 1, length + 1):
                at, slot = anchor + row + 1, row - count
                if at < end:
                    met[0, slot - 1] += 1
                    is_right = regime == "dflash" and following[slot - 1] == ids[at]
                    met[1, slot - 1] += is_right
                    met[2, slot - 1] += told[row - 1] == ids[at]
                    met[3, slot - 1] += told[row - 1] == ids[at] and not is_right
            if anchor + length + 2 >= end:
                continue
            rejected += 1
            outside += ids[anchor + count + 1] not in proposable
            for row in range(count + 1, length + 1):
                predicted, at = told[row - 1], anchor + row + 1
                rows_seen += 1
                exactly += predicted == ids[at]
                near += predicted in ids[at - 1 : at + 2]
                after += row > count + 1 and proposed[row - 1] == ids[anchor + row]
    assert found.rounds == rounds and found.rejected_rounds == rejected > 20
    assert near >= exactly > 0
    totals = [found.rejected_rows, found.reconverged, found.reconverged_exactly,
              found.accepted_after_rejection, found.outside_vocabulary]  # fmt: skip
    expected = (rows_seen, near, exactly, after, outside)
    assert totals == pytest.approx([n / rejected for n in expected]) and rejected > outside > 0
    assert found.alone.value == pytest.approx(1 + np.mean(followed))
    assert [slot.drafts for slot in found.slots] == met[0][met[0] > 0].tolist()
    for slot in found.slots:
        count, right, told, only = met[:, slot.slot - 1]
        assert slot.carried == pytest.approx(told / count)
        if regime == "dflash":  # a Markov draft is teacher-forced here
            assert slot.drafter == pytest.approx(right / count)
            assert slot.only_carried == pytest.approx(only / count)


def drafts(informed, *, count=400, seed=0):
    """Drafts that are right now and then, beside rows that tell the truth or nothing."""
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randn(6, count, 3, 8, generator=draw)
    truth = torch.randint(8, (count, 3), generator=draw)
    at = torch.nn.functional.one_hot(truth, 8).float()
    scores[0] += 1.5 * at
    if informed:
        scores[2] += 3.0 * at
    return headrooms._Drafts(
        response_N=torch.arange(count) // 10,
        scores_FNBK=scores,
        truth_NB=truth,
        valid_NB=torch.ones(count, 3, dtype=torch.bool),
    )


def test_a_mixture_gains_by_rows_that_tell_and_not_by_noise():
    alone, mixed, gain = headrooms._mixture(drafts(informed=True))
    assert mixed.value > 1.3 * alone.value and gain.low > 1.2
    alone, mixed, gain = headrooms._mixture(drafts(informed=False))
    assert gain.low < 1.0 < gain.high + 0.05 and gain.value == pytest.approx(1.0, abs=0.05)


def test_headroom_needs_enough_rejected_rounds(tiny_llama, responses):
    drafter = make_drafter(tiny_llama)
    model, corpus, packs, source = prepare(tiny_llama, responses, drafter)
    with pytest.raises(DataError, match="only 1 responses"):
        headroom(drafter, model, corpus, [packs[0][:1]], source, device=CPU)


def test_the_headroom_command_records_what_it_prints(tmp_path, monkeypatch, tiny_llama, responses):
    monkeypatch.chdir(tmp_path)
    pq.write_table(responses, tmp_path / "responses.parquet")
    checkpoint.save(make_drafter(tiny_llama), tmp_path / "baseline", {})
    words = ["checkpoint", "headroom", "baseline", "-d", "responses.parquet"]
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, words, catch_exceptions=False)
    assert shown.exit_code == 0 and "re-converge" in shown.output and "mixed with" in shown.output
    found = json.loads(CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False).stdout)
    record = RunReader(Tracker()).diagnosis(found["mlflow_run"])
    assert record.name == "baseline" and record.finished
    assert record.metrics["reconverged"] == pytest.approx(found["reconverged"])
    shown = records.headroom_table([record]) + records.slot_table([record])
    assert f"{found['alone']['value']:.2f}" in shown
    assert f"{found['slots'][0]['only_carried']:.3f}" in shown


def test_the_replay_command_records_what_it_prints(tmp_path, monkeypatch, tiny_llama, responses):
    monkeypatch.chdir(tmp_path)
    pq.write_table(responses, tmp_path / "responses.parquet")
    checkpoint.save(carryover_drafter(tiny_llama), tmp_path / "carryover", {})
    checkpoint.save(make_drafter(tiny_llama), tmp_path / "baseline", {})
    words = ["checkpoint", "replay", str(tmp_path / "carryover"), "-n", "6"]
    words += ["-d", str(tmp_path / "responses.parquet"), "--baseline", str(tmp_path / "baseline")]
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, words, catch_exceptions=False)
    assert shown.exit_code == 0 and "ON-OFF @16" in shown.output and "rounds have" in shown.output
    printed = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    found = json.loads(printed.stdout)
    assert set(found["acceptance_length"]) == {"on", "off", "baseline"}
    assert len(found["recalls"]) == 14
    record = RunReader(Tracker()).diagnosis(found["mlflow_run"])
    assert record.metrics["acceptance_length/on"] == found["acceptance_length"]["on"]
    shown = records.replay_table([record])
    assert f"{found['acceptance_length']['baseline']:.2f}" in shown
    assert f"{100 * found['recalls'][0]['gain']:+.1f}" in shown
    shown = records.ablation_table([RunReader(Tracker()).replay(record.id)])
    gain = found["acceptance_gain"]["baseline"]
    assert "| hidden states | embedding |" in shown
    assert f"{gain['value']:+.3f} ± {gain['error']:.3f}" in shown
