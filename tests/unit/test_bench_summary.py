"""Figures of arms and comparisons from requests."""

from math import isnan, nan

import pyarrow.parquet as pq
import pytest

from carryover.bench.client import Response
from carryover.bench.objective import Objective
from carryover.bench.records import Condition, Request, read_requests, write_requests
from carryover.bench.summary import compare_arms, summarise_arm
from carryover.errors import ConfigError

ONLINE = Condition()


def request(
    arm, prompt, *, tokens=11, ttft=0.1, latency=1.1, wall=None, text="same", error=None, drafts=0,
    accepted=0, histogram=(), finish="stop", category="c", condition=ONLINE, **answer
):  # fmt: skip
    failed = error is not None
    return Request(
        arm=arm, prompt_id=prompt, category=category, source="s", block=0, condition=condition,
        wall_s=nan if failed else (latency if wall is None else wall),
        response=Response(
            started_s=0.0, ttft_s=None if failed else ttft, latency_s=None if failed else latency,
            output_tokens=0 if failed else tokens, finish=None if failed else finish, text=text,
            num_drafts=drafts, num_draft_tokens=3 * drafts, num_accepted_tokens=accepted,
            accepted_histogram=list(histogram), status=500 if failed else 200, error=error,
            **answer,
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
    assert found.tpot_ms == pytest.approx((100.0, 100.0, 100.0))
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


def test_sets_get_figures_of_their_own_and_a_macro_average():
    def both(arm, wall):
        return [
            request(arm, number, wall=wall, category="long" if number < 3 else "short",
                    tokens=30 if number < 3 else 10, drafts=10, accepted=20 if number < 3 else 0)
            for number in range(5)
        ]  # fmt: skip

    found = summarise_arm("b", both("b", 1.0), measured_s=5.0)
    assert {name: part.requests for name, part in found.by_set.items()} == {"long": 3, "short": 2}
    assert found.by_set["long"].acceptance_length.value == pytest.approx(3.0)
    assert found.acceptance_length.value == pytest.approx(1 + 60 / 50)
    assert found.acceptance_length_macro.value == pytest.approx((3.0 + 1.0) / 2)
    compared = compare_arms(both("b", 1.0), both("a", 2.0), same_text=True)
    assert compared.by_set["short"].speedup.value == pytest.approx(2.0)
    assert compared.speedup_macro.value == pytest.approx(2.0)
    assert compared.acceptance_difference.value == pytest.approx(0.0)
    metrics = {**found.metrics(), **compared.metrics("gain.")}
    assert metrics["set.long.acceptance_length"] == pytest.approx(3.0)
    assert metrics["set.short.gain.speedup"] == pytest.approx(2.0)
    assert summarise_arm("b", both("b", 1.0)[:3], measured_s=1.0).by_set == {}


def test_a_speed_up_on_equal_texts_stands_beside_the_whole_one():
    ours = [request("b", n, wall=0.5 if n else 0.1, text="x" if n else "y") for n in range(3)]
    theirs = [request("a", n, wall=1.0, text="x") for n in range(3)]
    found = compare_arms(ours, theirs, same_text=True)
    assert found.differing == 1 and found.same_text_speedup.value == pytest.approx(2.0)
    assert compare_arms(ours[1:], theirs, same_text=True).same_text_speedup is None


def test_outliers_are_counted_and_stay_in_the_figures():
    slow = request("a", 3, latency=10.1, wall=1.1)
    found = summarise_arm("a", [*(request("a", n) for n in range(3)), slow], measured_s=1.0)
    assert found.outliers == 1 and found.tpot_mean_ms.value == pytest.approx((3 * 100 + 1000) / 4)
    assert found.metrics()["outliers"] == 1


def test_goodput_counts_what_met_every_objective_and_no_failure():
    objective = Objective(ttft_ms=150, e2e_ms=2000)
    requests = [
        request("a", 0), request("a", 1, ttft=0.2), request("a", 2, latency=2.5, wall=1.1),
        request("a", 3, error="x"),
    ]  # fmt: skip
    found = summarise_arm("a", requests, measured_s=3.3, objective=objective)
    assert found.good == 1
    assert found.goodput_per_s.value == pytest.approx(1 / 3.3)
    assert found.metrics()["good"] == 1
    with pytest.raises(ConfigError, match="needs one of"):
        Objective.parse({})


def test_every_request_is_a_row_and_comes_back_as_it_was(tmp_path):
    path = tmp_path / "deep" / "requests.parquet"
    kept = [request("a", 0, histogram=(1, 2)), request("a", 1, error="boom")]
    write_requests(kept, path)
    assert [repr(found) for found in read_requests(path)] == [repr(each) for each in kept]
    assert path.with_suffix(".csv").read_text().count("\n") == 3
    rows = pq.read_table(path).to_pylist()
    assert [row["error"] for row in rows] == [None, "boom"]
    assert rows[0]["tpot_s"] == pytest.approx(0.1) and rows[1]["tpot_s"] is None
