"""Benches and training runs of known truth in a real MLflow store, for tests of the results page.

A prompt's rounds accept each of 3 proposals' places independently, with a probability that the
arm sets and the prompt bends; a round costs the same time on every arm.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from math import nan
from pathlib import Path
from unittest import mock

from bench_backends import RuleBackend, make_prompts

from carryover.bench import statistics
from carryover.bench.client import Response
from carryover.bench.records import Condition
from carryover.bench.session import Bench, run_bench
from carryover.bench.settings import BenchConfig
from carryover.bench.statistics import Interval
from carryover.diagnostics.headroom import Headroom, SlotHeadroom
from carryover.diagnostics.recording import record
from carryover.diagnostics.replay import Difference, Recall, Replay
from carryover.diagnostics.session import Job

PROPOSALS, ROUNDS, ROUND_S = 3, 40, 0.010
# the target alone takes 0.9 of a round for a token
TOKEN_S = 0.9 * ROUND_S
ENGINE = {"max_model_len": 256}


class PlantedBackend(RuleBackend):
    """Answers with planted acceptance lengths."""

    def __init__(self, lengths, *, seed=0, miscount=0.0):
        super().__init__(miscount=miscount)
        self.lengths, self.seed = lengths, seed

    def _answer(self, unit, prompt):
        draw = random.Random(f"{self.seed} {unit.arm} {unit.condition.title} {prompt.id}")
        length = self.lengths[unit.arm]
        load = unit.condition.concurrency or 1
        histogram = []
        if length is None:
            tokens, seconds = 100, 100 * TOKEN_S * load**0.5
        else:
            bend = random.Random(prompt.id).uniform(0.8, 1.2)
            chance = (length - 1) / PROPOSALS * bend
            accepted = [sum(draw.random() < chance for _ in range(PROPOSALS))
                        for _ in range(ROUNDS)]  # fmt: skip
            histogram = [accepted.count(number) for number in range(PROPOSALS + 1)]
            tokens, seconds = sum(accepted) + ROUNDS + 1, ROUNDS * ROUND_S * load**0.5
        rounds = sum(histogram)
        return Response(
            started_s=0.0, ttft_s=0.01, latency_s=seconds, prompt_tokens=5, output_tokens=tokens,
            finish="stop", text="same", num_drafts=rounds, num_draft_tokens=PROPOSALS * rounds,
            num_accepted_tokens=max(0, tokens - rounds - 1) if rounds else 0,
            accepted_histogram=histogram, status=200,
        )  # fmt: skip


def record_bench(
    tracker, folder, lengths, *, mode="offline", conditions=None, count=48, seed=0, miscount=0.0,
    stop_after=None, sets=("chat", "code"),
):  # fmt: skip
    """Run a bench with these acceptance lengths by arm (None: no drafter); its run's id.

    Args:
        stop_after: units after which Ctrl-C ends it.
    """
    backend = PlantedBackend(lengths, seed=seed, miscount=miscount)
    if stop_after is not None:

        def stop(unit):
            if len(backend.sent) >= stop_after:
                raise KeyboardInterrupt

        backend.stop_at = stop
    arms = {
        name: {"target": "t", "drafter": None if length is None else name, "engine": ENGINE,
               "dtype": "float32"}
        for name, length in lengths.items()
    }  # fmt: skip
    config = BenchConfig.parse(
        {"prompts": "/home/someone/some.jsonl", "out": folder, "block_size": 8, "report": False}
    )
    bench = Bench(
        config, mode, arms, make_prompts(count, sets), conditions or [Condition(mode)],
        lambda _: nullcontext(backend),
    )  # fmt: skip
    with mock.patch.object(statistics, "RESAMPLES", 100):
        try:
            return run_bench(bench, tracker=tracker).run_id
        except KeyboardInterrupt:
            (cut,) = folder.iterdir()
            return str(cut)


def record_diagnoses(tracker):
    """A headroom and a replay of drafters with 2 proposals."""
    job = Job(Path("/home/someone/drafter"), Path("responses.parquet"))
    slots = [SlotHeadroom(1, 90, 0.71, 0.25, 0.0625), SlotHeadroom(2, 80, 0.5, 0.25, 0.125)]
    alone, mixed = Interval(2.1, 2.0, 2.2), Interval(2.17, 2.1, 2.3)
    gain = Interval(1.034, 1.011, 1.058)
    found = Headroom(100, 90, 2.5, 1.75, 0.5, 0.25, 0.125, slots, alone, mixed, gain)
    record(tracker, "headroom", "small headroom", job, found)
    rates = {"on": 0.75, "off": 0.7}
    recalls = [Recall(1, 1, 90, rates, 0.05, 0.013), Recall(2, 1, 0, {}, nan, nan)]
    lengths, gains = {"on": 2.25, "off": 2.2}, {"off": Difference(0.05, 0.031)}
    replayed = Replay("target_tokens", "none", 90, 99, lengths, gains, recalls)
    record(tracker, "replay", "small replay", job, replayed)


def record_training(
    tracker, name, kind, *, regime="dflash", hours=1.0, states_hours=0.0, acceptance=2.0
):
    """A training run with the parameters, tags and metrics that the training job records."""
    with tracker.run(
        experiment="train", name=name,
        tags={"carryover.training": kind, "carryover.run_folder": "runs/train/" + name},
    ) as run:  # fmt: skip
        resources = {"num_workers": 1, "cpus_per_worker": 2, "gpus_per_worker": 0}
        run.log_params({"name": name, "regime": regime, "training": kind, "resources": resources})
        summary = {"steps": 100, "trained_s": 3600 * hours, "tokens": 5_000_000,
                   "states_s": 3600 * states_hours,
                   "best/acceptance_length": acceptance, "best/step": 90}  # fmt: skip
        run.log_metrics({f"summary/{key}": value for key, value in summary.items()}, 100)
    return run.id
