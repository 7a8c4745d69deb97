"""What a sweep starts and measures, and the answer that its measurements give."""

from pathlib import Path

import pytest

from carryover.errors import ConfigError
from sweeps.settings import (
    Measurement,
    SweepConfig,
    application_for,
    choose,
    recommend,
    settings_of,
    unfinished,
)

VALUES = {
    "serve": {
        "arms": [{"name": "plain"}, {"name": "dflash", "drafter": "drafters/a"}],
        "resources": {"device": "cpu"},
    },
    "proposal_lengths": [2, 7],
    "temperatures": [0.0, 1.0],
    "concurrencies": [1, 8],
    "prompts": "prompts.jsonl",
    "out": "runs/sweep",
}


def make(**changes):
    return SweepConfig.parse({**VALUES, **changes})


def measured(config, rates):
    """Measurements from {setting: tokens/s of each load}."""
    return [
        Measurement(setting, *load, {"output_tokens_per_s": rate})
        for setting, each in rates.items()
        for load, rate in zip(config.loads(), each, strict=False)
    ]


def test_engines_are_arms_times_lengths_and_loads_need_none():
    config = make()
    assert [setting.name for setting in settings_of(config)] == ["plain", "dflash-2", "dflash-7"]
    assert config.loads() == [(0.0, 1), (0.0, 8), (1.0, 1), (1.0, 8)]


def test_a_full_grid_starts_an_engine_for_each_setting_only():
    drafters = [{"name": f"d{n}", "drafter": f"drafters/{n}"} for n in range(3)]
    config = make(
        serve={"arms": drafters, "resources": {"device": "cpu"}},
        proposal_lengths=[1, 3, 5, 7, 15],
        concurrencies=[1, 2, 4, 8, 16, 32],
    )
    assert len(settings_of(config)) == 15
    assert len(settings_of(config)) * len(config.loads()) == 180


def test_without_lengths_each_arm_keeps_its_own():
    arms = [
        {"name": "a", "drafter": "x", "num_speculative_tokens": 3},
        {"name": "b", "drafter": "y"},
    ]
    config = make(proposal_lengths=None, serve={"arms": arms, "resources": {"device": "cpu"}})
    assert [setting.name for setting in settings_of(config)] == ["a-3", "b"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"proposal_lengths": [2, 2]}, "repeats a value"),
        ({"proposal_lengths": [0]}, "start at 1"),
        ({"concurrencies": []}, "at least 1 item"),
        ({"temperatures": [-0.5]}, "start at 0"),
        ({"concurency": [1]}, "did you mean 'concurrencies'"),
    ],
)
def test_mistakes_are_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        make(**change)


def test_a_setting_with_a_load_missing_is_unfinished():
    config = make()
    results = measured(config, {"plain": [1, 2, 3, 4], "dflash-2": [1, 2, 3]})
    assert [setting.name for setting in unfinished(config, results)] == ["dflash-2", "dflash-7"]
    assert (
        unfinished(
            config, measured(config, dict.fromkeys(["plain", "dflash-2", "dflash-7"], [1] * 4))
        )
        == []
    )


def test_the_best_setting_of_each_load_with_its_speedup():
    config = make()
    rates = {"plain": [10, 80, 10, 80], "dflash-2": [15, 85, 12, 60], "dflash-7": [20, 70, 11, 50]}
    choices = choose(config, measured(config, rates))
    assert [choice.setting for choice in choices] == ["dflash-7", "dflash-2", "dflash-2", "plain"]
    assert [choice.speedup for choice in choices] == [2.0, 85 / 80, 1.2, 1.0]


def test_without_a_plain_arm_there_is_no_speedup():
    arms = [{"name": "dflash", "drafter": "drafters/a"}]
    config = make(serve={"arms": arms, "resources": {"device": "cpu"}}, proposal_lengths=[2])
    assert [c.speedup for c in choose(config, measured(config, {"dflash-2": [1, 2, 3, 4]}))] == [
        None
    ] * 4


def test_the_recommendation_is_the_best_over_all_loads_and_none_but_whole_ones():
    config = make()
    rates = {"plain": [10, 80, 10, 80], "dflash-2": [15, 85, 12, 60], "dflash-7": [900, 900]}
    best = recommend(config, measured(config, rates))
    assert best.name == "dflash-2"
    application = application_for(config, best)
    assert [arm.name for arm in application.arms] == ["plain", "dflash-2"]
    assert application.arms[1].num_speculative_tokens == 2
    assert application.arms[1].drafter == Path("drafters/a")
    assert recommend(config, measured(config, {"plain": [1]})) is None
    plain = recommend(config, measured(config, {"plain": [9, 9, 9, 9], "dflash-2": [1, 1, 1, 1]}))
    assert [arm.name for arm in application_for(config, plain).arms] == ["plain"]


def test_paths_become_absolute_and_names_of_data_sets_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").touch()
    config = make().absolute()
    assert config.prompts == str(tmp_path / "prompts.jsonl")
    assert config.out == tmp_path / "runs" / "sweep"
    assert config.serve.arms[1].drafter == tmp_path / "drafters" / "a"
    assert make(prompts="owner/dataset").absolute().prompts == "owner/dataset"
