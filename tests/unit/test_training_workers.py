"""Two workers train as one does: same packs, gradients and curve, exchangeable checkpoints."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from training_runs import make_run, train, weights

from carryover.drafters import checkpoint
from carryover.training.workers import Workers


def worker(rank, size, store, jobs, results):
    """One of two processes; trains each run in turn."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    for parallelism, assignment in jobs:
        workers = Workers(rank=rank, size=size, parallelism=parallelism)
        _, reporter = train(assignment, workers=workers)
        if workers.is_first:
            results.put(reporter.events)
        assert rank == 0 or not [e for e in reporter.events if e["kind"] != "cached"]
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_llama):
    """Events and run folders by name; all runs of two workers share one pair of processes."""
    folder = tmp_path_factory.mktemp("workers")
    start = make_run(folder / "start", tiny_llama, max_steps=2)
    train(start)
    begun = make_run(folder / "begun", tiny_llama)
    train(begun, stop_at=5)
    hidden = {"cache": "disk", "cache_folder": str(folder / "hs"), "cache_dtype": "float32"}
    cases = {
        "ddp": ("ddp", make_run(folder / "ddp", tiny_llama)),
        "fsdp": ("fsdp", make_run(folder / "fsdp", tiny_llama, drafter={"draft_vocab_size": 99})),
        "cached": ("ddp", make_run(folder / "cached", tiny_llama, hidden_states=hidden)),
        "begun": ("fsdp", begun),
        "carryover": (
            "fsdp",
            make_run(folder / "carryover", tiny_llama, kind="carryover",
                     start_from=start.run_folder / "last", max_steps=6),
        ),
    }  # fmt: skip
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    jobs = list(cases.values())
    processes = torch.multiprocessing.spawn(
        worker, (2, str(folder / "store"), jobs, results), nprocs=2, join=False
    )
    events = {name: results.get() for name in cases}
    while not processes.join():
        pass
    found = {name: (events[name], cases[name][1].run_folder) for name in cases}
    for name, changes in {
        "one": {},
        "one, reduced": {"drafter": {"draft_vocab_size": 99}},
        "one, carryover": {
            "kind": "carryover",
            "start_from": start.run_folder / "last",
            "max_steps": 6,
        },
    }.items():
        assignment = make_run(folder / name.replace(", ", "-"), tiny_llama, **changes)
        found[name] = (train(assignment)[1].events, assignment.run_folder)
    return found


def curve(events, key="loss"):
    steps = [event for event in events if event["kind"] == "step"]
    return [event["metrics"][key] if key == "loss" else event[key] for event in steps]


@pytest.mark.parametrize(
    ("two", "one"),
    [("ddp", "one"), ("cached", "one"), ("fsdp", "one, reduced"), ("carryover", "one, carryover")],
)
def test_two_workers_take_the_same_steps_as_one(runs, two, one):
    (events, folder), (expected, single) = runs[two], runs[one]
    assert curve(events, "gradient_norm") == pytest.approx(
        curve(expected, "gradient_norm"), rel=1e-3
    )
    assert curve(events) == pytest.approx(curve(expected), rel=1e-4)
    assert curve(events, "pack_tokens") == curve(expected, "pack_tokens")
    rounds = [
        [event["metrics"]["rounds"] for event in found if event["kind"] == "evaluation"]
        for found in (events, expected)
    ]
    assert rounds[0] == rounds[1]
    last, reference = weights(folder / "last"), weights(single / "last")
    assert last.keys() == reference.keys()
    for name, tensor in last.items():
        torch.testing.assert_close(tensor, reference[name], atol=2e-3, rtol=2e-3)


def test_a_run_that_one_worker_began_is_finished_by_two(runs):
    events, folder = runs["begun"]
    expected, _ = runs["one"]
    assert curve(events) == pytest.approx(curve(expected)[5:], rel=1e-4)
    assert checkpoint.describe(folder / "last")["provenance"]["step"] == 12


def test_sharded_checkpoints_are_whole(runs, tiny_llama):
    _, folder = runs["fsdp"]
    drafter = checkpoint.load(folder / "best")
    assert drafter.use_draft_vocab and drafter.lm_head.weight.shape[0] == 99
    assert torch.equal(drafter.lm_head.weight, weights(folder / "initial")["lm_head.weight"])
