"""What a decoding sweep tries and gives up, and what its trials do; without Ray's processes."""

from dataclasses import asdict

import pytest

from carryover.errors import ConfigError
from carryover.tracking import Tracker
from sweeps import decoding, running
from sweeps.conductor import Task
from sweeps.decoding import DecodingPlan, bundle, run, work
from sweeps.ledger import TrialEnd
from sweeps.loading import open_ledger
from sweeps.measuring import measure_function, served, tail
from sweeps.records import Records, recorded
from sweeps.settings import Load, Measurement, SweepConfig, settings_of


def instant(config, setting, loads, ready):
    """A measuring function: one second a token, at once."""
    ready()
    for load in loads:
        yield measurement(setting.name, load)


def measurement(setting, load, rate=10.0):
    return Measurement(setting, load, {"output_tokens_per_s": rate, "tpot_ms.p95": 20.0}, 1.0, 1)


def make(folder, **changes):
    values = {
        "serve": {
            "arms": [{"name": "plain"}, {"name": "dflash", "drafter": "d/a"}],
            "resources": {"device": "cpu"},
        },
        "proposal_lengths": [1, 2, 3, 4],
        "concurrencies": [1, 8, 4],
        "prompts": "owner/dataset",
        "measure": f"{__name__}:instant",
        "out": str(folder / "sweep"),
    }
    return SweepConfig.parse({**values, **changes}).absolute()


def add(ledger, config, setting, *rates):
    for load, rate in zip(config.loads(), rates, strict=False):
        ledger.add(measurement(setting, load, rate).row())


def everything(plan):
    found = []
    while (task := plan.next()) is not None:
        found.append(task.name)
    return found


def test_a_grid_leaves_out_what_is_measured_stopped_or_failed(tmp_path):
    config = make(tmp_path)
    ledger = open_ledger(config)
    add(ledger, config, "plain", 1, 1, 1)
    add(ledger, config, "dflash-1", 1, 1)
    ledger.end(TrialEnd("dflash-2", "failed", "no memory"))
    ledger.end(TrialEnd("dflash-3", "stopped", "hopeless"))
    assert everything(DecodingPlan(config, ledger)) == ["dflash-1", "dflash-4"]
    again = DecodingPlan(config, ledger, retry_failed=True)
    assert everything(again) == ["dflash-1", "dflash-2", "dflash-4"]


def test_a_load_that_is_added_later_is_measured_everywhere(tmp_path):
    config = make(tmp_path, proposal_lengths=[1])
    ledger = open_ledger(config)
    for name in ("plain", "dflash-1"):
        add(ledger, config, name, 1, 1, 1)
    assert not DecodingPlan(config, ledger).unfinished()
    more = make(tmp_path, proposal_lengths=[1], concurrencies=[1, 8, 4, 32])
    assert everything(DecodingPlan(more, open_ledger(more))) == ["plain", "dflash-1"]


@pytest.mark.parametrize("kind", ["random", "optuna"])
def test_a_search_begins_with_the_reference_and_tries_as_many_as_it_is_told(tmp_path, kind):
    config = make(tmp_path, search={"kind": kind, "num_settings": 2})
    plan = DecodingPlan(config, open_ledger(config))
    first, *others = everything(plan)
    assert first == "plain"
    assert len(set(others)) == 2 and all(name.startswith("dflash-") for name in others)
    assert plan.size == 3


def test_optuna_is_told_what_its_settings_reached(tmp_path):
    import optuna

    config = make(tmp_path, search={"kind": "optuna", "num_settings": 2})
    ledger = open_ledger(config)
    plan = DecodingPlan(config, ledger)
    plan.next()
    good, bad = plan.next(), plan.next()
    add(ledger, config, good.name, 10, 10, 10)
    plan.why_stop(good)
    plan.ended(good, TrialEnd(good.name, "done"))
    plan.ended(bad, TrialEnd(bad.name, "failed", "no memory"))
    study = optuna.load_study(study_name="sweep", storage=f"sqlite:///{config.out}/optuna.db")
    found = {t.params["num_speculative_tokens"]: (t.state.name, t.values) for t in study.trials}
    assert found[int(good.name[-1])] == ("COMPLETE", [pytest.approx(10.0)])
    assert found[int(bad.name[-1])] == ("FAIL", None)


def test_a_hopeless_length_is_given_up_and_the_reference_never(tmp_path):
    config = make(tmp_path, early_stop={"after_loads": 2, "reduction_factor": 2})
    ledger = open_ledger(config)
    plan = DecodingPlan(config, ledger)
    add(ledger, config, "plain", 1, 1)
    add(ledger, config, "dflash-1", 10, 100)
    add(ledger, config, "dflash-2", 5, 50)
    for name in ("plain", "dflash-1"):
        assert plan.why_stop(plan.tasks[name]) is None
    plan.why_stop(plan.tasks["dflash-2"])
    assert "within 10% of the best" in plan.why_stop(plan.tasks["dflash-2"])


