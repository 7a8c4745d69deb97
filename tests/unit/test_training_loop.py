"""The training loop without Ray: resuming, stopping, skipping, keeping, learning."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from training_runs import Remember, make_run, rows, train, weights

from carryover.drafters import checkpoint
from carryover.errors import CheckpointError, ConfigError
from carryover.training import carryover
from carryover.training import evaluate as evaluation
from carryover.training.anchors import block_labels
from carryover.training.session import Stopped, build_loop
from carryover.training.snapshots import read_progress
from carryover.training.step import recorded_acceptance
from carryover.training.verification import verify
from carryover.training.workers import Workers


def assert_same_weights(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("kind", ["baseline", "carryover", "control"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, tiny_llama, kind):
    start = None
    if kind != "baseline":
        first = make_run(tmp_path / "start", tiny_llama, max_steps=3)
        train(first)
        start = first.run_folder / "last"
    settings = {"kind": kind, "start_from": start, "regime": "markov"}
    whole = make_run(tmp_path / "whole", tiny_llama, **settings)
    _, uninterrupted = train(whole)
    assert len(uninterrupted.losses()) == 12

    parts = make_run(tmp_path / "parts", tiny_llama, **settings)
    seen, evaluations = [], []
    for stop_at in (3, 7, None):
        loop, reporter = train(parts, stop_at=stop_at)
        assert loop.progress.step == (stop_at or 12)
        seen += reporter.losses()
        evaluations += [event["metrics"] for event in reporter.of("evaluation")]
    assert seen == uninterrupted.losses()
    assert evaluations == [event["metrics"] for event in uninterrupted.of("evaluation")]
    assert_same_weights(weights(parts.run_folder / "last"), weights(whole.run_folder / "last"))
    optimizers = [
        load_file(run.run_folder / "last" / "training" / "optimizer.safetensors")
        for run in (parts, whole)
    ]
    assert_same_weights(*optimizers)


def test_a_run_that_died_between_checkpoints_repeats_the_steps_since(tmp_path, tiny_llama):
    _, uninterrupted = train(make_run(tmp_path / "whole", tiny_llama))
    assignment = make_run(tmp_path / "parts", tiny_llama)

    class Die(Remember):
        def report(self, event):
            super().report(event)
            if event["kind"] == "step" and event["step"] == 7:
                raise MemoryError

    died = Die()
    with pytest.raises(MemoryError):
        build_loop(assignment, workers=Workers(), reporter=died).run()
    (assignment.run_folder / "checkpoints" / ".writing-step-00000007").mkdir()
    loop, resumed = train(assignment)
    assert [event["step"] for event in resumed.of("step")] == list(range(6, 13))
    assert resumed.losses() == uninterrupted.losses()[5:]
    assert loop.progress.finished
    assert not list((assignment.run_folder / "checkpoints").glob(".writing-*"))


def test_every_trained_weight_moves_and_nothing_else_does(tmp_path, tiny_llama):
    assignment = make_run(
        tmp_path / "a", tiny_llama, drafter={"draft_vocab_size": 128}, regime="markov"
    )
    loop, _ = train(assignment)
    before, after = (weights(assignment.run_folder / name) for name in ("initial", "last"))
    trained = {name for name, p in loop.model.named_parameters() if p.requires_grad}
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) == (name not in trained), name
    assert trained < before.keys() and before.keys() - trained == {"lm_head.weight", "d2t", "t2d"}


def test_the_run_leaves_checkpoints_that_load_and_deletes_old_ones(tmp_path, tiny_llama):
    assignment = make_run(tmp_path / "a", tiny_llama, checkpoints={"every_steps": 2, "keep": 2})
    loop, reporter = train(assignment)
    folder = assignment.run_folder
    best = loop.progress.best["step"]
    kept = {int(path.name[-8:]) for path in (folder / "checkpoints").iterdir()}
    assert kept == {10, 12, best}
    assert (folder / "last").resolve().name == "step-00000012"
    assert (folder / "best").resolve().name == f"step-{best:08d}"
    assert [event["step"] for event in reporter.of("checkpoint")][-1] == 12
    for name in ("best", "last"):
        drafter = checkpoint.load(folder / name, assignment.target)
        assert drafter.proposal_length == 4
    description = checkpoint.describe(folder / "last")
    assert description["provenance"]["step"] == 12
    assert description["provenance"]["config"]["optimizer"]["lr"] == 3e-3
    assert not [file for file in folder.rglob("*") if file.suffix in (".pt", ".pkl", ".bin", ".py")]


def test_a_step_that_is_not_finite_changes_nothing_and_too_many_end_the_run(tmp_path, tiny_llama):
    assignment = make_run(
        tmp_path / "a",
        tiny_llama,
        optimizer={"max_skipped_steps": 2},
        checkpoints={"every_steps": 1},
    )
    reporter = Remember()
    loop = build_loop(assignment, workers=Workers(), reporter=reporter)
    honest = loop._step

    def broken(drafter, batch, *, generator):
        result = honest(drafter, batch, generator=generator)
        step = loop.progress.step
        if step == 3:
            return type(result)(result.loss * float("nan"), result.metrics)
        if step in (5, 6):  # a finite loss with a gradient that is not
            wild = sum((p * float("inf")).sum() for p in drafter.parameters() if p.requires_grad)
            return type(result)(
                result.loss + (wild - wild.detach()).nan_to_num() * 0, result.metrics
            )
        return result

    loop._step = broken
    with pytest.raises(ConfigError, match=r"3 of 7 steps .*max_skipped_steps allows 2.*step-0"):
        loop.run()
    assert [event["skipped_steps"] for event in reporter.of("step")] == [0, 0, 0, 1, 1, 2, 3]
    saved = {int(p.name[-8:]): p for p in (assignment.run_folder / "checkpoints").iterdir()}
    assert read_progress(saved[6]).skipped_steps == 2
    assert_same_weights(weights(saved[5]), weights(saved[6]))
    # The run can go on from there.
    _, resumed = train(assignment)
    assert resumed.of("step")[-1]["skipped_steps"] == 2


def test_cached_states_train_as_online_ones(tmp_path, tiny_llama):
    _, online = train(make_run(tmp_path / "online", tiny_llama))
    hidden = {"cache": "disk", "cache_folder": str(tmp_path / "hs"), "cache_dtype": "float32"}
    _, cached = train(make_run(tmp_path / "cached", tiny_llama, hidden_states=hidden))
    assert cached.losses() == pytest.approx(online.losses(), rel=1e-4)
    tokens = sum(event["tokens"] for event in cached.of("cached"))
    assert tokens == sum(len(r["prompt_ids"]) + len(r["response_ids"]) for r in rows())
    _, again = train(make_run(tmp_path / "again", tiny_llama, hidden_states=hidden))
    assert again.of("cached") == [] and again.losses() == cached.losses()


def test_a_cached_prefix_trains_as_an_online_one_and_arms_share_it(tmp_path, tiny_llama):
    first = make_run(tmp_path / "start", tiny_llama, max_steps=3)
    train(first)
    settings = {"start_from": first.run_folder / "last", "optimizer": {"marker_only_steps": 2}}
    hidden = {"cache": "disk", "cache_folder": str(tmp_path / "hs"), "cache_dtype": "float32",
              "cache_prefix": True}  # fmt: skip
    for kind in ("carryover", "control"):
        online = make_run(tmp_path / kind / "online", tiny_llama, kind=kind, **settings)
        cached = make_run(
            tmp_path / kind / "cached", tiny_llama, kind=kind, hidden_states=hidden, **settings
        )
        (_, expected), (_, found) = train(online), train(cached)
        assert found.losses() == pytest.approx(expected.losses(), rel=1e-4)
        assert bool(found.of("cached")) == (kind == "carryover")
        one, other = (
            [event["metrics"]["acceptance_length"] for event in reporter.of("evaluation")]
            for reporter in (found, expected)
        )
        assert one == pytest.approx(other)


def test_stopping_while_the_cache_is_filled_keeps_whole_parts(tmp_path, tiny_llama):
    hidden = {"cache": "disk", "cache_folder": str(tmp_path / "hs"), "cache_dtype": "float32"}
    assignment = make_run(tmp_path / "a", tiny_llama, data=rows(80), hidden_states=hidden)

    class StopSoon(Remember):
        def stop_requested(self):
            return len(self.of("cached")) == 9  # in the second part

    with pytest.raises(Stopped):
        build_loop(assignment, workers=Workers(), reporter=StopSoon())
    (folder,) = (tmp_path / "hs").iterdir()
    assert [file.name for file in folder.glob("*part*")] == ["part-000000.arrow"]
    loop, reporter = train(assignment)
    assert len(reporter.of("cached")) == 2 and loop.progress.finished


def test_training_raises_the_held_out_acceptance_of_learnable_text(tmp_path, tiny_llama):
    """Responses that count upwards can be learned; untrained drafters accept almost nothing."""
    data = [
        {**row, "response_ids": [10 + (index * 7 + k) % 40 for k in range(30)], "finish": "length"}
        for index, row in enumerate(rows(30))
    ]
    assignment = make_run(
        tmp_path / "a", tiny_llama, data=data, max_steps=150, step={"loss": {"kl": 0.0}},
        evaluation={"every_steps": 30}, checkpoints={"every_steps": 1000},
    )  # fmt: skip
    loop, reporter = train(assignment)
    lengths = [event["metrics"]["acceptance_length"] for event in reporter.of("evaluation")]
    assert lengths[-1] > 2.5 and loop.progress.best["acceptance_length"] == max(lengths)
    saved = [event["step"] for event in reporter.of("checkpoint")]
    improved = [event["step"] for event in reporter.of("evaluation") if event["improved"]]
    assert saved == sorted({*improved, 150})


def test_carryover_training_moves_the_marker_and_control_has_none(tmp_path, tiny_llama):
    baseline = make_run(tmp_path / "start", tiny_llama, max_steps=6)
    train(baseline)
    start = baseline.run_folder / "best"
    losses = {}
    for kind in ("carryover", "control"):
        assignment = make_run(tmp_path / kind, tiny_llama, kind=kind, start_from=start)
        _, reporter = train(assignment)
        losses[kind] = reporter.losses()
        # The start is evaluated and kept: training might only make it worse.
        assert reporter.of("evaluation")[0]["step"] == 0
        metrics = reporter.of("step")[-1]["metrics"]
        assert {"accepted_length/draft_1", "accepted_length/draft_2", "fully_accepted"} <= set(
            metrics
        )
        assert ("marker_norm" in metrics) == (kind == "carryover")
        saved = weights(assignment.run_folder / "last")
        assert ("carryover_marker" in saved) == (kind == "carryover")
        description = checkpoint.describe(assignment.run_folder / "last")
        assert description["kind"] == {"carryover": "carryover", "control": "baseline"}[kind]
    assert saved.keys() == weights(start).keys()
    marker = weights(tmp_path / "carryover" / "run" / "last")["carryover_marker"]
    assert marker.norm() > 0
    assert losses["carryover"] != losses["control"]


def test_what_carried_rows_tell_is_learned(tmp_path, tiny_llama, monkeypatch):
    """A positive control: where rows tell what follows, the drafter learns to read them.

    Responses are random, so nothing else tells. The target verifies the recorded tokens in place of
    the proposals, so each carried row is the state of a token that the next draft must predict.
    """
    data = [
        {**row, "response_ids": np.random.default_rng(row["id"]).integers(5, 320, 40).tolist()}
        for row in rows(64)
    ]
    shape = {"drafter": {"proposal_length": 3}, "data": data}
    baseline = make_run(tmp_path / "start", tiny_llama, max_steps=2, **shape)
    train(baseline)
    taken = {}

    def remember(batch, anchors_A, tokens_AB):
        taken["rows_AB"], _ = block_labels(batch, anchors_A, tokens_AB.shape[1])
        taken["batch"] = batch
        return recorded_acceptance(batch, anchors_A, tokens_AB)

    def verify_recorded(model, *, tokens_AB, **values):
        recorded_AB = taken["batch"].input_ids_T[taken["rows_AB"]]
        return verify(model, tokens_AB=recorded_AB, **values)

    for module in (carryover, evaluation):
        monkeypatch.setattr(module, "recorded_acceptance", remember)
    monkeypatch.setattr(carryover, "verify", verify_recorded)
    assignment = make_run(
        tmp_path / "more", tiny_llama, kind="carryover", start_from=baseline.run_folder / "last",
        max_steps=140, evaluation={"every_steps": 1000}, checkpoints={"every_steps": 1000},
        step={"num_anchors": 64, "loss": {"kl": 0.0}}, **shape,
    )  # fmt: skip
    _, reporter = train(assignment)
    metrics = reporter.of("step")[-1]["metrics"]
    # the next anchor follows the old one, so rows stand at its slots 1 and 2 and none at slot 3
    assert metrics["accuracy/position_1"] > 0.5 and metrics["accuracy/position_2"] > 0.5
    assert metrics["accuracy/position_3"] < 0.2 and metrics["accepted_length/draft_1"] < 0.2


@pytest.mark.parametrize(
    ("steps", "trained", "still"),
    [
        ({"max_steps": 3}, "all", lambda name: name != "carryover_marker"),
        ({"max_steps": 5}, "all", lambda name: name.startswith("lm_head")),
        (
            {"max_steps": 5}, "attention",
            lambda name: ".mlp." in name or name.startswith(("markov_head", "lm_head")),
        ),
    ],
)  # fmt: skip
def test_what_the_continuation_leaves_as_it_was(tmp_path, tiny_llama, steps, trained, still):
    baseline = make_run(tmp_path / "start", tiny_llama, max_steps=2, regime="markov")
    train(baseline)
    start = baseline.run_folder / "last"
    assignment = make_run(
        tmp_path / "more", tiny_llama, kind="carryover", start_from=start, regime="markov",
        optimizer={"marker_only_steps": 3}, continuation={"trained": trained}, **steps,
    )  # fmt: skip
    train(assignment)
    before, after = (weights(assignment.run_folder / name) for name in ("initial", "last"))
    assert after.keys() == before.keys() and "carryover_marker" in after
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) == still(name), name


def test_bfloat16_computes_beside_float32_weights(tmp_path, tiny_llama):
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assignment = make_run(tmp_path / "a", tiny_llama, precision="bfloat16",
                              target_precision="bfloat16")  # fmt: skip
        workers = Workers(parallelism="fsdp")
        train(assignment, stop_at=5, workers=workers)
        _, reporter = train(assignment, workers=workers)
        whole = make_run(tmp_path / "b", tiny_llama, precision="bfloat16",
                         target_precision="bfloat16")  # fmt: skip
        _, uninterrupted = train(whole, workers=workers)
    finally:
        torch.distributed.destroy_process_group()
    assert reporter.losses() == uninterrupted.losses()[5:]
    assert_same_weights(weights(assignment.run_folder / "last"), weights(whole.run_folder / "last"))
    assert {t.dtype for t in weights(whole.run_folder / "last").values()} == {torch.float32}
    _, exact = train(make_run(tmp_path / "c", tiny_llama))
    assert uninterrupted.losses() == pytest.approx(exact.losses(), rel=0.05)


def test_a_checkpoint_that_was_tampered_with_is_refused(tmp_path, tiny_llama):
    assignment = make_run(tmp_path / "a", tiny_llama, max_steps=20)
    train(assignment, stop_at=5)
    state = (assignment.run_folder / "last").resolve() / "training" / "state.json"
    good = state.read_text()
    state.write_text(json.dumps({**json.loads(good), "format": 2}))
    with pytest.raises(CheckpointError, match="another version"):
        train(assignment)
    state.write_text("{")
    with pytest.raises(CheckpointError, match="cannot be resumed from"):
        train(assignment)
    state.write_text(good)
    optimizer = state.with_name("optimizer.safetensors")
    optimizer.write_bytes(optimizer.read_bytes()[:-20])
    with pytest.raises(CheckpointError, match="cannot be read"):
        train(assignment)
    shutil.rmtree(state.parent)
    with pytest.raises(CheckpointError, match="cannot be resumed from"):
        train(assignment)
