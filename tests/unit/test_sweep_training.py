"""What a training sweep covers, stops and reports; without training."""

import pytest
import yaml

from carryover.errors import ConfigError
from sweeps.ledger import TrialEnd
from sweeps.loading import load
from sweeps.training import TrainingPlan, open_ledger
from sweeps.training_page import ranked, write_page
from sweeps.training_settings import (
    FINAL,
    Training,
    TrainingSweepConfig,
    train_with,
    trainings_of,
)


def make(folder, **changes):
    values = {
        "train": {"data": "responses", "max_steps": 100},
        "values": {"optimizer.lr": [1e-3, 3e-4], "drafter.num_layers": [1, 2]},
        "out": str(folder / "sweep"),
    }
    return TrainingSweepConfig.parse({**values, **changes})


def evaluation(training, at, length):
    step = 100 if at == FINAL else int(at)
    return {
        "setting": training.name, "at": at, "step": step, "wall_s": 1.0,
        "figures": {"acceptance_length": length},
    }  # fmt: skip


def test_trainings_are_the_product_of_values_and_their_names_are_folders(tmp_path):
    names = [training.name for training in trainings_of(make(tmp_path))]
    assert names == [
        "num_layers_1-lr_0.001", "num_layers_1-lr_0.0003",
        "num_layers_2-lr_0.001", "num_layers_2-lr_0.0003",
    ]  # fmt: skip
    train = train_with(make(tmp_path).train, dict(trainings_of(make(tmp_path))[3].values))
    assert train.optimizer.lr == 3e-4 and train.drafter.num_layers == 2
    for name in names:
        assert train.model_validate({**train.model_dump(), "name": name}).name == name


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"values": {"optimizer.lrr": [1]}}, "no such key"),
        ({"values": {"lr": [1]}}, "no such key"),
        ({"values": {"optimizer.lr": [-1.0]}}, "greater than 0"),
        ({"values": {"optimizer.lr": []}}, "names no value"),
        ({"values": {"optimizer.lr": [1e-3, 1e-3]}}, "repeats a value"),
        ({"values": {}}, "at least 1 item"),
        ({"kind": "carryover"}, "need start_from"),
        ({"trian": {}}, "did you mean 'train'"),
    ],
)
def test_mistakes_are_refused(tmp_path, change, said):
    with pytest.raises(ConfigError, match=said):
        make(tmp_path, **change)


def test_a_configuration_with_the_key_train_is_a_training_sweeps(tmp_path):
    file = tmp_path / "sweep.yaml"
    file.write_text(make(tmp_path).to_yaml())
    assert isinstance(load(file), TrainingSweepConfig)
    assert load(file, ["resources.max_restarts=0"]).resources.max_restarts == 0
    assert yaml.safe_load(make(tmp_path).to_yaml())["values"]["optimizer.lr"] == [1e-3, 3e-4]


def test_what_decides_a_training_leaves_out_what_is_swept_and_where_it_runs(tmp_path):
    before = make(tmp_path).identity()
    more = {"optimizer.lr": [1e-2], "drafter.num_layers": [1, 2, 3]}
    assert make(tmp_path, values=more).identity() == before
    where = {"data": "responses", "max_steps": 100, "resources": {"num_workers": 1}}
    assert make(tmp_path, train=where).identity() == before
    assert make(tmp_path, train={"data": "responses", "max_steps": 7}).identity() != before


def test_finished_failed_and_stopped_trainings_are_not_repeated(tmp_path):
    config = make(tmp_path)
    ledger = open_ledger(config)
    first, second, third, fourth = trainings_of(config)
    ledger.add(evaluation(first, FINAL, 2.0))
    ledger.end(TrialEnd(second.name, "failed", "no memory"))
    ledger.end(TrialEnd(third.name, "stopped", "third of three"))
    ledger.add(evaluation(fourth, "50", 1.5))
    plan = TrainingPlan(config, open_ledger(config))
    assert plan.next().name == fourth.name and plan.next() is None
    again = TrainingPlan(config, open_ledger(config), retry_failed=True)
    assert {again.next().name, again.next().name} == {second.name, fourth.name}


def test_the_worst_of_three_is_stopped_and_not_after_its_end(tmp_path):
    config = make(tmp_path, early_stop={"after_steps": 50, "reduction_factor": 3})
    ledger = open_ledger(config)
    trainings = trainings_of(config)
    plan = TrainingPlan(config, ledger)
    for training, length in zip(trainings[:3], (3.0, 2.0, 1.0), strict=True):
        ledger.add(evaluation(training, "50", length))
    assert "number 3 of 3" in plan.why_stop(plan.tasks[trainings[2].name])
    assert plan.why_stop(plan.tasks[trainings[0].name]) is None
    ledger.add(evaluation(trainings[2], FINAL, 1.0))
    assert plan.why_stop(plan.tasks[trainings[2].name]) is None
    assert TrainingPlan(make(tmp_path), ledger).why_stop(plan.tasks[trainings[1].name]) is None


def test_the_page_ranks_trainings_and_says_what_failed(tmp_path):
    config = make(tmp_path)
    ledger = open_ledger(config)
    for number, training in enumerate(trainings_of(config)[:3]):
        ledger.add(evaluation(training, "50", 1.0 + number / 2))
        ledger.add(evaluation(training, FINAL, 1.5 + number / 2))
    ledger.end(TrialEnd(trainings_of(config)[3].name, "failed", "out of memory"))
    best = ranked(config, ledger)
    assert [length for _, length in best] == [2.5, 2.0, 1.5]
    assert isinstance(best[0][0], Training)
    text = write_page(config, ledger, tmp_path / "page.html").read_text()
    for part in ("num_layers_2-lr_0.001", "2.500", "out of memory", "Value by value", "<svg"):
        assert part in text, part
