"""What a sweep starts and measures, and the answer that its measurements give."""

import json
from dataclasses import asdict

import pytest

from carryover.errors import ConfigError
from sweeps.settings import Load, Measurement, Setting, SweepConfig, settings_of

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


def test_engines_are_arms_times_lengths_and_loads_need_none():
    config = make()
    assert [setting.name for setting in settings_of(config)] == ["plain", "dflash-2", "dflash-7"]
    assert config.loads() == [Load(0.0, 1), Load(0.0, 8), Load(1.0, 1), Load(1.0, 8)]


def test_an_engine_is_measured_at_the_extremes_of_concurrency_first():
    loads = make(temperatures=[0.0], concurrencies=[2, 1, 4, 32, 8]).loads()
    assert [load.concurrency for load in loads] == [1, 32, 2, 4, 8]
    assert [load.concurrency for load in make(concurrencies=[4]).loads()] == [4, 4]


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
        ({"engine": {"max_num_seqz": [1]}}, "did you mean 'max_num_seqs'"),
        ({"engine": {"max_num_seqs": [0]}}, "greater than or equal to 1"),
        ({"engine": {"max_num_seqs": []}}, "names no value"),
        ({"engine": {"a.b.c": [1]}}, "extra.NAME"),
        ({"engine": {"max_num_seqs": [4, 4]}}, "repeats a value"),
        ({"baseline": "plain"}, "no arm with a drafter; those are: dflash"),
        ({"search": {"kind": "random"}}, "needs num_settings"),
        ({"search": {"num_settings": 3}}, "a grid tries all"),
    ],
)
def test_mistakes_are_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        make(**change)


def test_paths_become_absolute_and_names_of_data_sets_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").touch()
    config = make().absolute()
    assert config.prompts == str(tmp_path / "prompts.jsonl")
    assert config.out == tmp_path / "runs" / "sweep"
    assert config.serve.arms[1].drafter == tmp_path / "drafters" / "a"
    assert make(prompts="owner/dataset").absolute().prompts == "owner/dataset"


def test_engine_values_multiply_the_engines_and_are_part_of_their_names():
    config = make(engine={"max_num_seqs": [4, 8], "extra.block_size": [16]}, proposal_lengths=[2])
    names = [setting.name for setting in settings_of(config)]
    assert names == [
        "plain-block_size_16-max_num_seqs_4", "plain-block_size_16-max_num_seqs_8",
        "dflash-2-block_size_16-max_num_seqs_4", "dflash-2-block_size_16-max_num_seqs_8",
    ]  # fmt: skip
    served = settings_of(config)[3].application(config.serve)
    assert served.engine.max_num_seqs == 8
    assert served.engine.extra == {"block_size": 16}
    assert served.arms[0].num_speculative_tokens == 2


def test_values_whose_names_would_be_one_are_refused():
    with pytest.raises(ConfigError, match="one name"):
        make(engine={"kv_cache_gib": [0.5], "extra.kv": ["a b", "a_b"]})


def test_records_of_all_settings_have_the_same_keys():
    config = make(engine={"max_num_seqs": [4, 8]})
    keys = {tuple(setting.params) for setting in settings_of(config)}
    assert len(keys) == 1


def test_settings_and_measurements_survive_json():
    config = make(engine={"max_num_seqs": [4]})
    for setting in settings_of(config):
        assert Setting.parse(json.loads(json.dumps(asdict(setting)))) == setting
    measurement = Measurement("a", Load(1.0, 4), {"output_tokens_per_s": 2.5}, 3.0, 7)
    assert Measurement.parse(json.loads(json.dumps(measurement.row()))) == measurement


def test_what_decides_a_measurement_leaves_room_for_more_of_them():
    before = make().identity()
    for free in (
        {"concurrencies": [1, 2]}, {"proposal_lengths": [3]}, {"early_stop": {}},
        {"search": {"kind": "random", "num_settings": 1}}, {"resources": {"max_restarts": 0}},
    ):  # fmt: skip
        assert make(**free).identity() == before
    assert make(max_tokens=7).identity() != before


def test_what_an_arm_has_of_its_own_is_served_and_a_split_is_not():
    serve = {
        "arms": [
            {"name": "plain"},
            {"name": "dflash", "drafter": "drafters/a", "engine": {"max_num_seqs": 3}},
        ],
        "allowed_differences": ["max_num_seqs"],
        "traffic": {"weights": {"plain": 0.5, "dflash": 0.5}},
        "resources": {"device": "cpu"},
    }
    config = make(serve=serve)
    served = settings_of(config)[1].application(config.serve)
    assert served.engine_of(served.arms[0]).max_num_seqs == 3
    assert served.arms[0].name == "dflash-2"
    assert served.traffic.weights != config.serve.traffic.weights
    serve["arms"][1]["engine"] = {"max_num_seqs": 5}
    assert make(serve=serve).identity() != config.identity()
