"""Application configurations: arms differ in the drafter alone, and mistakes are told early."""

import json

import pytest

from carryover.errors import ConfigError
from carryover.serving.config import ServeConfig, check_drafters, check_target

IDENTITY = {
    "name": "t", "architecture": "LlamaForCausalLM", "hidden_size": 64, "num_hidden_layers": 4,
    "vocab_size": 320, "tokenizer_sha256": "abc",
}  # fmt: skip


class FakeTarget:
    name = "t"

    def __init__(self, **changes):
        self._identity = {**IDENTITY, **changes}

    def identity(self):
        return dict(self._identity)


def values(**changes):
    return {
        "engine": {"kv_cache_gib": 0.1},
        "arms": [{"name": "plain"}],
        "resources": {"device": "cpu"},
        **changes,
    }


def parse(**changes):
    return ServeConfig.parse(values(**changes))


@pytest.fixture
def drafter(tmp_path):
    """A folder that looks like a checkpoint with proposals of 7 tokens."""

    def write(name="drafter", **changes):
        folder = tmp_path / name
        folder.mkdir()
        config = {
            "speculators_model_type": "dflash",
            "block_size": 8,
            "sample_from_anchor": False,
            "aux_hidden_state_layer_ids": [1, 3],
            "transformer_layer_config": {"hidden_size": 64, "vocab_size": 320},
            **changes,
        }
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").write_bytes(b"")
        return folder

    return write


def with_drafter(folder, **arm):
    return parse(arms=[{"name": "plain"}, {"name": "fast", "drafter": str(folder), **arm}])


def test_the_shipped_configuration_is_valid_and_local(repository):
    config = ServeConfig.load(repository / "serve_apps/configs/embedded.yaml")
    assert config.target == "embedded"
    assert config.http.host == "127.0.0.1"
    assert config.control.drafter is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": [{"name": "a"}, {"name": "a"}]}, "a appears twice"),
        ({"arms": []}, "arms: "),
        ({"arms": [{"name": "a--b"}]}, "joined by single"),
        ({"arms": [{"name": "a:b"}]}, "lower-case letters and digits"),
        ({"arms": [{"name": "Plain"}]}, "lower-case letters and digits"),
        ({"arms": [{"name": "a", "num_speculative_tokens": 3}]}, "without a drafter"),
        ({"arms": [{"name": "a", "nme": 1}]}, "did you mean 'name'"),
        ({"model": "plain"}, "also an arm's name"),
        ({"model": "a--b"}, "a model name holds"),
        ({"engin": {}}, "did you mean 'engine'"),
        ({"engine": {"extra": {"speculative_config": {}}}}, "may not hold speculative_config"),
        ({"engine": {"tensor_parallel_size": 2}}, "needs device gpu"),
        ({"http": {"port": 70000}}, "http.port"),
        ({"resources": {"device": "cpu", "accelerator_type": "H200"}}, "is for device gpu"),
        ({"resources": {"device": "gpu", "gpus_per_worker": 0.5}}, "set it to 0.5 or less"),
    ],
)
def test_mistakes_are_refused_with_what_to_do(changes, message):
    with pytest.raises(ConfigError, match=message):
        parse(**changes)


def test_a_message_about_a_section_does_not_print_the_section():
    with pytest.raises(ConfigError) as caught:
        parse(arms=[{"name": "a"}, {"name": "a"}])
    assert "{" not in str(caught.value)


def test_resolved_yaml_loads_again(tmp_path):
    config = parse(http={"port": 9000})
    path = tmp_path / "again.yaml"
    path.write_text(config.to_yaml())
    assert ServeConfig.load(path) == config


def test_proposal_length_defaults_to_the_checkpoints(drafter):
    checked = check_drafters(with_drafter(drafter()))
    assert [arm.num_speculative_tokens for arm in checked.arms] == [None, 7]
    assert check_drafters(with_drafter(drafter("b"), num_speculative_tokens=4)).arms[1] == (
        with_drafter(drafter("c"), num_speculative_tokens=4)
        .arms[1]
        .model_copy(update={"drafter": drafter("d").parent / "b"})
    )


def test_proposal_length_above_the_checkpoints_is_refused(drafter):
    with pytest.raises(ConfigError, match=r"8 exceeds the checkpoint's 7; set it to 7"):
        check_drafters(with_drafter(drafter(), num_speculative_tokens=8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculators_model_type": None, "block_size": None}, "gives no block_size"),
        ({"block_size": 1}, "gives no block_size"),
        ({"sample_from_anchor": True}, "samples from the anchor slot"),
    ],
)
def test_unusable_checkpoints_are_refused(drafter, changes, message):
    with pytest.raises(ConfigError, match=message):
        check_drafters(with_drafter(drafter(**changes)))


