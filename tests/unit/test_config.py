"""Configuration: strict keys with the nearest name, overrides, YAML that reads back the same."""

import pytest

from carryover.config import Config
from carryover.errors import ConfigError


class Optimizer(Config):
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)


class Arm(Config):
    name: str
    tokens: int = 7


class Example(Config):
    optimizer: Optimizer = Optimizer()
    arms: list[Arm] = []
    limit: Arm | None = None


def write(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return path


def test_unknown_keys_name_the_nearest_valid_one(tmp_path):
    path = write(tmp_path, "optimiser: {lr: 1}\narms: [{name: a, token: 3}]\noptimizer: {zzz: 1}\n")
    with pytest.raises(ConfigError) as error:
        Example.load(path)
    text = str(error.value)
    assert "optimiser: unknown key; did you mean 'optimizer'?" in text
    assert "arms.0.token: unknown key; did you mean 'tokens'?" in text
    assert "optimizer.zzz: unknown key; valid names: betas, lr" in text
    assert str(path) in text


def test_every_wrong_value_is_told_at_once(tmp_path):
    with pytest.raises(ConfigError) as error:
        Example.load(write(tmp_path, "optimizer: {lr: fast}\narms: [{tokens: 1}]\n"))
    assert "optimizer.lr" in str(error.value) and "got 'fast'" in str(error.value)
    assert "arms.0.name: required" in str(error.value)


def test_overrides_reach_nested_keys_lists_and_scientific_numbers(tmp_path):
    path = write(tmp_path, "arms: [{name: a}, {name: b}]\n")
    config = Example.load(
        path, overrides=["optimizer.lr=6e-4", "arms.1.tokens=15", "limit.name=x", "arms.0.name=c=d"]
    )
    assert config.optimizer.lr == 6e-4
    assert config.arms[1].tokens == 15
    assert config.limit == Arm(name="x")
    assert config.arms[0].name == "c=d"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lr", "key=value"),
        ("=3", "key=value"),
        ("arms.5.name=x", "not an index"),
        ("optimizer.lr.deep=1", "no keys below"),
        ("limit={", "not valid YAML"),
    ],
)
def test_malformed_overrides_say_what_is_wrong(tmp_path, override, message):
    path = write(tmp_path, "arms: [{name: a}]\noptimizer: {lr: 1.0}\n")
    with pytest.raises(ConfigError, match=message):
        Example.load(path, overrides=[override])


@pytest.mark.parametrize(
    ("text", "message"),
    [("- 1\n", "mapping"), ("a: 1\na: 2\n", "twice"), ("a: [", "not valid YAML")],
)
def test_malformed_files_are_refused(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        Example.load(write(tmp_path, text))


def test_a_missing_file_lists_its_neighbours(tmp_path):
    write(tmp_path, "{}")
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        Example.load(tmp_path / "d.yaml")


def test_the_resolved_yaml_reads_back_the_same(tmp_path):
    config = Example.load(overrides=["optimizer.lr=6e-4", "limit.name=x"])
    assert Example.load(write(tmp_path, config.to_yaml())) == config


def test_configurations_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Optimizer().lr = 2.0


class Engine(Config):
    length: int = 1024
    requests: int = 96
    optimizer: Optimizer = Optimizer()


class Bench(Config):
    """Its engine is not what an engine is elsewhere."""

    engine: Engine = Engine(requests=1, optimizer=Optimizer(lr=0.5))
    others: list[Engine] = []


def test_a_key_of_a_section_leaves_what_the_sections_default_sets():
    found = Bench.load(overrides=["engine.length=2048", "engine.optimizer.betas=[0, 1]"])
    assert (found.engine.length, found.engine.requests) == (2048, 1)
    assert (found.engine.optimizer.lr, found.engine.optimizer.betas) == (0.5, (0, 1))
    assert Bench.load(overrides=["engine.requests=3"]).engine.requests == 3
    assert Bench.load(overrides=["others=[{length: 8}]"]).others[0].requests == 96
    with pytest.raises(ConfigError, match=r"engine\.lenght: unknown key; did you mean 'length'"):
        Bench.load(overrides=["engine.lenght=1"])


def test_every_default_section_of_the_platform_keeps_what_it_sets():
    """One key of a section given on the command line changes that key alone."""
    from carryover.bench.offline import OfflineConfig
    from carryover.data.synthesis import SynthesizeConfig
    from carryover.training.target_config import TargetTrainConfig

    offline = OfflineConfig.parse({"prompts": "x", "engine": {"max_model_len": 2048}})
    assert offline.engine.max_num_seqs == 1
    written = SynthesizeConfig.parse({"engine": {"dtype": "bfloat16"}})
    assert written.engine.max_model_len == SynthesizeConfig().engine.max_model_len == 512
    trained = TargetTrainConfig.parse({"optimizer": {"beta1": 0.8}})
    assert trained.optimizer.lr == TargetTrainConfig().optimizer.lr == 2e-3
