"""What cannot be true of an honest bench is found, and what must be known is said."""

import pytest
from test_bench_summary import request

from carryover.bench.arms import equal_arms
from carryover.bench.client import Choice
from carryover.bench.records import Condition
from carryover.bench.summary import compare_arms, summarise_arm
from carryover.bench.ties import Ties, default_threshold, parting_gap
from carryover.bench.validity import (
    check_counters,
    check_lengths,
    check_pairs,
    check_requests,
    check_summary,
    note_on_equal_arms,
    undrafted_share,
)

DRAFTING, PLAIN = {"drafter": "d"}, {"drafter": None}
GOOD = {"drafts": 4, "accepted": 4, "histogram": (1, 2, 1, 0), "tokens": 9}


def test_a_sound_response_has_no_problem():
    assert check_requests("a", DRAFTING, [request("a", 0, **GOOD)]) == []
    assert check_requests("a", PLAIN, [request("a", 0)]) == []
    assert check_requests("a", {}, [request("a", 0, **GOOD), request("a", 1, error="x")]) == []


@pytest.mark.parametrize(
    ("about", "change", "problem"),
    [
        (DRAFTING, {"histogram": (1, 2, 0, 0)}, "other rounds than were counted"),
        (DRAFTING, {"histogram": (2, 1, 1, 0)}, "other acceptances than were counted"),
        (DRAFTING, {"accepted": 13, "histogram": (0, 0, 0, 4)}, "more proposals were accepted"),
        (DRAFTING, {"ttft": 2.0}, "last token came before the first"),
        (PLAIN, {}, "has no drafter"),
        (DRAFTING, {"drafts": 0, "accepted": 0, "histogram": ()}, "no response tells of a round"),
    ],
)
def test_contradictions_name_the_arm_and_the_prompts(about, change, problem):
    said = check_requests("a", about, [request("a", 7, **{**GOOD, **change})])
    assert any(problem in text and text.startswith("a: ") for text in said), said


def test_an_arm_that_is_there_twice_tells_what_engines_differ_by():
    arms = {
        "plain": {**PLAIN, "control": True}, "a": DRAFTING, "b": {"drafter": "e"},
        "again": {**DRAFTING, "control": False}, "plain again": PLAIN, "x": {}, "y": {},
    }  # fmt: skip
    assert equal_arms(arms) == [("a", "again"), ("plain", "plain again")]
    first = [request("a", k, **GOOD, latency=1.1) for k in range(3)]
    again = [request("again", k, **GOOD, latency=1.0) for k in range(3)]
    said = note_on_equal_arms(Condition("offline"), compare_arms(again, first, same_text=False))
    assert "a and again are the same arm twice, and differ by +10.0% [+10.0, +10.0]" in said


def test_the_acceptance_length_is_one_more_than_the_sum_of_the_rates():
    whole = summarise_arm("a", [request("a", 0, **GOOD), request("a", 1, **GOOD)], measured_s=1.0)
    assert check_summary(whole) == []
    wrong = summarise_arm(
        "a", [request("a", 0, **{**GOOD, "histogram": (0, 3, 1, 0)})], measured_s=1.0
    )
    assert "is not 1 + the sum" in check_summary(wrong)[0]


def counted(**changes):
    return {
        "num_drafts": 4.0, "num_draft_tokens": 12.0, "num_accepted_tokens": 4.0,
        "num_accepted_tokens_per_pos.0": 3.0, "num_accepted_tokens_per_pos.1": 1.0, **changes,
    }  # fmt: skip


def test_counters_must_tell_the_same_rounds_at_every_position():
    requests = [request("a", 0, **GOOD), request("a", 1, error="boom")]
    assert check_counters("a", counted(), requests) == []
    assert check_counters("a", {}, [request("a", 0)]) == []
    for name in counted():
        (said,) = check_counters("a", counted(**{name: 99.0}), requests)
        assert f"{name} 99 counted" in said
    # a position that the responses know nothing of
    assert check_counters("a", counted(**{"num_accepted_tokens_per_pos.2": 1.0}), requests)


def test_arms_must_be_asked_the_same_prompts_in_the_same_words():
    condition = Condition()
    same = {"a": [request("a", 0)], "b": [request("b", 0)]}
    assert check_pairs(condition, same) == []
    other = {"a": [request("a", 0)], "b": [request("b", 1)]}
    assert "different prompts" in check_pairs(condition, other)[0]
    longer = {"a": [request("a", 0, prompt_tokens=5)], "b": [request("b", 0, prompt_tokens=6)]}
    assert "chat templates or tokenizers differ" in check_pairs(condition, longer)[0]
    cached = {"a": [request("a", 0, cached_tokens=0)], "b": [request("b", 0, cached_tokens=64)]}
    assert "prefix caches (a 0, b 64)" in check_pairs(condition, cached)[0]


def test_ignored_end_tokens_fix_the_lengths():
    requests = [request("a", 0, tokens=11), request("a", 1, tokens=12)]
    assert check_lengths(Condition(), requests, max_tokens=12, ignore_eos=False) == []
    said = check_lengths(Condition(), requests, max_tokens=12, ignore_eos=True)
    assert "1 responses" in said[0]


def test_tokens_without_a_round_are_a_share():
    # 4 rounds account for 4 + 4 tokens and the first
    assert undrafted_share([request("a", 0, **GOOD)]) == 0.0
    assert undrafted_share([request("a", 0, **{**GOOD, "tokens": 12})]) == pytest.approx(3 / 12)
    assert undrafted_share([request("a", 0)]) == 0.0


def choice(token, logprob, **others):
    return Choice(token, logprob, {token: logprob, **others})


def test_the_gap_is_read_where_the_answers_part():
    ours = [choice("a", -0.1), choice("b", -0.6, c=-0.7), choice("z", -9.0)]
    theirs = [choice("a", -0.1), choice("c", -0.65, b=-0.68), choice("y", -9.0)]
    assert parting_gap(ours, theirs) == pytest.approx(0.1)
    assert parting_gap(ours, ours) is None
    # not among the likeliest: at least the gap to the last of them
    assert parting_gap(ours, [choice("a", -0.1), choice("q", -0.1)]) == pytest.approx(0.1)


def test_gaps_within_the_threshold_are_near_ties():
    ties = Ties(0.01, gaps=[0.001, -0.01, 0.5], same_again=1, unknown=2)
    assert (ties.near, ties.wide) == (2, 1)
    assert str(ties) == (
        "2 near-ties (gap up to 0.01 nats), 1 with a wider gap (up to 0.5 nats), "
        "1 the same when asked alone, 2 not explained"
    )
    assert default_threshold("float32") < default_threshold("bfloat16") == default_threshold("")
