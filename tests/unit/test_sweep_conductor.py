"""What becomes of trials: ends, deaths, early stops, budgets; without Ray's processes."""

import json

import pytest
from ray.tune.search import Searcher

from sweeps.conductor import NEWS, Conductor, Task
from sweeps.ledger import Ledger
from sweeps.search import Wait

PARTS = ((1,), (2,), (3,))


class ListPlan:
    """Tasks in order; stops those it is told to."""

    def __init__(self, *names, cuts=False):
        self.left = [Task(name, {"name": name}, {}, PARTS) for name in names]
        self.cuts, self.stop, self.over = cuts, {}, []

    def next(self):
        return self.left.pop(0) if self.left else None

    def why_stop(self, task):
        return self.stop.get(task.name)

    def ended(self, task, end):
        self.over.append((task.name, end.outcome))


class Silent:
    """A listener that remembers ends."""

    def __init__(self):
        self.ends = []

    def started(self, *_):
        pass

    ready = measured = started

    def ended(self, task, end):
        self.ends.append((task.name, end.outcome, end.attempt))


class Stage:
    """A conductor, and a clock and trials that the test moves."""

    def __init__(self, folder, plan, **options):
        self.now, self.asked = 0.0, []
        self.plan, self.listener = plan, Silent()
        self.ledger = Ledger(folder, {}, kept=("rate",), part=("part",))
        self.conductor = Conductor(
            plan, self.ledger, self.listener, stop=self.asked.append, clock=lambda: self.now,
            **{"max_restarts": 1, **options},
        )  # fmt: skip

    def tell(self, trial, kind, **news):
        self.conductor.on_trial_result(trial, {NEWS: json.dumps({"kind": kind, **news})})

    def measure(self, trial, setting, *parts, wall_s=1.0):
        for part in parts:
            row = {"setting": setting, "part": part, "figures": {"rate": 1.0}, "wall_s": wall_s}
            self.tell(trial, "measured", row=row)

    def end(self, trial, failure=None):
        self.tell(trial, "ended", wall_s=2.0, failure=failure)
        self.conductor.on_trial_complete(trial, {})


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path, ListPlan("a", "b"))


def test_a_setting_is_measured_part_by_part_and_done(stage):
    told = stage.conductor.suggest("t1")
    assert told == {"task": {"name": "a"}, "parts": [[1], [2], [3]]}
    stage.tell("t1", "ready", start_s=4.0)
    stage.measure("t1", "a", 1, 2, 3)
    stage.end("t1")
    (end,) = stage.ledger.trials()
    assert (end.outcome, end.start_s, end.wall_s) == ("done", 4.0, 2.0)
    assert stage.plan.over == [("a", "done")]
    assert stage.conductor.busy_s == 2.0


def test_a_death_is_tried_again_with_what_is_missing(stage):
    stage.conductor.suggest("t1")
    stage.measure("t1", "a", 1)
    stage.conductor.on_trial_complete("t1", error=True)
    assert stage.conductor.suggest("t2") == {"task": {"name": "a"}, "parts": [[2], [3]]}
    stage.measure("t2", "a", 2, 3)
    stage.end("t2")
    assert stage.listener.ends == [("a", "died", 1), ("a", "done", 2)]
    assert stage.plan.over == [("a", "done")]


def test_a_setting_that_dies_too_often_fails_with_a_reason(stage):
    for trial in ("t1", "t2"):
        stage.conductor.suggest(trial)
        stage.conductor.on_trial_complete(trial, error=True)
    assert stage.plan.over == [("a", "failed")]
    assert "died 2 times" in stage.ledger.ends["a"].reason
    assert stage.conductor.suggest("t3")["task"] == {"name": "b"}


def test_a_death_after_the_last_part_is_no_loss(stage):
    stage.conductor.suggest("t1")
    stage.measure("t1", "a", 1, 2, 3)
    stage.conductor.on_trial_complete("t1", error=True)
    assert stage.plan.over == [("a", "done")]