def test_a_trial_measures_the_loads_it_is_given(tmp_path):
    config, told = make(tmp_path), []
    rows = work(
        config.model_dump(mode="json"), asdict(settings_of(config)[1]), [(0.0, 4), (0.0, 8)],
        lambda: told.append("ready"),
    )  # fmt: skip
    found = [Measurement.parse(row) for row in rows]
    assert told == ["ready"]
    assert [m.load for m in found] == [Load(0.0, 4), Load(0.0, 8)]
    assert {m.setting for m in found} == {"dflash-1"}


@pytest.mark.parametrize("name", ["absent.module:f", "sweeps.measuring:absent", "nothing"])
def test_a_measuring_function_that_is_not_there_is_refused_before_anything_starts(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot be imported"):
        run(make(tmp_path, measure=name))
    assert measure_function("sweeps.measuring:served") is served


def test_a_finished_sweep_starts_nothing(tmp_path, monkeypatch):
    config = make(tmp_path, proposal_lengths=[1])
    ledger = open_ledger(config)
    for name in ("plain", "dflash-1"):
        add(ledger, config, name, 1, 1, 1)
    monkeypatch.setattr(running, "connected", None)
    assert run(config) is None


def test_an_engine_reserves_its_gpus_or_a_node(tmp_path):
    gpu = {
        "arms": [{"name": "plain"}], "engine": {"tensor_parallel_size": 2},
        "resources": {"device": "gpu", "accelerator_type": "H200"},
    }  # fmt: skip
    config = make(tmp_path, serve=gpu, proposal_lengths=None)
    assert bundle(config) == {"CPU": 4.0, "GPU": 2.0, "accelerator_type:H200": 0.001}
    assert bundle(make(tmp_path, resources={"cpus": 3})) == {"CPU": 3.0}


def test_what_a_setting_without_a_drafter_cannot_do_is_said_at_once(tmp_path):
    config = make(tmp_path, measure="sweeps.measuring:serve_and_bench")
    setting = next(s for s in settings_of(config) if s.drafter is not None)
    with pytest.raises(ConfigError, match="no drafter folder"):
        list(measure_function(config.measure)(config, setting, config.loads(), lambda: None))


def test_the_tail_of_a_log(tmp_path):
    log = tmp_path / "log"
    assert tail(log) == ""
    log.write_text("".join(f"line {n}\n" for n in range(100_000)))
    assert tail(log, 2) == "line 99998\nline 99999"


def test_records_that_a_killed_driver_did_not_write_are_added_once(tmp_path):
    config = make(tmp_path, proposal_lengths=[1, 2])
    ledger = open_ledger(config)
    add(ledger, config, "plain", 1, 2, 3)
    ledger.end(TrialEnd("dflash-2", "failed", "first\nout of memory"))
    log = config.out / "logs" / "dflash-2.log"
    log.parent.mkdir()
    log.write_text("the engine's last words\n")
    plan, tracker = DecodingPlan(config, ledger), Tracker(folder=tmp_path)
    ids = set()
    for _ in range(2):
        with recorded(tracker, config.out, {"seed": 0}) as parent:
            records = Records(
                parent, title=decoding.title_of, load_params=("temperature", "concurrency"),
                logs=config.out / "logs",
            )  # fmt: skip
            records.add_missing(ledger, plan.tasks, tracker)
            records.close()
        ids.add(parent.id)
    assert len(ids) == 1
    client = tracker.client()
    runs = client.search_runs([client.get_experiment_by_name("sweeps").experiment_id])
    children = {run.info.run_name: run for run in runs if run.info.run_id not in ids}
    assert len(runs) == len(children) + 1
    assert {name: run.info.status for name, run in children.items()} == {
        "plain T=0 c=1": "FINISHED", "plain T=0 c=8": "FINISHED", "plain T=0 c=4": "FINISHED",
        "dflash-2": "FAILED",
    }  # fmt: skip
    assert len({tuple(sorted(run.data.params)) for run in children.values()}) == 1
    failed = children["dflash-2"]
    assert "out of memory" in failed.data.tags["carryover.error"]
    files = {f.path for f in client.list_artifacts(failed.info.run_id)}
    assert files == {"error.txt", "engine.log"}
    assert isinstance(plan.tasks["plain"], Task)


def test_gains_are_added_to_the_records_of_a_finished_sweep(tmp_path):
    config = make(tmp_path, proposal_lengths=[2], concurrencies=[1])
    ledger = open_ledger(config)
    add(ledger, config, "plain", 10.0)
    add(ledger, config, "dflash-2", 25.0)
    tracker = Tracker(folder=tmp_path)
    for _ in range(2):
        run(config, tracker=tracker)
    client = tracker.client()
    runs = client.search_runs([client.get_experiment_by_name("sweeps").experiment_id])
    (child,) = [run for run in runs if run.info.run_name == "dflash-2 T=0 c=1"]
    assert child.data.metrics["gain_over_no_drafter"] == 2.5
    assert len(client.get_metric_history(child.info.run_id, "gain_over_no_drafter")) == 1
    assert child.info.status == "FINISHED"
