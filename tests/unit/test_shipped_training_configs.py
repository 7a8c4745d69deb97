"""The shipped GPU recipes, run for a step on tiny random models of the targets' classes."""

import pytest
from training_runs import make_run, train

from carryover.drafters import checkpoint
from carryover.training.config import TrainConfig

TARGETS = {
    # 36 layers like Qwen3-4B: the recipe names some of them.
    "qwen3_4b": {"architecture": "qwen3", "num_layers": 36, "hidden_size": 32},
    "gemma4_12b": {"architecture": "gemma4", "num_layers": 12, "hidden_size": 32},
}


@pytest.mark.parametrize("regime", ["dflash", "markov"])
@pytest.mark.parametrize("model", list(TARGETS))
def test_the_recipe_trains_a_baseline_and_carryover(tmp_path, tiny, repository, model, regime):
    recipe = TrainConfig.load(repository / "jobs" / "configs" / f"{model}_{regime}.yaml")
    settings = recipe.model_dump(exclude={"name", "target", "data"}) | {
        "target_precision": "float32",
        "precision": "float32",
        "max_steps": 1,
        "resources": {"num_workers": 1},
        "batch": {"sequence_length": 128, "packs_per_step": 2},
        "evaluation": {"every_steps": 1, "max_sequences": 2},
    }
    folder = tiny(**TARGETS[model])
    baseline = make_run(tmp_path / "baseline", folder, **settings)
    train(baseline)
    described = checkpoint.describe(baseline.run_folder / "last")
    assert (described["regime"], described["layers"], described["proposal_length"]) == (
        regime, 5, 15,
    )  # fmt: skip
    if model == "qwen3_4b":
        assert described["target_layer_ids"] == [2, 10, 18, 26, 34]
    carryover = make_run(
        tmp_path / "carryover",
        folder,
        kind="carryover",
        start_from=baseline.run_folder / "last",
        **settings,
    )
    _, reporter = train(carryover)
    metrics = reporter.of("step")[0]["metrics"]
    assert metrics["carried_rows"] > 0 and metrics["loss"] > 0
    assert checkpoint.describe(carryover.run_folder / "last")["kind"] == "carryover"
