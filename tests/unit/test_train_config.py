"""Training settings: what is refused and how, what is derived, and the configs that ship."""

import pytest
import yaml
from typer.testing import CliRunner

from carryover.cli import app
from carryover.drafters.settings import DrafterSettings
from carryover.errors import ConfigError
from carryover.training.config import TrainConfig, changed_settings, derived_seed

CONFIGS = [
    "embedded", "qwen3_4b_dflash", "qwen3_4b_markov", "gemma4_12b_dflash", "gemma4_12b_markov",
]  # fmt: skip


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.learning_rate=1", r"optimizer\.learning_rate: unknown key"),
        ("optimiser.lr=1", "did you mean 'optimizer'"),
        ("name=a/b", "a name has letters"),
        ("optimizer.lr=0", r"optimizer\.lr: .*greater than 0"),
        ("epochs=-1", "epochs: .*greater than 0"),
        ("step.loss.kl=0", "all loss weights are 0"),
        ("drafter.proposal_length=1023", "does not fit into"),
        ("hidden_states.cache=ram", "'none' or 'disk'"),
        ("resources.num_workers=3", r"packs_per_step \(4\) must be a multiple .*take 3 or 6"),
    ],
)
def test_wrong_settings_say_what_is_wrong(override, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig.load(overrides=["batch.packs_per_step=4", override])


def test_bfloat16_is_sharded_and_ddp_is_refused():
    assert TrainConfig(precision="bfloat16").parallelism == "fsdp"
    assert TrainConfig(precision="float32").parallelism == "ddp"
    assert TrainConfig(resources={"gpus_per_worker": 1}).parallelism == "fsdp"
    with pytest.raises(ConfigError, match="keeps float32 weights beside"):
        TrainConfig.parse({"precision": "bfloat16", "resources": {"parallelism": "ddp"}})


def test_auto_precision_follows_the_workers():
    def found(config, **settings):
        resolved = config.resolved(**settings)
        return resolved.precision, resolved.target_precision

    assert found(TrainConfig(), fast_bfloat16=False) == ("float32", "float32")
    assert found(TrainConfig(), fast_bfloat16=True) == ("float32", "bfloat16")
    gpu = TrainConfig(resources={"gpus_per_worker": 1})
    assert found(gpu, fast_bfloat16=False) == ("bfloat16", "bfloat16")
    chosen = TrainConfig(precision="bfloat16", target_precision="float32")
    assert found(chosen, fast_bfloat16=True) == ("bfloat16", "float32")


def test_a_continued_run_takes_the_checkpoints_drafter_and_its_own_epochs():
    config = TrainConfig.parse({"continuation": {"epochs": 2, "lr": 0.5}, "epochs": 7})
    drafter = DrafterSettings(num_layers=9)
    continued = config.continued(regime="markov", drafter=drafter)
    assert (continued.regime, continued.drafter.num_layers) == ("markov", 9)
    assert (continued.epochs, continued.optimizer.lr) == (2, 0.5)
    same = TrainConfig().continued(regime="dflash", drafter=drafter)
    assert same.optimizer.lr == TrainConfig().optimizer.lr


def test_what_a_step_depends_on_is_fixed_and_where_it_runs_is_free():
    base = TrainConfig()
    free = [
        "name=x", "data=y", "resources.max_restarts=5", "checkpoints.every_steps=7",
        "hidden_states.cache=disk", "verify_first=false", "evaluation.every_steps=9",
        "optimizer.max_skipped_steps=99",
    ]  # fmt: skip
    assert TrainConfig.load(overrides=free).fingerprint() == base.fingerprint()
    fixed = ["optimizer.lr=1", "seed=1", "evaluation.max_sequences=3", "regime=markov", "epochs=9"]
    for override in fixed:
        changed = TrainConfig.load(overrides=[override])
        lines = changed_settings(base.fingerprint(), changed.fingerprint())
        assert len(lines) == 1 and lines[0].startswith(override.partition("=")[0])


def test_derived_seeds_differ_and_stay():
    seeds = {derived_seed("anchors", 0, step, place) for step in range(50) for place in range(4)}
    assert len(seeds) == 200 and all(0 <= seed < 2**63 for seed in seeds)
    assert derived_seed("anchors", 0, 1, 2) == 8775899918687801949


@pytest.mark.parametrize("name", CONFIGS)
def test_shipped_configs_are_valid_and_print_as_they_are_read(repository, name):
    path = repository / "jobs" / "configs" / f"{name}.yaml"
    done = CliRunner().invoke(app, ["train", "baseline", "--config", str(path), "--dry-run"])
    assert done.exit_code == 0, done.output
    printed = yaml.safe_load(done.stdout)
    assert TrainConfig.parse(printed) == TrainConfig.load(path)
    config = TrainConfig.load(path)
    if name != "embedded":
        assert (config.drafter.num_layers, config.drafter.proposal_length) == (5, 15)
        assert (config.epochs, config.continuation.epochs) == (10, 3)
        assert config.step.num_anchors == 512 and config.resources.gpus_per_worker == 1
        uncommented = [
            line for line in path.read_text().splitlines()
            if any(c.isdigit() for c in line.partition(":")[2]) and "#" not in line
            and not line.strip().startswith(("name:", "kl: 0.0", "gpus_per", "cpus_per"))
        ]  # fmt: skip
        assert not uncommented, "every number says where it comes from"


def test_help_names_every_key():
    """Each setting has a description, which the reference in the docs is made from."""

    def undescribed(model, prefix=""):
        for name, field in model.model_fields.items():
            if hasattr(field.annotation, "model_fields"):
                yield from undescribed(field.annotation, f"{prefix}{name}.")
            elif not field.description:
                yield f"{prefix}{name}"

    left = set(undescribed(TrainConfig))
    assert left <= {
        f"drafter.{name}"
        for name in ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    }, left
