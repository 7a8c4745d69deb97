"""Figures of roles and seeds from requests of known truth."""

from math import isnan
from unittest import mock

import pytest
from bench_backends import make_prompts
from results_scenes import PROPOSALS, PlantedBackend

from carryover.bench import statistics
from carryover.bench.records import Condition, Request
from carryover.bench.workload import Unit
from carryover.errors import ConfigError
from carryover.results.config import Section
from carryover.results.cost import TrainingCost, payback
from carryover.results.measured import check_arms, measure_all, pool
from carryover.results.runs import BenchRun, RunRecord

OFFLINE = Condition("offline")
LENGTHS = {"ar": None, "b": 2.4, "k1": 2.4, "k2": 2.4, "c1": 2.64, "c2": 2.64}
ARMS = {"baseline": ["b"], "control": ["k1", "k2"], "carryover": ["c1", "c2"]}


@pytest.fixture(autouse=True)
def few_resamples():
    with mock.patch.object(statistics, "RESAMPLES", 400):
        yield


def record(name="r", status="FINISHED", **tags):
    return RunRecord(name * 32, name, "bench", status, "2026-01-01 00:00",
                     {"max_tokens": "128", "ignore_eos": "false"}, {}, tags)  # fmt: skip


def bench(lengths=LENGTHS, *, name="r", count=60, digest="d", condition=OFFLINE, seed=0, **tags):
    backend = PlantedBackend(lengths, seed=seed)
    requests = []
    for arm in lengths:
        unit = Unit(0, condition, arm, tuple(make_prompts(count)))
        for prompt, answer in zip(unit.prompts, backend.send(unit, int).responses, strict=True):
            requests.append(
                Request(arm, prompt.id, prompt.category, "s", 0, answer.latency_s, answer,
                        condition)
            )  # fmt: skip
    return BenchRun(record(name, **tags), condition.mode, digest, [], 2, requests)


def section(arms=ARMS, **values):
    return Section(name="s", autoregressive="ar", regimes={"dflash": arms}, **values)


def test_a_planted_gain_is_found_and_a_planted_null_is_not_claimed():
    (found,) = measure_all(section(), [bench(count=120)], sets=True)
    gain = found.gains["baseline"].pooled.acceptance_ratio
    assert gain.low < 1.10 < gain.high and gain.low > 1.05
    # micro and macro averages are of the same truth here
    macro = found.gains["baseline"].acceptance_macro
    assert macro.low < 1.10 < macro.high
    assert found.summaries["baseline"].acceptance_length.value == pytest.approx(2.4, abs=0.05)
    # a baseline's round gives 2.4 tokens in the time of 1 / 0.9
    assert found.speedups["baseline"].speedup.value == pytest.approx(2.4 * 0.9, rel=0.04)
    null = {"baseline": ["b"], "control": ["k1"], "carryover": ["k2"]}
    (none,) = measure_all(section(null), [bench(count=120)], sets=False)
    for other in ("baseline", "control"):
        ratio = none.gains[other].pooled.acceptance_ratio
        assert ratio.low < 1 < ratio.high


def test_each_seed_stands_beside_the_pooled_gain():
    lengths = {**LENGTHS, "c2": 2.4}
    (found,) = measure_all(section(), [bench(lengths)], sets=True)
    gain = found.gains["control"]
    assert list(gain.seeds) == ["c1", "c2"]
    first, second = (each.acceptance_ratio for each in gain.seeds.values())
    assert first.low > 1.04 and second.low < 1 < second.high
    assert second.value < gain.pooled.acceptance_ratio.value < first.value
    assert found.sets == ["chat", "code"] and found.arms == {}
    online = Condition("online", 0.0, 1)
    (found,) = measure_all(section(), [bench(lengths, condition=online)], sets=False)
    assert len(found.arms) == len(lengths)
    summary, speedup = found.arms["carryover", "c2"]
    assert speedup.speedup.value == pytest.approx(2.4 * 0.9, rel=0.04)
    assert summary.tpot_ms[0] == pytest.approx(10 / 2.4, rel=0.1)


