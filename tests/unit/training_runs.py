"""Shared by the tests of training runs: tiny data, runs, and a reporter that remembers."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from carryover.data.responses import RESPONSES
from carryover.drafters import checkpoint
from carryover.targets import resolve
from carryover.training.config import TrainConfig
from carryover.training.session import Assignment, build_loop, load_data
from carryover.training.workers import Workers

SETTINGS = {
    "target_precision": "float32",
    "precision": "float32",
    "drafter": {"num_layers": 1, "proposal_length": 4, "target_layer_ids": [1, 3]},
    "batch": {"sequence_length": 96, "packs_per_step": 2},
    "step": {"num_anchors": 12, "loss": {"ce": 1.0}},
    "optimizer": {"lr": 3e-3},
    "epochs": 100,
    "max_steps": 12,
    "evaluation": {"every_steps": 4, "max_sequences": 3},
    "checkpoints": {"every_steps": 5},
}


def rows(count=24, *, seed=0, longest=40):
    """Random responses; even ids are greedy, every third was cut."""
    random = np.random.default_rng(seed)
    return [
        {
            "id": 100 + index,
            "source": "test",
            "category": "chat",
            "temperature": 0.8 * (index % 2),
            "prompt_ids": random.integers(5, 300, random.integers(2, 20)).tolist(),
            "response_ids": random.integers(5, 300, random.integers(2, longest)).tolist(),
            "finish": "length" if index % 3 == 0 else "stop",
        }
        for index in range(count)
    ]


def table(values):
    return pa.Table.from_pylist(values, schema=RESPONSES)


def merged(values, changes):
    """Nested mappings, changed key by key."""
    result = dict(values)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


def make_run(folder, target_folder, *, kind="baseline", data=None, start_from=None, **changes):
    """A run that is ready to be trained: data, settings and the initial drafter are written."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "responses.parquet"
    pq.write_table(table(rows() if data is None else data), path)
    config = TrainConfig.parse(merged(SETTINGS, {"name": folder.name, **changes}))
    target = resolve(str(target_folder))
    assignment = Assignment(config, kind, target, path, folder / "run")
    if start_from is None:
        found = load_data(assignment)
        counts = found.corpus.token_counts(found.split.train_N, 320)
        drafter = checkpoint.initialise(
            config.regime,
            target,
            config.drafter,
            token_counts={t: int(counts[t]) for t in counts.nonzero()[0].tolist()},
            seed=config.seed,
        )
    else:
        drafter = checkpoint.load(start_from, target)
        if kind == "carryover":
            drafter.add_carried_context(config.carried)
    checkpoint.save(drafter, assignment.run_folder / "initial", {})
    return assignment


class Remember:
    """A reporter that keeps all records, and asks to stop at a step."""

    def __init__(self, stop_at=None):
        self.events = []
        self._stop_at = stop_at

    def report(self, event):
        self.events.append(event)

    def stop_requested(self):
        done = max((e["step"] for e in self.of("step")), default=0)
        return self._stop_at is not None and done + 1 >= self._stop_at

    def of(self, kind):
        return [event for event in self.events if event["kind"] == kind]

    def losses(self):
        return [event["metrics"]["loss"] for event in self.of("step")]


def train(assignment, *, stop_at=None, workers=None):
    """Train in this process from wherever the run stands."""
    reporter = Remember(stop_at)
    loop = build_loop(assignment, workers=workers or Workers(), reporter=reporter)
    loop.run()
    return loop, reporter


def weights(checkpoint_folder):
    """All tensors of a checkpoint."""
    from safetensors.torch import load_file

    return load_file(checkpoint_folder / "model.safetensors")