def test_a_known_failure_is_for_good_and_keeps_what_was_measured(stage):
    stage.conductor.suggest("t1")
    stage.measure("t1", "a", 1)
    stage.end("t1", failure="length 9 exceeds 4")
    assert stage.ledger.ends["a"].reason == "length 9 exceeds 4"
    assert stage.ledger.is_over("a") and stage.ledger.has("a", (1,))


def test_a_trial_that_ends_without_measuring_all_has_failed(stage):
    stage.conductor.suggest("t1")
    stage.measure("t1", "a", 1)
    stage.end("t1")
    assert "without measuring all" in stage.ledger.ends["a"].reason


def test_the_end_waits_for_what_runs_since_it_may_have_to_be_repeated(stage):
    for trial in ("t1", "t2"):
        stage.conductor.suggest(trial)
    assert stage.conductor.suggest("t3") is None
    stage.conductor.on_trial_complete("t1", error=True)
    assert stage.conductor.suggest("t4")["task"] == {"name": "a"}
    for trial, setting in (("t2", "b"), ("t4", "a")):
        stage.measure(trial, setting, 1, 2, 3)
        stage.end(trial)
    assert stage.conductor.suggest("t5") == Searcher.FINISHED


def test_a_plan_that_waits_for_results_is_asked_again(tmp_path):
    plan = ListPlan()
    plan.next = lambda: Wait.WAIT
    assert Stage(tmp_path, plan).conductor.suggest("t1") is None


def test_a_hopeless_setting_is_asked_to_end_itself(stage):
    stage.plan.stop["a"] = "hopeless"
    stage.conductor.suggest("t1")
    stage.measure("t1", "a", 1)
    assert stage.asked == ["a"] and not stage.conductor.is_to_be_cut("t1")
    stage.end("t1")
    assert stage.ledger.ends["a"].outcome == "stopped"
    assert stage.ledger.ends["a"].reason == "hopeless"


def test_a_hopeless_training_is_cut(tmp_path):
    stage = Stage(tmp_path, ListPlan("a", cuts=True))
    stage.plan.stop["a"] = "hopeless"
    stage.conductor.suggest("t1")
    stage.measure("t1", "a", 1)
    assert stage.conductor.is_to_be_cut("t1") and not stage.asked
    stage.conductor.on_trial_complete("t1", {})
    assert stage.listener.ends == [("a", "stopped", 1)]


def test_nothing_is_started_that_the_budget_does_not_hold(tmp_path):
    stage = Stage(tmp_path, ListPlan("a", "b", "c"), deadline_s=100.0)
    stage.conductor.suggest("t1")
    stage.tell("t1", "ready", start_s=20.0)
    stage.measure("t1", "a", 1, 2, 3, wall_s=10.0)
    stage.end("t1")
    stage.now = 69.0
    assert stage.conductor.suggest("t2")["task"] == {"name": "b"}
    stage.now = 71.0
    assert stage.conductor.suggest("t3") == Searcher.FINISHED
    assert stage.conductor.out_of_time
    # what runs ends itself after the part it is at, and is neither failed nor stopped
    stage.now = 101.0
    stage.measure("t2", "b", 1)
    assert stage.asked == ["b"]
    stage.end("t2")
    assert stage.listener.ends == [("a", "done", 1)]
    assert stage.ledger.has("b", (1,)) and "b" not in stage.ledger.ends


def test_a_trial_that_tune_ends_at_the_deadline_is_left_for_the_next_run(tmp_path):
    stage = Stage(tmp_path, ListPlan("a"), deadline_s=10.0)
    stage.conductor.suggest("t1")
    stage.now = 10.5
    stage.conductor.on_trial_complete("t1", {})
    assert stage.listener.ends == [] and stage.ledger.ends == {}


def test_a_report_that_comes_twice_counts_once(stage):
    stage.conductor.suggest("t1")
    stage.measure("t1", "a", 1, 1)
    assert len(list(stage.ledger.rows())) == 1
