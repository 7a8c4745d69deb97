"""500 settings on a Ray cluster of several nodes: deaths of trials and of a node, memory, cost."""

import threading
from collections import Counter
from pathlib import Path

import psutil
import pytest

from sweeps import decoding
from sweeps.settings import SweepConfig, settings_of

pytestmark = pytest.mark.ray

DRAFTERS, LENGTHS, LOADS = 10, 50, [1, 16]
# of the driver, from the hundredth setting to the last; Tune keeps about 20 kB of each trial
MEMORY_BYTES = 64 * 2**20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Three nodes of two cores each, of which one will be lost; the driver is on the first."""
    import ray
    from ray.cluster_utils import Cluster

    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", str(Path(__file__).parent))
    memory = {"object_store_memory": 80 * 2**20}
    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "include_dashboard": False, **memory},
    )
    made.lost = made.add_node(num_cpus=2, **memory)
    made.add_node(num_cpus=2, **memory)
    made.wait_for_nodes()
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()
    patch.undo()


class Watch:
    """A listener that follows the driver's memory, and takes a node away in between."""

    def __init__(self, cluster):
        self.cluster, self.ended_settings, self.memory = cluster, 0, {}
        self.removal = threading.Thread(
            target=cluster.remove_node, args=[cluster.lost], kwargs={"allow_graceful": False}
        )

    def started(self, *_):
        pass

    ready = measured = started

    def ended(self, task, end):
        if end.outcome == "died":
            return
        self.ended_settings += 1
        if self.ended_settings == 150:
            self.removal.start()
        if self.ended_settings % 100 == 0:
            self.memory[self.ended_settings] = psutil.Process().memory_info().rss


def test_all_of_500_settings_are_accounted_for(cluster, tmp_path, record_property):
    import ray

    drafters = [{"name": f"d{n}", "drafter": f"drafters/{n}"} for n in range(DRAFTERS)]
    config = SweepConfig.parse(
        {
            "serve": {"arms": drafters, "resources": {"device": "cpu"}},
            "proposal_lengths": list(range(1, LENGTHS + 1)),
            "concurrencies": LOADS,
            "prompts": "prompts.jsonl",
            "measure": "sweep_stubs:mortal",
            "resources": {"cpus": 1, "max_restarts": 3},
            "out": str(tmp_path / "sweep"),
        }
    )
    watch = Watch(cluster)
    figures = decoding.run(config, listeners=[watch])
    watch.removal.join()

    names = {setting.name for setting in settings_of(config)}
    assert len(names) == 500
    ledger = decoding.open_ledger(config)
    rows = Counter((row["setting"], row["concurrency"]) for row in ledger.rows())
    assert rows == Counter((name, load) for name in names for load in LOADS)
    ends = Counter((end.setting, end.outcome) for end in ledger.trials())
    assert {name for name, outcome in ends if outcome == "done"} == names
    assert all(count == 1 for (_, outcome), count in ends.items() if outcome == "done")
    died = {name for name, outcome in ends if outcome == "died"}
    killed = {file.name for file in (tmp_path / "sweep/died").iterdir()}
    assert killed and killed <= died, "those that ended their own process; more were on the node"
    assert sum(node["Alive"] for node in ray.nodes()) == 2
    assert figures.trials == sum(ends.values())

    grown = watch.memory[500] - watch.memory[100]
    assert grown < MEMORY_BYTES, f"the driver grew by {grown / 2**20:.0f} MiB over 400 settings"
    record_property("driver_bytes_per_setting", grown / 400)
    record_property("scheduling_s_per_trial", figures.overhead_s)
    print(
        f"scheduling: {figures.overhead_s:.2f} s of a slot for each trial, {figures.wall_s:.0f} s "
        f"in all; driver: {grown / 400 / 1000:.0f} kB for each setting"
    )

    groups = ray.util.placement_group_table().values()
    assert {group["state"] for group in groups} <= {"REMOVED"}
    again = decoding.run(config)
    assert again is None, "a finished sweep starts nothing"


def test_a_budget_ends_a_sweep_which_then_goes_on(cluster, tmp_path):
    values = {
        "serve": {"arms": [{"name": "d", "drafter": "d"}], "resources": {"device": "cpu"}},
        "proposal_lengths": list(range(1, 9)),
        "concurrencies": LOADS,
        "prompts": "prompts.jsonl",
        "measure": "sweep_stubs:slow",
        "resources": {"cpus": 2},
        "out": str(tmp_path / "sweep"),
    }
    config = SweepConfig.parse(values)
    figures = decoding.run(config, budget_s=5.0)
    assert figures.out_of_time
    ledger = decoding.open_ledger(config)
    kept = list(ledger.rows())
    assert len(kept) < 16
    assert {end.outcome for end in ledger.trials()} <= {"done"}, "what is cut is no failure"

    fast = SweepConfig.parse({**values, "proposal_lengths": [1, 2, 3]})
    assert not decoding.run(fast).out_of_time
    found = [(row["setting"], row["concurrency"]) for row in decoding.open_ledger(fast).rows()]
    assert len(set(found)) == len(found) and found[: len(kept)] == [
        (row["setting"], row["concurrency"]) for row in kept
    ]
    assert {(f"d-{n}", load) for n in (1, 2, 3) for load in LOADS} <= set(found)
