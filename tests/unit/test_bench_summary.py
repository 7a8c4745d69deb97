"""Figures of arms and comparisons from requests."""

from math import isnan, nan

import pyarrow.parquet as pq
import pytest

from carryover.bench.client import Response
from carryover.bench.summary import Request, compare_arms, summarise_arm, write_requests


def request(
    arm, prompt, *, tokens=11, ttft=0.1, latency=1.1, wall=None, text="same", error=None, drafts=0,
    accepted=0, histogram=(), finish="stop",
):  # fmt: skip
    failed = error is not None
    return Request(
        arm=arm, prompt_id=prompt, category="c", source="s", block=0,
        wall_s=nan if failed else (latency if wall is None else wall),
        response=Response(
            started_s=0.0, ttft_s=None if failed else ttft, latency_s=None if failed else latency,
            output_tokens=0 if failed else tokens, finish=None if failed else finish, text=text,
            num_drafts=drafts, num_draft_tokens=3 * drafts, num_accepted_tokens=accepted,
            accepted_histogram=list(histogram), status=500 if failed else 200, error=error,
        ),
    )  # fmt: skip


def test_an_arms_figures():
    requests = [
        request("a", 0, drafts=4, accepted=4, histogram=(1, 2, 1, 0), finish="length"),
        request(
            "a", 1, tokens=1, latency=0.3, ttft=0.3, drafts=6, accepted=1, histogram=(5, 1, 0, 0)
        ),
        request("a", 2, error="boom"),
    ]
    found = summarise_arm("a", requests, measured_s=2.0)
    assert (found.requests, found.failed, found.cut) == (3, 1, 1)
    assert found.output_tokens == 12
    assert found.output_tokens_per_s.value == pytest.approx(12 / 1.4)
    assert found.acceptance_length.value == pytest.approx(1 + 5 / 10)
    assert found.position_rates == pytest.approx([0.4, 0.1, 0.0])
    # one token has no TPOT
    assert found.tpot_ms == pytest.approx((100.0, 100.0))
    assert found.ttft_ms[0] == pytest.approx(200.0)
    metrics = found.metrics()
    assert metrics["acceptance_rate.1"] == pytest.approx(0.4)
    assert metrics["tpot_ms.p95"] == pytest.approx(100.0)
    assert metrics["failed"] == 1
    # the mean of one request has no interval, and NaN is no metric
    assert "tpot_mean_ms.low" not in metrics


def test_an_arm_where_everything_failed_has_no_figures_but_its_failures():
    found = summarise_arm(
        "a", [request("a", 0, error="x"), request("a", 1, error="x")], measured_s=1.0
    )
    assert found.failed == found.requests == 2
    assert isnan(found.output_tokens_per_s.value) and isnan(found.ttft_ms[0])
    assert found.acceptance_length is None
    assert found.metrics()["failed"] == 2


def test_arms_are_compared_over_the_prompts_that_both_answered():
    fast = [request("b", 0, wall=0.5), request("b", 1, wall=0.5, text="other"), request("b", 2)]
    slow = [request("a", 0, wall=1.0), request("a", 1, wall=1.0), request("a", 2, error="x")]
    found = compare_arms(fast, slow, same_text=True)
    assert found.prompts == 2 and found.differing == 1
    assert found.speedup.value == pytest.approx(2.0)
    assert found.metrics()["differing_texts"] == 1
    assert compare_arms(fast, slow, same_text=False).differing is None


def test_arms_without_a_common_prompt_have_no_ratio():
    found = compare_arms([request("b", 0)], [request("a", 0, error="x")], same_text=True)
    assert found.prompts == 0 and isnan(found.speedup.value) and found.differing == 0


def test_tpot_of_one_slow_prompt_does_not_vanish_in_tokens():
    ours = [request("b", 0, ttft=0.0, latency=1.0), request("b", 1, ttft=0.0, latency=3.0)]
    theirs = [request("a", 0, ttft=0.0, latency=2.0), request("a", 1, ttft=0.0, latency=2.0)]
    assert compare_arms(ours, theirs, same_text=True).tpot_ratio.value == pytest.approx(1.0)


def test_every_request_is_a_row(tmp_path):
    path = tmp_path / "deep" / "requests.parquet"
    write_requests([request("a", 0), request("a", 1, error="boom")], path)
    rows = pq.read_table(path).to_pylist()
    assert [row["error"] for row in rows] == [None, "boom"]
    assert rows[0]["tpot_s"] == pytest.approx(0.1) and rows[1]["tpot_s"] is None