def test_pooling_adds_up_what_all_seeds_answered():
    run = bench(count=4)
    first, second = (run.by_arm[OFFLINE, arm] for arm in ("c1", "c2"))
    failed = [*first[:3], mock.Mock(ok=False, prompt_id=3)]
    pooled = pool([failed, second])
    assert [request.prompt_id for request in pooled] == [0, 1, 2]
    one, parts = pooled[1].response, (first[1].response, second[1].response)
    assert one.output_tokens == sum(part.output_tokens for part in parts)
    assert one.num_drafts == 80 and len(one.accepted_histogram) == PROPOSALS + 1
    assert sum(one.accepted_histogram) == 80
    assert pooled[1].wall_s == pytest.approx(first[1].wall_s + second[1].wall_s)
    assert pool([first]) == first


def test_seeds_of_several_runs_are_paired_within_their_run():
    one = bench({name: LENGTHS[name] for name in ("ar", "b", "k1", "c1")}, name="1")
    two = bench({name: LENGTHS[name] for name in ("ar", "b", "k2", "c2")}, name="2", seed=1)
    (found,) = measure_all(section(), [one, two], sets=False)
    assert [seed.run.record.name for seed in found.seeds] == ["1", "2"]
    assert found.gains["baseline"].pooled.prompts == 60
    other = bench({name: LENGTHS[name] for name in ("ar", "b", "k2", "c2")}, digest="else")
    with pytest.raises(ConfigError, match="were not asked the same at T=0"):
        measure_all(section(), [one, other], sets=False)


def test_a_valid_whole_and_larger_run_counts_first():
    small, large = bench(name="s", count=10), bench(name="l", count=20)
    wrong = bench(name="w", count=40, **{"carryover.valid": "false"})
    cut = bench(name="p", count=40, **{"carryover.partial": "interrupted"})
    assert not wrong.valid and cut.partial == "interrupted"
    (found,) = measure_all(section(), [wrong, cut, small, large], sets=False)
    assert {run.record.name for run in found.runs} == {"l"}
    (found,) = measure_all(section(), [wrong, cut], sets=False)
    assert {run.record.name for run in found.runs} == {"p"}


def test_absent_roles_leave_gaps_and_misspelt_arms_are_named():
    run = bench({"b": 2.4, "c1": 2.64})
    only = {"baseline": ["b"], "carryover": ["c1"]}
    (found,) = measure_all(section(only), [run], sets=False)
    assert set(found.gains) == {"baseline"} and found.speedups == {}
    with pytest.raises(ConfigError, match=r"has the arm c3; they have: .*c1, c2"):
        check_arms(section({"carryover": ["c3"]}), [bench(count=2)])
    with pytest.raises(ConfigError, match="names no arms"):
        check_arms(Section(name="s", autoregressive="ar"), [bench(count=2)])
    check_arms(section({"carryover": ["c3"]}), [])


def cost(kind, hours, **more):
    values = {"steps": 1, "tokens": 1, "states_hours": 0.0, "cores": 2.0, "gpus": 0,
              "best_acceptance": 2.0, **more}  # fmt: skip
    return TrainingCost(record=record(), kind=kind, regime="dflash", hours=hours, **values)


def test_the_continuation_pays_after_what_it_cost_by_what_it_saves():
    condition = Condition("online", 0.0, 1)
    run = bench(condition=condition, count=120)
    (found,) = measure_all(section(), [run], sets=False)
    costs = [cost("carryover", 1.0), cost("carryover", 3.0), cost("control", 1.5),
             cost("baseline", 9.0), cost("carryover", 50.0, gpus=1)]  # fmt: skip
    paid = payback(found, costs)
    assert paid.continuation == 4.0 and paid.control == 3.0
    # the baseline gives 2.4 tokens (and one at the start of 40 rounds) in 10 ms, on 2 cores
    assert paid.per_million == pytest.approx(2 * 1e6 / 242.5 / 3600, rel=0.03)
    saved = paid.per_million * (1 - 1 / paid.gain.value)
    assert paid.tokens.value == pytest.approx(4.0 / saved * 1e6)
    assert paid.tokens.low < paid.tokens.value < paid.tokens.high
    assert payback(found, [cost("carryover", None)]) is None
    (null,) = measure_all(section({"baseline": ["b"], "carryover": ["k1"]}), [run], sets=False)
    assert payback(null, costs).tokens.high == float("inf")
    assert not isnan(payback(null, costs).tokens.low)
