"""A backend for tests of the bench that answers by rule, at once."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

from carryover.bench import statistics
from carryover.bench.client import Choice, Response
from carryover.bench.measure import Answers
from carryover.bench.records import Condition
from carryover.bench.session import Bench, run_bench
from carryover.bench.settings import BenchConfig
from carryover.data.prompts import Prompt

ENGINE = {"max_model_len": 256}
ARMS = {
    "autoregressive": {"target": "t", "drafter": None, "engine": ENGINE, "dtype": "float32"},
    "baseline": {"target": "t", "drafter": "b", "engine": ENGINE, "dtype": "float32"},
    "carryover": {"target": "t", "drafter": "c", "engine": ENGINE, "dtype": "float32"},
}
# seconds for 24 tokens, and proposals accepted in each of 8 rounds of 3
SPEED = {"autoregressive": 2.4, "baseline": 1.2, "carryover": 1.0}
ACCEPTED = {"baseline": 2, "carryover": 3}


@dataclass
class RuleBackend:
    """Answers every prompt with 24 tokens.

    Attributes:
        stop_at: called before each unit; may raise.
        fail: whether a request fails.
        miscount: added to every counter of rounds.
        texts: other texts than the prompt's own, by arm and prompt.
        gap: by which the reference prefers its own token where texts differ.
        dead: arms that answer nothing.
    """

    stop_at: object = None
    fail: object = lambda arm, prompt: False
    miscount: float = 0.0
    texts: dict = field(default_factory=dict)
    gap: float = 0.001
    dead: set = field(default_factory=set)
    sent: list = field(default_factory=list)
    closed: bool = False

    def prepare(self, arms, conditions):
        """Nothing to warm."""

    def order(self, plan):
        return list(plan)

    def notes(self):
        return []

    def send(self, unit, advance):
        if self.stop_at is not None:
            self.stop_at(unit)
        self.sent.append(unit)
        responses = []
        for prompt in unit.prompts:
            responses.append(self._answer(unit, prompt))
            advance()
        drafts = sum(answer.num_drafts for answer in responses)
        counted = {
            "num_drafts": drafts + self.miscount,
            "num_draft_tokens": 3.0 * drafts,
            "num_accepted_tokens": float(sum(a.num_accepted_tokens for a in responses)),
        } | {
            f"num_accepted_tokens_per_pos.{place}": float(
                sum(sum(a.accepted_histogram[place + 1 :]) for a in responses)
            )
            for place in range(3)
        }
        seconds = sum(answer.latency_s or 0.0 for answer in responses)
        return Answers(responses, seconds, counted)

    def problem(self, arm):
        return "nobody there" if arm in self.dead else None

    def end_window(self, units, ledger):
        """Units have counts of their own."""

    def choices(self, arm, prompt, condition):
        token = self.texts.get((arm, prompt.id), "same")
        others = {text: -0.5 - self.gap for text in {*self.texts.values(), "same"} - {token}}
        return [
            Choice("first", -0.1, {"first": -0.1}),
            Choice(token, -0.5, {token: -0.5, **others}),
        ]

    def _answer(self, unit, prompt):
        arm = unit.arm
        if arm in self.dead or self.fail(arm, prompt):
            return Response(0.0, status=500, error="boom")
        accepted = ACCEPTED.get(arm)
        rounds = 0 if accepted is None else 8
        histogram = [0, 0, 0, 0]
        histogram[accepted or 0] = rounds
        return Response(
            started_s=0.0, ttft_s=0.1, latency_s=SPEED[arm], prompt_tokens=5, output_tokens=24,
            finish="stop", text=self.texts.get((arm, prompt.id), "same"), num_drafts=rounds,
            num_draft_tokens=3 * rounds, num_accepted_tokens=rounds * (accepted or 0),
            accepted_histogram=histogram if rounds else [], status=200,
        )  # fmt: skip


def make_prompts(count=12, categories=("chat", "code")):
    """Prompts of alternating categories."""
    return [Prompt(n, "s", categories[n % len(categories)], (f"prompt {n}",)) for n in range(count)]


def run_rule_bench(folder, backend=None, *, arms=ARMS, conditions=None, count=12, **options):
    """Run a bench on a `RuleBackend`; the rest are settings, or arguments of `run_bench`."""
    backend = backend or RuleBackend()
    passed = {name: options.pop(name) for name in list(options)
              if name in ("resume", "on_partial", "on_progress", "tracker")}  # fmt: skip

    @contextmanager
    def connect(_):
        yield backend
        backend.closed = True

    settings = {"prompts": "some.jsonl", "out": folder, "block_size": 4, **options}
    bench = Bench(
        config=BenchConfig.parse(settings), mode="offline", arms=dict(arms),
        prompts=make_prompts(count), conditions=conditions or [Condition("offline")],
        connect=connect,
    )  # fmt: skip
    # intervals are tested elsewhere, and resampling takes most of the time
    with mock.patch.object(statistics, "RESAMPLES", 200):
        return run_bench(bench, **{"tracker": None, **passed})
