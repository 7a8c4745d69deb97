"""The answer that measurements give: choices, gains, crossings, the Pareto front, the page."""

from math import isnan, nan

import pytest
import yaml

from carryover.serving.config import ServeConfig
from sweeps.answer import (
    Gain,
    Point,
    application_for,
    baseline_of,
    choose,
    crossings,
    gains_over_baseline,
    gains_over_plain,
    pareto,
    points_of,
    recommend,
)
from sweeps.ledger import Ledger, TrialEnd
from sweeps.page import write_page
from sweeps.settings import Load, Setting, SweepConfig, settings_of

KEPT = ("output_tokens_per_s", "low", "high", "tpot_ms.p95", "acceptance_length")


def make(**changes):
    values = {
        "serve": {
            "arms": [
                {"name": "plain"},
                {"name": "base", "drafter": "d/a"},
                {"name": "carry", "drafter": "d/b"},
            ],
            "resources": {"device": "cpu"},
        },
        "proposal_lengths": [2, 7],
        "concurrencies": [1, 8],
        "prompts": "p.jsonl",
        "out": "runs/sweep",
    }
    return SweepConfig.parse({**values, **changes})


def figures(config, rates, tpot=None):
    """What a ledger keeps, of {setting: tokens/s of each load}."""
    return {
        name: {
            (load.temperature, load.concurrency): (
                rate, 0.9 * rate, 1.1 * rate, tpot or 1000 * load.concurrency / rate, 2.0,
            )
            for load, rate in zip(config.loads(), each, strict=False)
        }
        for name, each in rates.items()
    }  # fmt: skip


def points(config, rates, **options):
    return points_of(config, figures(config, rates, **options))


RATES = {"plain": [10, 80], "base-2": [15, 85], "base-7": [20, 60], "carry-7": [24, 64]}


def test_the_best_setting_of_each_load_with_its_gain():
    choices = choose(make(), points(make(), RATES))
    assert [choice.point.setting.name for choice in choices] == ["carry-7", "base-2"]
    assert [choice.speedup.ratio for choice in choices] == [2.4, 85 / 80]
    assert choices[0].speedup.low == pytest.approx(2.4 * 0.9 / 1.1)


def test_without_a_plain_arm_there_is_no_gain():
    arms = [{"name": "base", "drafter": "d/a"}]
    config = make(serve={"arms": arms, "resources": {"device": "cpu"}})
    (first, second) = choose(config, points(config, {"base-2": [1, 2]}))
    assert first.speedup is second.speedup is None


def test_a_setting_over_the_tpot_limit_loses_to_a_slower_one_under_it():
    config = make(objective={"max_tpot_p95_ms": 50})
    kept = figures(config, {"base-2": [30, 100]}, tpot=60)
    kept |= figures(config, {"base-7": [20, 60]}, tpot=40)
    found = points_of(config, kept)
    assert [c.point.setting.name for c in choose(config, found)] == ["base-7", "base-7"]
    assert recommend(config, found).name == "base-7"
    alone = choose(config, points(config, {"base-2": [30, 100]}, tpot=60))
    assert all(choice.over_limit for choice in alone)


def test_the_recommendation_is_the_best_over_all_loads_and_none_but_whole_ones():
    config = make()
    found = points(config, RATES | {"base-7": [900]})
    best = recommend(config, found)
    assert best.name == "carry-7"
    application = application_for(config, best)
    assert [arm.name for arm in application.arms] == ["plain", "carry-7"]
    assert application.arms[1].num_speculative_tokens == 7
    assert recommend(config, points(config, {"plain": [1]})) is None
    plain = recommend(config, points(config, {"plain": [9, 9], "base-2": [1, 1]}))
    assert [arm.name for arm in application_for(config, plain).arms] == ["plain"]


def test_gains_over_the_baseline_are_at_equal_length():
    config = make()
    assert baseline_of(config) == "base"
    gains = gains_over_baseline(config, points(config, RATES | {"carry-2": [30, 30]}))
    found = {(g.point.setting.name, g.point.load.concurrency): g.ratio for g in gains}
    assert found == {
        ("carry-7", 1): 1.2, ("carry-7", 8): 64 / 60, ("carry-2", 1): 2.0, ("carry-2", 8): 30 / 85,
    }  # fmt: skip
    other = make(baseline="carry")
    names = {g.point.setting.arm for g in gains_over_baseline(other, points(other, RATES))}
    assert names == {"base"}


