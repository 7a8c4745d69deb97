"""Matched-anchor replay, held to what decoding round by round gives."""

import json
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from training_cases import carryover_drafter, make_drafter
from training_runs import rows, table
from typer.testing import CliRunner

from carryover.cli import app
from carryover.diagnostics.replay import replay
from carryover.drafters import checkpoint
from carryover.drafters.drafting import draft
from carryover.errors import CheckpointError, DataError
from carryover.targets import resolve
from carryover.training.evaluate import carrying_rounds
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


def test_the_command(tmp_path, tiny_llama, responses):
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
