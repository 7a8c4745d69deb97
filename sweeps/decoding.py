"""Sweep decoding settings: a trial starts one engine and measures it at every load.

Measuring is `carryover.bench`'s own code, against the endpoint that `carryover.serving` starts, so
figures are those of `platform bench online`. Running a sweep again measures what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from carryover.durable import write_whole
from carryover.errors import ServingError
from carryover.tracking import Tracker
from sweeps.answer import gains_by_title, points_of
from sweeps.conductor import Listener, Task
from sweeps.halving import rate_under_limit, why_stop
from sweeps.ledger import Ledger
from sweeps.loading import CONFIG_FILE, open_ledger
from sweeps.measuring import measure_function
from sweeps.records import Records, record_answer, record_gains, recorded
from sweeps.running import SearchedPlan, run_missing
from sweeps.search import Listed, OptunaSearch, Score, Search, sample, score_of
from sweeps.settings import (
    Load,
    Measurement,
    Setting,
    SweepConfig,
    settings_of,
)
from sweeps.tuning import RunFigures, smallest_node_cpus

CPUS_BESIDE_GPU = 4.0


def run(
    config: SweepConfig,
    *,
    tracker: Tracker | None = None,
    listeners: Sequence[Listener] = (),
    budget_s: float | None = None,
    retry_failed: bool = False,
    answer: Callable[[Ledger], Sequence[Path]] | None = None,
) -> RunFigures | None:
    """Measure what a sweep still lacks; None if that is nothing.

    Args:
        config: the sweep.
        tracker: where to record it; None records nothing.
        listeners: are told of everything that happens.
        budget_s: after which nothing is started, and what runs is cut.
        answer: writes what was found to files, which are then recorded.
        retry_failed: try settings again that failed for good.

    Raises:
        ConfigError: `out` holds another sweep's results, or `measure` cannot be imported.
        ServingError: no engine of the sweep could be measured, or the cluster cannot hold one.
    """
    config = config.absolute()
    measure_function(config.measure)
    ledger = open_ledger(config)
    write_whole(config.out / CONFIG_FILE, config.to_yaml())
    plan = DecodingPlan(config, ledger, retry_failed=retry_failed)
    with recorded(tracker, config.out, config.model_dump(mode="json")) as parent:
        records = None
        if parent is not None:
            records = Records(
                parent, title=title_of, load_params=("temperature", "concurrency"),
                logs=config.out / "logs",
            )  # fmt: skip
        figures = run_missing(
            plan,
            work=partial(work, config.model_dump(mode="json")),
            ledger=ledger,
            resources=config.resources,
            placement=lambda: {
                "bundle": bundle(config),
                "max_concurrent": config.resources.max_concurrent,
            },
            records=records,
            tracker=tracker,
            listeners=listeners,
            budget_s=budget_s,
        )
        if parent is not None:
            found = points_of(config, ledger.figures)
            record_gains(tracker, parent, gains_by_title(config, found))
        if not ledger.figures and not (figures and figures.out_of_time):
            raise ServingError(
                f"no engine of the sweep could be measured; see {ledger.trials_file}"
            )
        record_answer(parent, ledger, answer)
    return figures


def bundle(config: SweepConfig) -> dict[str, float]:
    """What one trial reserves: GPUs of its engine, or a whole node where engines run on cores."""
    cpus = config.resources.cpus
    if config.serve.resources.device == "gpu":
        gpus = config.serve.engine.tensor_parallel_size * config.serve.resources.replicas
        reserved = {"CPU": cpus or CPUS_BESIDE_GPU, "GPU": float(gpus)}
        kind = config.serve.resources.accelerator_type
        return reserved if kind is None else {**reserved, f"accelerator_type:{kind}": 0.001}
    return {"CPU": cpus or smallest_node_cpus()}


def work(
    config: Mapping[str, Any],
    task: Mapping[str, Any],
    parts: Sequence[tuple],
    ready: Callable[[], None],
) -> Iterator[dict[str, Any]]:
    """What a trial does; see `tuning.Work`."""
    sweep = SweepConfig.parse(config)
    measure = measure_function(sweep.measure)
    for measurement in measure(sweep, Setting.parse(task), [Load(*p) for p in parts], ready):
        yield measurement.row()


def title_of(row: Mapping[str, Any]) -> str:
    """Name of a measurement's run."""
    return Measurement.parse(row).title


class DecodingPlan(SearchedPlan):
    """Settings from the search, stopped early where that is asked for."""

    cuts = False

    def __init__(self, config: SweepConfig, ledger: Ledger, *, retry_failed: bool = False) -> None:
        self.config, self.ledger, self._retry = config, ledger, retry_failed
        self.loads = [(load.temperature, load.concurrency) for load in config.loads()]
        every = settings_of(config)
        self._plain = [setting for setting in every if setting.drafter is None]
        drafting = [setting for setting in every if setting.drafter is not None]
        if config.search.kind == "random":
            every = sample(drafting, config.search, references=self._references)
        self.settings = {setting.name: setting for setting in every}
        self.tasks = {setting.name: self._task(setting) for setting in every}
        self._counted: dict[str, dict[tuple, float]] = {}
        for name in self.tasks:
            self._count(name)
        self.search: Search = Listed(every, over=self.is_over)
        if config.search.kind == "optuna":
            self.search = OptunaSearch(
                {self._choice(setting): setting for setting in drafting},
                config.search, config.out / "optuna.db", over=self.is_over, score=self.score,
                both=config.objective.pareto, references=self._references,
            )  # fmt: skip

    @property
    def size(self) -> int:
        """How many settings there will be; with Optuna at most."""
        if self.config.search.kind != "optuna":
            return len(self.settings)
        drafting = len(self.settings) - len(self._plain)
        return min(self.config.search.num_settings, drafting) + len(self._plain)

    def _references(self, setting: Setting) -> list[Setting]:
        return [plain for plain in self._plain if plain.engine == setting.engine]

    def _choice(self, setting: Setting) -> tuple[tuple[str, Any], ...]:
        """A setting as Optuna's parameters; the length only where every arm has the same ones."""
        params = {"arm": setting.arm, **dict(setting.engine)}
        if self.config.proposal_lengths is not None:
            params["num_speculative_tokens"] = setting.num_speculative_tokens
        return tuple(sorted(params.items()))

    def why_stop(self, task: Task) -> str | None:
        """See `conductor.Plan`."""
        self._count(task.name)
        rule = self.config.early_stop
        if rule is None:
            return None
        spared = [setting.name for setting in self._plain]
        return why_stop(task.name, self._counted, self.loads, rule, spared=spared)

    def _task(self, setting: Setting) -> Task:
        return Task(setting.name, asdict(setting), setting.params, tuple(self.loads))

    def is_over(self, setting: Setting) -> bool:
        """See `SearchedPlan`."""
        if self.ledger.is_over(setting.name, retry_failed=self._retry):
            return True
        return all(self.ledger.has(setting.name, load) for load in self.loads)

    def _count(self, name: str) -> None:
        """Throughput that counts at each load so far."""
        limit = self.config.objective.max_tpot_p95_ms
        self._counted[name] = {
            load: rate_under_limit(values[0], values[3], limit)
            for load, values in self.ledger.figures.get(name, {}).items()
            if load in self.tasks[name].parts
        }

    def score(self, name: str) -> Score | None:
        """See `SearchedPlan`."""
        tpots = self.ledger.figures.get(name, {})
        pairs = {load: (rate, tpots[load][3]) for load, rate in self._counted[name].items()}
        return score_of(pairs, len(self.loads))