def test_a_dspark_checkpoint_samples_from_the_anchor_unless_it_says_otherwise(drafter):
    folder = drafter(speculators_model_type="dspark")
    values = json.loads((folder / "config.json").read_text())
    assert check_drafters(with_drafter(folder)).arms[1].num_speculative_tokens == 7
    del values["sample_from_anchor"]
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="samples from the anchor slot"):
        check_drafters(with_drafter(folder))


def test_folders_that_are_no_checkpoints_are_refused(tmp_path, drafter):
    with pytest.raises(ConfigError, match="no drafter folder at"):
        check_drafters(with_drafter(tmp_path / "absent"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        check_drafters(with_drafter(tmp_path / "empty"))
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="a target's folder is not a drafter's"):
        check_drafters(with_drafter(target))
    broken = drafter()
    (broken / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read"):
        check_drafters(with_drafter(broken))
    weightless = drafter("weightless")
    (weightless / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no \.safetensors weights"):
        check_drafters(with_drafter(weightless))


def test_a_drafter_of_another_target_is_refused(drafter):
    config = with_drafter(drafter())
    check_target(config, FakeTarget())
    with pytest.raises(ConfigError, match=r"hidden_size: expected 64, got 128"):
        check_target(config, FakeTarget(hidden_size=128))
    with pytest.raises(ConfigError, match=r"more than layer id 3, got 3"):
        check_target(config, FakeTarget(num_hidden_layers=3))


def test_a_recorded_target_is_compared_whole(drafter):
    folder = drafter()
    config = with_drafter(folder)
    (folder / "provenance.json").write_text(json.dumps({"target": IDENTITY}))
    check_target(config, FakeTarget(name="same by another path"))
    with pytest.raises(ConfigError, match="tokenizer_sha256"):
        check_target(config, FakeTarget(tokenizer_sha256="other"))
    ours = drafter("ours", carryover={"target": IDENTITY})
    with pytest.raises(ConfigError, match="vocab_size"):
        check_target(with_drafter(ours), FakeTarget(vocab_size=321))


def test_arms_may_differ_in_what_is_allowed_and_in_nothing_else():
    arms = [{"name": "plain"}, {"name": "wide", "engine": {"max_num_seqs": 7}}]
    with pytest.raises(ConfigError, match="differs from the others in max_num_seqs"):
        parse(arms=arms)
    config = parse(arms=arms, allowed_differences=["max_num_seqs"])
    assert [config.engine_of(arm).max_num_seqs for arm in config.arms] == [96, 7]
    # the same value is no difference
    parse(arms=[{"name": "a"}, {"name": "b", "engine": {"max_num_seqs": 96}}])


def test_extra_engine_arguments_are_differences_by_their_own_names():
    arms = [{"name": "a"}, {"name": "b", "engine": {"extra": {"enable_prefix_caching": False}}}]
    with pytest.raises(ConfigError, match=r"extra\.enable_prefix_caching"):
        parse(arms=arms)
    config = parse(
        arms=arms, allowed_differences=["extra.enable_prefix_caching"],
        engine={"kv_cache_gib": 0.1, "extra": {"max_num_batched_tokens": 64}},
    )  # fmt: skip
    first, second = (config.engine_of(arm).extra for arm in config.arms)
    assert first == {"max_num_batched_tokens": 64}
    assert second == {"max_num_batched_tokens": 64, "enable_prefix_caching": False}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": [{"name": "a", "engine": {"max_num_seq": 3}}]}, "did you mean 'max_num_seqs'"),
        ({"arms": [{"name": "a", "engine": {"extra": {"model": "x"}}}]}, "platform sets it"),
        ({"traffic": {"weights": {"plian": 100}}}, "did you mean 'plain'"),
        ({"traffic": {"fallback": ["nobody"]}}, "no arm 'nobody'"),
    ],
)
def test_mistakes_between_sections_are_told(changes, message):
    with pytest.raises(ConfigError, match=message):
        parse(**changes)


def test_shipped_experiments_are_valid_and_local(repository):
    for name in ("ab_embedded", "ab_qwen3_4b"):
        config = ServeConfig.load(repository / f"serve_apps/configs/{name}.yaml")
        assert config.http.host == "127.0.0.1" and len(config.arms) == 2
        assert config.control.name == next(iter(config.traffic.weights))