def test_gains_compare_equal_engine_values():
    config = make(engine={"max_num_seqs": [4, 8]}, proposal_lengths=[2])
    rates = {
        "plain-max_num_seqs_4": [10, 10], "plain-max_num_seqs_8": [20, 20],
        "base-2-max_num_seqs_4": [20, 20], "base-2-max_num_seqs_8": [20, 20],
    }  # fmt: skip
    gains = gains_over_plain(points(config, rates))
    found = {g.point.setting.name: g.ratio for g in gains if g.point.setting.drafter}
    assert found == {"base-2-max_num_seqs_4": 2.0, "base-2-max_num_seqs_8": 1.0}


def gain(concurrency, ratio):
    setting = Setting("base", "d/a", 2)
    return Gain(Point(setting, Load(0.0, concurrency), ratio), ratio, nan, nan)


@pytest.mark.parametrize(
    ("curve", "kind", "at"),
    [
        ({1: 2.0, 4: 1.5, 16: 1.1}, "always", 16),
        ({1: 0.9, 4: 0.8}, "never", nan),
        ({1: 2.0, 4: 0.5}, "until", 2.0),
        ({1: 0.9, 4: 1.21, 16: 1 / 1.21, 64: 0.5}, "until", 8.0),
        ({1: 2.0, 4: 1.0}, "always", 4),
    ],
)
def test_where_a_setting_stops_paying(curve, kind, at):
    (found,) = crossings([gain(c, ratio) for c, ratio in reversed(curve.items())])
    assert found.kind == kind
    assert (isnan(at) and isnan(found.concurrency)) or found.concurrency == pytest.approx(at)


def test_one_load_tells_no_crossing():
    assert crossings([gain(1, 2.0)]) == []


def test_the_front_holds_what_nothing_beats_in_both():
    def point(tpot, rate):
        return Point(Setting("a", None, None), Load(0.0, 1), rate, tpot_ms=tpot)

    best, middle, most = point(10, 50), point(20, 80), point(40, 100)
    beaten, same, unknown = point(20, 70), point(45, 100), point(nan, 999)
    assert pareto([most, beaten, same, best, unknown, middle]) == [best, middle, most]
    assert pareto([]) == []


def test_the_page_shows_the_answer_and_needs_nothing_else(tmp_path):
    config = make(out=str(tmp_path / "sweep"), temperatures=[0.0, 1.0])
    ledger = Ledger(config.out, config.identity(), kept=KEPT, part=("temperature", "concurrency"))
    rates = {
        "plain": [10, 80, 10, 80], "base-2": [15, 85, 14, 70], "base-7": [20, 60, 18, 50],
        "carry-7": [24, 64, 20, 55],
    }  # fmt: skip
    for name, parts in figures(config, rates).items():
        for (temperature, concurrency), values in parts.items():
            ledger.add(
                {
                    "setting": name, "temperature": temperature, "concurrency": concurrency,
                    "figures": dict(zip(KEPT, values, strict=True)),
                }
            )  # fmt: skip
    ledger.end(TrialEnd("carry-2", "failed", "first line\nout of <memory>"))
    text = write_page(config, ledger, tmp_path / "page.html").read_text()
    for title in (
        "What to deploy", "Gain over decoding without a drafter", "Gain over base at equal",
        "Where speculation stops paying", "Acceptance", "Pareto front, temperature 1",
        "out of &lt;memory&gt;", "carry, temperature 0", "2.40",
    ):  # fmt: skip
        assert title in text, title
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "<script" not in text and "<img" not in text


def test_a_page_of_nothing_says_so(tmp_path):
    config = make(out=str(tmp_path / "sweep"))
    ledger = Ledger(config.out, config.identity(), kept=KEPT, part=("temperature", "concurrency"))
    assert "Nothing was measured" in write_page(config, ledger, tmp_path / "p.html").read_text()


def test_every_recommendation_can_be_served():
    config = make(engine={"max_num_seqs": [4]})
    for setting in settings_of(config):
        text = application_for(config, setting).to_yaml()
        assert ServeConfig.parse(yaml.safe_load(text)).engine.max_num_seqs == 4


def test_a_page_of_very_many_settings_shows_the_best(tmp_path):
    config = make(
        out=str(tmp_path / "sweep"), proposal_lengths=list(range(1, 41)), temperatures=[0.0]
    )
    ledger = Ledger(config.out, config.identity(), kept=KEPT, part=("temperature", "concurrency"))
    rates = {"plain": [10, 80]} | {f"base-{n}": [10 + n, 80 - n] for n in range(1, 41)}
    for name, parts in figures(config, rates).items():
        ledger.figures[name] = parts
    text = write_page(config, ledger, tmp_path / "page.html").read_text()
    assert "The best 24 of 40 settings" in text and "base-40 at T=0 c=1" in text
